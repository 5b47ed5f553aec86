"""The large search over waves: python -m tests.sim.explore_waves [--states N] [--only TEXT]. Prints the states of each setting.

Each setting is searched to its end, or to its N nearest states. Ends with status 1 and the shortest way there if a rule is broken.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.explore import Violation, explore
from tests.sim.wave_model import Setting, WaveModel

ONE = ((0, 1),)
TWO = ((0, 1), (1, 1))
LONG = ((0, 2), (1, 1))
KEEP, WAIT, ABORT = ("keep", ""), ("wait", ""), ("abort", "")

SETTINGS = {
    "3 ranks, 2 requests, wait": Setting(LONG, (WAIT,)),
    "3 ranks, 2 requests, abort": Setting(LONG, (ABORT,)),
    "3 ranks, 1 request, keep, crash": Setting(ONE, (KEEP,), crashes=1),
    "3 ranks, 1 request, wait, crash": Setting(((0, 2),), (WAIT,), crashes=1),
    "3 ranks, 1 request, keep, new coordinator": Setting(ONE, (KEEP,), restarts=1),
    "3 ranks, 1 request, wait, new coordinator": Setting(((0, 2),), (WAIT,), restarts=1),
    "3 ranks, 2 requests, keep, new coordinator": Setting(TWO, (KEEP,), restarts=1),
    "3 ranks, 2 requests, keep, crash": Setting(TWO, (KEEP,), crashes=1),
    "3 ranks, 1 request, crash, new coordinator": Setting(ONE, crashes=1, restarts=1),
    "3 ranks, 1 request, keep, crash, new coordinator": Setting(ONE, (("keep",),), crashes=1, restarts=1),
    "3 ranks, 1 request, two clients that pause": Setting(ONE, (KEEP, WAIT)),
    "3 ranks, 2 requests, keep, two steps ahead": Setting(LONG, (KEEP,), depth=2),
    "4 ranks, 1 request, keep": Setting(ONE, (KEEP,), ranks=4),
    "2 ranks, 3 requests, keep, crash, new coordinator": Setting((*LONG, (0, 1)), (KEEP,), 1, 1, ranks=2),
    "2 ranks, 2 requests, two clients that pause, crash": Setting(LONG, (KEEP, WAIT), crashes=1, ranks=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=1_000_000, help="most states of one setting")
    parser.add_argument("--only", default="", help="settings whose name has this text")
    args = parser.parse_args()
    num_states = 0
    for name, setting in SETTINGS.items():
        if args.only not in name:
            continue
        began = time.monotonic()
        try:
            seen = explore(WaveModel(setting), most=args.states)
        except Violation as violation:
            print(f"{name}: BROKEN: {violation}")
            return 1
        num_states += seen.num_states
        print(f"{name}: {seen} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{num_states} states, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
