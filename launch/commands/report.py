"""`trireme report A [B]`: JSON results of benchmarks as one self-contained HTML page with inline SVG, alone or compared.

The files may come from elsewhere: everything from them is checked and escaped, and the page loads no external resources.
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trireme.errors import ConfigError
from trireme.launch.options import Invocation
from trireme.launch.plot import Line, bars, lines
from trireme.metrics import percentile

MAX_BYTES = 32 << 20
MAX_ROWS = 2000
# Figures by importance: what is plotted of each benchmark, and whether lower is better.
PLOTTED = {
    "output_tok_s": False,
    "total_tok_s": False,
    "goodput_req_s": False,
    "attainment": False,
    "stream_tok_s": False,
    "prefill_tok_s": False,
    "ttft_p50_ms": True,
    "ttft_p99_ms": True,
    "itl_p50_ms": True,
    "itl_p99_ms": True,
    "itl_max_ms": True,
    "total_s": True,
    "weights_s": True,
    "libraries_s": True,
    "device_s": True,
    "graphs_s": True,
    "measure_s": True,
    "first_token_s": True,
    "burst_spread": True,
    "amid_spread": True,
    "hit_share": False,
    "route_us": True,
    "resident_mib": True,
    "own_mib": True,
}
STEPS = ("clients", "rate", "running", "fronts")


class Result(msgspec.Struct):
    """The output of a benchmark's `--json`."""

    command: str
    model: str
    rows: list[dict[str, str | float | None]]
    version: str = ""
    machine: dict[str, Any] = {}
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class Run(NamedTuple):
    """A result with the letter and file name shown on the page."""

    label: str
    result: Result


def run(invocation: Invocation) -> int:
    """Writes the page and prints where."""
    names = [name for name in (invocation.options["a"], invocation.options["b"]) if name]
    if not names:
        raise ConfigError("a report needs the JSON result of a benchmark", hint="trireme bench serve --json > A.json")
    letters = ("A", "B") if len(names) > 1 else ("",)
    runs = [
        Run(f"{letter} {Path(name).name}".strip(), read(Path(name)))
        for letter, name in zip(letters, names, strict=True)
    ]
    text = page(runs)
    if invocation.options["output"] == "-":
        sys.stdout.write(text)
    else:
        write(invocation.options["output"], text)
        print(invocation.options["output"])
    return 0


def write(name: str, text: str) -> None:
    """Writes a file. Raises ConfigError where that fails."""
    try:
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--output is {name!r}; it cannot be written: {error.strerror}") from error


def read(path: Path) -> Result:
    """A benchmark's result. Raises ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes, the limit for a result")
        result = msgspec.json.decode(content, type=Result)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not the JSON result of a benchmark: {error}") from error
    if len(result.rows) > MAX_ROWS:
        raise ConfigError(f"{path} has {len(result.rows)} rows; a report shows at most {MAX_ROWS}")
    return result


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = " against ".join(run.label for run in runs)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_safe(title)}</title><style>{_STYLE}</style>",
        f"<h1>{_safe(runs[0].result.command)}: {_safe(title)}</h1>",
        _facts(runs),
        *_plots(runs),
        *(_compared(runs) if len(runs) > 1 else []),
        *(_rows(run) for run in runs),
        "</html>\n",
    ]
    return "\n".join(parts)


# ---------------------------------------------------------------- figures


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan


def _series(run: Run) -> list[str]:
    return list(dict.fromkeys(str(row.get("series") or "") for row in run.result.rows if row.get("series") != "ratio"))


def _medians(run: Run, series: str, figure: str, step: str) -> dict[float, float]:
    """Median of a figure per load point; without load points, over all rows."""
    found: dict[float, list[float]] = {}
    for row in run.result.rows:
        value = _number(row.get(figure))
        if str(row.get("series") or "") == series and not math.isnan(value):
            found.setdefault(_number(row[step]) if row.get(step) is not None else 0.0, []).append(value)
    return {at: percentile(values, 50) for at, values in sorted(found.items())}


def _step_of(runs: Sequence[Run]) -> str:
    return next((step for step in STEPS if all(step in row for run in runs for row in run.result.rows[:1])), "")


def _curves(runs: Sequence[Run], figure: str, step: str) -> list[Line]:
    curves = []
    for run in runs:
        kinds = _series(run)
        for kind in kinds:
            points = _medians(run, kind, figure, step)
            if points:
                curves.append(Line(f"{run.label} {kind}".strip() if len(kinds) > 1 else run.label, points))
    return curves


def _plots(runs: Sequence[Run]) -> list[str]:
    step = _step_of(runs)
    parts = []
    for figure, is_less_better in PLOTTED.items():
        curves = _curves(runs, figure, step)
        if not curves:
            continue
        better = "less is better" if is_less_better else "more is better"
        drawn = lines(curves, step) if max(len(curve.points) for curve in curves) > 1 else bars(curves)
        parts.append(f"<figure><figcaption>{_safe(figure)} <small>{better}</small></figcaption>{drawn}</figure>")
    return ["<section>", *parts, "</section>"]


def _compared(runs: Sequence[Run]) -> list[str]:
    """Medians side by side and B / A, per series, load point and figure common to both."""
    step, rows = _step_of(runs), []
    first, second = runs
    for kind in _series(first):
        for figure, is_less_better in PLOTTED.items():
            a, b = (_medians(run, kind, figure, step) for run in runs)
            for at in a:
                if at in b and a[at]:
                    ratio = b[at] / a[at]
                    is_better = ratio < 1 if is_less_better else ratio > 1
                    mark = "" if abs(ratio - 1) < 0.02 else "better" if is_better else "worse"
                    where = f"{step}={at:g}" if step else ""
                    cells = [kind, figure, where, f"{a[at]:.4g}", f"{b[at]:.4g}", f"{ratio:.3f}"]
                    rows.append(
                        f"<tr class='{mark}'>" + "".join(f"<td>{_safe(cell)}" for cell in cells) + f"<td>{mark}"
                    )
    head = "".join(
        f"<th>{_safe(name)}" for name in ("series", "figure", "step", first.label, second.label, "B / A", "")
    )
    return [f"<h2>Compared</h2><table><tr>{head}", *rows, "</table>"]


# ---------------------------------------------------------------- text


def _facts(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        result, machine = run.result, run.result.machine
        told = [
            f"{key}={value}"
            for key, value in {**result.options, **result.settings}.items()
            if value not in (None, [], "")
        ]
        cells = [run.label, result.command, result.model, result.version]
        cells += [f"{machine.get('cores', '?')} cores {machine.get('cpu', '')}", " ".join(told)]
        rows.append("<tr>" + "".join(f"<td>{_safe(cell)}" for cell in cells))
    return "<table><tr><th>run<th>command<th>model<th>version<th>machine<th>how" + "".join(rows) + "</table>"


def _rows(run: Run) -> str:
    names = list(dict.fromkeys(key for row in run.result.rows for key in row if key not in ("name", "series")))
    head = "<tr><th>" + "".join(f"<th>{_safe(name)}" for name in names)
    body = [
        f"<tr><td>{_safe(row.get('name'))}" + "".join(f"<td>{_shown(row.get(n))}" for n in names)
        for row in run.result.rows
    ]
    return f"<h2>{_safe(run.label)}</h2><table>{head}{''.join(body)}</table>"


def _shown(value: Any) -> str:
    number = _number(value)
    return "-" if math.isnan(number) else f"{number:.4g}"


def _safe(text: Any) -> str:
    return html.escape(str(text)[:2000])


_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}td,th{padding:.2em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}section{display:flex;flex-wrap:wrap;gap:1em}"
    "figure{margin:0;border:1px solid #ddd;padding:.6em;border-radius:6px}figcaption{font-weight:600}small{font-weight:400;"
    "color:#777}.better td:last-child{color:#0a7a35}.worse td:last-child{color:#b3261e}"
)
