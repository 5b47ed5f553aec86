"""Work stealing: which engine must return waiting requests, and which idle engine receives them.

Pure. Used by core.py. It only proposes: the loaded engine drops sequences that never started and says so in the ordered stream of
its outputs, and the frontend, which owns each request, submits them to the other one. So no request is lost or runs twice,
whichever process dies: a sequence is on the engine until the frontend has read that it is not. A lost order is given again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme.coordinator.ledger import Outstanding
from trireme.coordinator.router import KV_COMFORT
from trireme.transport.wire.messages import GiveBack, Load

PATIENCE_S = 0.1  # a sequence that has waited less may be about to start
COOLDOWN_S = 0.25  # for both engines: until the stolen sequences have arrived and are in their reports
MAX_ROWS = 64  # per order


class Stealing:
    """`capacity` is the number of sequences that an engine can run at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._busy_until: dict[int, float] = {}
        self.num_asked = 0  # sequences

    def orders(self, loads: Sequence[Load], outstanding: Callable[[int], Outstanding], now: float) -> list[GiveBack]:
        """Orders for engines with these reports (all ready, all in one zone that frontends reach): the idlest one takes from the
        fullest one, and so on."""
        free = [load for load in loads if self._busy_until.get(load.engine, 0.0) <= now]
        thieves = sorted(
            (load for load in free if self._has_room(load) and not outstanding(load.engine).num_rows),
            key=lambda load: load.num_running,
        )
        victims = sorted(
            (load for load in free if load.num_waiting > 0 and load.oldest_wait_s >= PATIENCE_S),
            key=lambda load: -load.num_waiting,
        )
        found = []
        for thief, victim in zip(thieves, victims, strict=False):
            surplus = (victim.num_waiting + victim.num_running - thief.num_running) // 2
            count = min(victim.num_waiting, surplus, self._capacity - thief.num_running, MAX_ROWS)
            if count <= 0:
                continue
            for load in (thief, victim):
                self._busy_until[load.engine] = now + COOLDOWN_S
            self.num_asked += count
            found.append(GiveBack(victim.engine, victim.epoch, count, thief.engine))
        return found

    def _has_room(self, load: Load) -> bool:
        return (
            load.num_waiting == 0
            and load.num_running < self._capacity
            and load.blocks_used <= KV_COMFORT * load.num_blocks
        )
