"""Shared by the benchmarks: samples of single requests, their summary, prompts without cache hits, and the result.

A result names the model, the machine and the settings; the table goes to stdout, or one JSON object with --json.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from trireme import __version__
from trireme.config import EngineConfig
from trireme.launch.bench.slo import Slo
from trireme.launch.options import Invocation
from trireme.launch.terminal import show
from trireme.machine.device import read_device
from trireme.metrics import percentile
from trireme.settings import SECRET, table

# Frequent English words; in most vocabularies each is one token together with the space before it.
_TEXT = (
    "the of and to in is was for that on with as by at from his an were are which have be this had but not they or all "
    "their her there been one who when would more no if out so said what up its about into than them can only other new "
    "some could time these two may then do first any my now such like our over man me even most made after also did many "
    "before must through back years where much your way well down should because each just those people how too little "
    "state good very make world still own see men work long get here between both life being under never day same another"
)
WORDS = _TEXT.split()


class Sample(NamedTuple):
    """One request as its client saw it; times in seconds. `times` has the arrival of each piece with text."""

    sent: float
    times: tuple[float, ...]
    num_prompt: int
    num_output: int
    error: str = ""


class RunSummary(NamedTuple):
    """Summary of one run: its name and its figures. `series` groups the runs that form one line of a plot."""

    name: str
    figures: dict[str, float]
    series: str = ""


def summarize(samples: Sequence[Sample], wall_s: float, slo: Slo | None = None) -> dict[str, float]:
    """Rates over the wall time; percentiles in milliseconds of the time to the first token (one value a request) and of the time
    between tokens (every gap of every request); with an `slo` also goodput and attainment."""
    answered = [sample for sample in samples if not sample.error and sample.times]
    first_ms = [(s.times[0] - s.sent) * 1e3 for s in answered]
    gaps_ms = [(b - a) * 1e3 for s in answered for a, b in zip(s.times, s.times[1:], strict=False)]
    outputs, prompts = sum(s.num_output for s in answered), sum(s.num_prompt for s in answered)
    streams = [
        (s.num_output - 1) / (s.times[-1] - s.times[0]) for s in answered if s.num_output > 1 and len(s.times) > 1
    ]
    figures = {
        "requests": float(len(samples)),
        "errors": float(len(samples) - len(answered)),
        "wall_s": wall_s,
        "output_tok_s": outputs / wall_s,
        "total_tok_s": (outputs + prompts) / wall_s,
        "stream_tok_s": percentile(streams, 50),
        "ttft_p50_ms": percentile(first_ms, 50),
        "ttft_p95_ms": percentile(first_ms, 95),
        "ttft_p99_ms": percentile(first_ms, 99),
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p95_ms": percentile(gaps_ms, 95),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "itl_max_ms": percentile(gaps_ms, 100),
    }
    if slo is not None:
        num_good = sum(slo.is_kept(sample.sent, sample.times) for sample in answered)
        figures["goodput_req_s"] = num_good / wall_s
        figures["attainment"] = num_good / len(samples) if samples else math.nan
    return figures


def make_text(num_words: int, seed: int) -> str:
    """A prompt of about `num_words` tokens with a unique beginning, so that a prefix cache is no help."""
    chosen = random.Random(seed).choices(WORDS, k=max(num_words, 1))
    return " ".join(chosen)


def make_ids(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """A prompt of exactly `num_tokens` ids; the low ones, which are often special, are left out."""
    low = min(256, vocab_size // 2)
    return random.Random(seed).choices(range(low, min(vocab_size, 32000)), k=num_tokens)


COUNTS = ("requests", "errors", "clients", "rate")


def ratio_row(name: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> RunSummary:
    """Median over pairs of runs of (first / second), per figure; the two runs of a pair were consecutive."""
    first = pairs[0][0]
    figures = {key: percentile([a[key] / b[key] for a, b in pairs if b[key]], 50) for key in first if key not in COUNTS}
    return RunSummary(name, figures, "ratio")


def report_errors(samples: Sequence[Sample]) -> None:
    """Tells on stderr which errors there were, and how often."""
    for error, times in Counter(sample.error for sample in samples if sample.error).items():
        show(f"{times} x {error}", to=sys.stderr)


def publish(
    invocation: Invocation,
    model: str,
    rows: Sequence[RunSummary],
    config: EngineConfig | None,
    **more: dict[str, float],
) -> None:
    """Prints the result. `config` is the resolved one of the engine measured; None for a server started by others. `more` is
    for the JSON document alone."""
    if invocation.options["json"]:
        print(json.dumps(_document(invocation, model, rows, config) | more, indent=1))
        return
    from trireme.launch.console import Console

    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    cells = [[row.name, *(shown_figure(row.figures.get(name)) for name in names)] for row in rows]
    Console(sys.stdout).table(["", *names], cells)


def shown_figure(value: float | None) -> str:
    """Three digits, or all of a whole number; `-` for none."""
    if value is None or value != value:
        return "-"
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _document(
    invocation: Invocation, model: str, rows: Sequence[RunSummary], config: EngineConfig | None
) -> dict[str, Any]:
    device = read_device()
    values = [] if config is None else [(s, getattr(getattr(config, s.group), s.name)) for s in table()]
    return {
        "command": invocation.command.name,
        "version": __version__,
        "model": model,
        "machine": {"cpu": device.cpu, "cores": device.cores, "isa": device.isa, "gpus": device.num_gpus},
        "options": {k: v for k, v in invocation.options.items() if k not in ("json", "config")},
        "settings": {s.name: value for s, value in values if value != s.default and s.name not in SECRET},
        "rows": [
            {"name": row.name, "series": row.series, **{k: None if v != v else v for k, v in row.figures.items()}}
            for row in rows
        ],
    }
