"""What a front end shares with the others of its deployment: accounts of callers, room in the engines, what engines have counted.

Made by serving/main.py, or by default for a front end alone; used by serving/front.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from trireme.serving.admission.accounts import SharedQuotas
from trireme.serving.admission.occupancy import Occupancy
from trireme.serving.admission.quota import Accounts, Quotas
from trireme.serving.metrics.telemetry import ENGINE_COUNTERS
from trireme.serving.metrics.totals import EngineTotals

log = logging.getLogger(__name__)


class SharedState(NamedTuple):
    """`num_fronts` front ends share the engines of this one, itself included."""

    accounts: Accounts
    occupancy: Occupancy
    totals: EngineTotals
    num_fronts: int


def alone() -> SharedState:
    """For a front end that knows of no other."""
    return SharedState(Quotas(), Occupancy(), EngineTotals(ENGINE_COUNTERS), 1)


def open_shared_state(run_dir: str, index: int, num_fronts: int, *, has_own_engines: bool = False) -> SharedState:
    """For number `index` of `num_fronts`. With `has_own_engines` the others use other engines, but callers are the same. Where the
    directory takes no files, each front end counts for itself."""
    directory, num_sharing = Path(run_dir), 1 if has_own_engines else num_fronts
    try:
        return SharedState(
            SharedQuotas(directory / "callers"),
            Occupancy(directory / "occupancy", index) if num_sharing > 1 else Occupancy(),
            EngineTotals(ENGINE_COUNTERS, directory / "engines.totals"),
            num_sharing,
        )
    except OSError as error:
        log.warning("limits hold for each HTTP process by itself: %s takes no files. error=%s", run_dir, error)
        return alone()
