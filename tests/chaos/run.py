"""Injects faults into real deployments under mixed streams, and says which promises held: `python -m tests.chaos.run`.

  --fault NAME ...   only these (default: all); a family (kill, freeze, message, resource, request) names all of its own
  --times N          injections of each         --seed S    reproduces one choice of moments
  --minutes M        begins no round after them --json FILE the verdicts as a file
  --list             names what there is    --tell-late what is noticed late is told, and fails nothing: for a machine that
                                           others use

The status is 1 unless every injection that was made passed. What cannot be done yet is listed, and counts for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.rounds import Verdict, run_round
from tests.chaos.shapes import site_of

PRIVATE = "CHAOS_IS_PRIVATE"
MOST_EMPTY = 3  # rounds beyond twice as many as wanted, for those that hit nothing or were disturbed by the machine


def chosen(names: Sequence[str]) -> list[Fault]:
    """Raises SystemExit for a name that is neither a fault's nor a family's."""
    known = {fault.name for fault in FAULTS} | {fault.family for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"error: there is no fault {unknown[0]!r}; --list shows them")
    mine = [fault for fault in FAULTS if not names or fault.name in names or fault.family in names]
    if any(fault.shape == "full" for fault in mine) and not can_mount():
        cannot = {"missing": "this user may not mount file systems", "inject": None}
        return [replace(fault, **cannot) if fault.shape == "full" else fault for fault in mine]  # type: ignore[arg-type]
    return mine


def can_mount() -> bool:
    """Whether file systems can be made in a mount namespace of our own."""
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    return False


def run_faults(faults: Sequence[Fault], times: int, seed: int, until: float = float("inf")) -> dict[str, list[Verdict]]:
    """Verdicts by fault, one deployment per shape. `until`: no round begins after this reading of time.monotonic."""
    found: dict[str, list[Verdict]] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        for shape in dict.fromkeys(fault.shape for fault in faults if not fault.missing):
            if time.monotonic() > until:
                break
            mine = [fault for fault in faults if fault.shape == shape and not fault.missing]
            with site_of(shape, Path(directory)) as site:
                print(f"{shape}: {len(site.bodies)} streams, {site.usual_s:.2f} s undisturbed", flush=True)
                for fault in mine:
                    rng = Random(f"{fault.name} {seed}")
                    found[fault.name] = verdicts = []
                    for at in range(2 * times + MOST_EMPTY):
                        if sum(verdict.num_running > 0 for verdict in verdicts) >= times or time.monotonic() > until:
                            break
                        verdicts.append(run_round(site, fault, rng))
                        for breach in verdicts[-1].breaches + verdicts[-1].late:
                            what = f"{verdicts[-1].what} {verdicts[-1].died}"
                            print(f"{fault.name} round {at} seed {seed}: {breach}; {what}", flush=True)
                    print(row_of(fault, verdicts), flush=True)
    return found


def go_private() -> None:
    """Begins again in a mount namespace of its own, where file systems can be made for some faults and nobody else sees them."""
    os.environ[PRIVATE] = "1"
    program = [sys.executable, "-m", "tests.chaos.run", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *program])


def row_of(fault: Fault, verdicts: Sequence[Verdict]) -> str:
    """One line of the table."""
    if fault.missing:
        return f"{fault.name:28} not applicable: {fault.missing}"
    counted = [verdict for verdict in verdicts if verdict.num_running]
    noticed = sorted(verdict.noticed_s for verdict in counted if verdict.noticed_s is not None)
    told = f"noticed {noticed[len(noticed) // 2]:5.2f} s median {noticed[-1]:5.2f} s longest" if noticed else ""
    num_bad = sum(bool(verdict.breaches) for verdict in verdicts)
    num_late, broken = sum(bool(verdict.late) for verdict in counted), sum(verdict.num_broken for verdict in counted)
    counts = f"{len(counted):3} injections {num_bad:3} bad {num_late:3} late {broken:4} connections cut as allowed"
    return f"{fault.name:28} {counts}  {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fault", nargs="*", default=[])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tell-late", action="store_true")
    options = parser.parse_args()
    faults = chosen(options.fault)
    if options.list:
        print(*(f"{fault.name:28} {fault.missing or fault.shape}" for fault in faults), sep="\n")
        return 0
    until = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    if any(fault.shape == "full" and not fault.missing for fault in faults) and not os.environ.get(PRIVATE):
        go_private()
    found = run_faults(faults, options.times, options.seed, until)
    print(*(row_of(fault, found.get(fault.name, [])) for fault in faults), sep="\n")
    if options.json:
        table = {name: [asdict(verdict) for verdict in verdicts] for name, verdicts in found.items()}
        options.json.write_text(json.dumps({"seed": options.seed, "faults": table}, indent=1))
    verdicts = [verdict for some in found.values() for verdict in some]
    num_done = sum(verdict.num_running > 0 for verdict in verdicts)
    num_bad = sum(bool(verdict.breaches) for verdict in verdicts)
    num_late = sum(bool(verdict.late) for verdict in verdicts)
    num_missing = sum(bool(fault.missing) for fault in faults)
    counts = f"{num_done} injections of {len(found)} faults, {num_bad} bad, {num_late} late"
    print(f"chaos: {counts}; {num_missing} not applicable")
    is_short = any(sum(v.num_running > 0 for v in some) < options.times for some in found.values())
    return int(num_bad > 0 or (num_late > 0 and not options.tell_late) or (is_short and time.monotonic() < until))


if __name__ == "__main__":
    sys.exit(main())
