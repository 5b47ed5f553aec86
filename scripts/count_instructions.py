"""Counts instructions of the hot paths under valgrind and compares them with scripts/instructions.json: `make count`.

A count does not depend on the load of the machine, so a regression of a few percent shows. `--write` makes the measured counts
the new budget. Nothing is installed: without valgrind it reports that and exits with 3.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Path(__file__).with_suffix("").with_name("instructions.json")
TOLERANCE = 0.05
NO_VALGRIND = 3


def schedule(times: int) -> None:
    """Plan and result of a decode step of 64 sequences."""
    from trireme.engine_core.bench import measure

    measure(64, 5 + 100 * times)


def codec(times: int) -> None:
    """Encoding and decoding one step's plan, result and outputs of 64 sequences."""
    from trireme.transport.wire.codec import decode, encode
    from trireme.transport.wire.columns import pack, pack_ids
    from trireme.transport.wire.messages import StepOutputs, StepPlan, StepResult

    rows, ids = pack(range(64)), pack_ids(range(64))
    plan = StepPlan(1, [], [], b"", b"", [], rows, pack([1] * 64), pack([500] * 64), pack([77] * 64), b"\1" * 64)
    messages = [plan, StepResult(1, rows, rows), StepOutputs(0, 1, ids, rows)]
    for _ in range(5 + 100 * times):
        for message in messages:
            decode([bytes(frame) for frame in encode(message)], StepPlan | StepResult | StepOutputs)


def detokenize(times: int) -> None:
    """Tokens to text, with a stop string to search for."""
    from trireme.serving.text.detokenizer import Detokenizer, TokenText

    text = TokenText(_Bytes())
    state = Detokenizer(text, stops=["nowhere"])
    for i in range(512 + 1000 * times):
        state.push(i % 256)


class _Bytes:
    """A byte vocabulary; bytes from 128 on are parts of characters."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return b"word " if token < 128 else bytes([token])


def decode_avx2(times: int) -> None:
    """The whole native stage of a small model, AVX2 kernels."""
    from scripts.native_cases import decode

    decode("avx2", 20 * times)


def decode_portable(times: int) -> None:
    """The same with the portable kernels."""
    from scripts.native_cases import decode

    decode("portable", times)


def sample(times: int) -> None:
    """The native sampler."""
    from scripts.native_cases import sample

    sample(times)


CASES: dict[str, Callable[[int], None]] = {
    "schedule": schedule,
    "codec": codec,
    "detokenize": detokenize,
    "decode-avx2": decode_avx2,
    "decode-portable": decode_portable,
    "sample": sample,
}
UNITS = {
    "schedule": "100 steps of 64 rows",
    "codec": "300 messages of 64 rows",
    "detokenize": "1000 tokens",
    "decode-avx2": "20 steps of 4 rows",
    "decode-portable": "1 step of 4 rows",
    "sample": "20 calls for 16 rows",
}


def count(case: str) -> int:
    """Instructions per unit of a case: a run with it minus a run without, so that start-up cancels out."""
    with_unit, without = (_instructions(case, times) for times in (1, 0))
    return with_unit - without


def _instructions(case: str, times: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/out",
            sys.executable,
            __file__,
            "--run",
            case,
        ]
        environment = {
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        environment |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*words, str(times)], env=environment, capture_output=True, text=True, cwd=folder)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"{case} failed under valgrind:\n{done.stderr[-3000:]}")
    return int(found[1])


def main(words: list[str]) -> int:
    """Counts the cases named in `words` (default: all); returns 1 when one exceeds its budget by more than TOLERANCE."""
    if words[:1] == ["--run"]:
        CASES[words[1]](int(words[2]))
        return 0
    if shutil.which("valgrind") is None:
        print("error: valgrind is not installed\n  try   apt-get install valgrind", file=sys.stderr)
        return NO_VALGRIND
    chosen = [word for word in words if word in CASES] or list(CASES)
    known = json.loads(BUDGET.read_text()) if BUDGET.exists() else {"python": "", "counts": {}}
    measured, failed = {}, False
    for case in chosen:
        measured[case] = count(case)
        before = known["counts"].get(case)
        change = measured[case] / before - 1 if before else 0.0
        failed |= change > TOLERANCE
        verdict = "too many" if change > TOLERANCE else "ok" if change > -TOLERANCE else "fewer: --write keeps it"
        print(f"{case:<17}{measured[case]:>14,}  {UNITS[case]:<26}{change:>+8.1%}  {verdict}", flush=True)
    if "--write" in words:
        told = {"python": platform.python_version(), "tolerance": TOLERANCE, "counts": known["counts"] | measured}
        BUDGET.write_text(json.dumps(told, indent=1) + "\n")
        return 0
    if failed and known["python"] != platform.python_version():
        print(f"the budget was made with Python {known['python']}: counts of another one differ", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
