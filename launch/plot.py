"""Small SVG plots as text: lines over steps, and bars. Used by launch/commands/report.py; knows nothing of benchmarks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 26
LEGEND = 16  # height of one legend line
COLORS = ("#1f6fb4", "#d9641e", "#2a9d5c", "#9b3fb5", "#777777", "#b8860b")


class Line(NamedTuple):
    """A named curve: value by x."""

    name: str
    points: dict[float, float]


def lines(curves: Sequence[Line], axis: str) -> str:
    """Curves over common x values; values that span more than a decade are on a logarithmic axis."""
    places = sorted({at for curve in curves for at in curve.points})
    is_log = places[0] > 0 and places[-1] / places[0] > 10
    low, high = (math.log(places[0]), math.log(places[-1])) if is_log else (places[0], places[-1])
    top = _ceiling(max(value for curve in curves for value in curve.points.values()))

    def x(at: float) -> float:
        share = ((math.log(at) if is_log else at) - low) / ((high - low) or 1)
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    marks = [f"<text x='{x(at):.1f}' y='{HEIGHT - 10}' text-anchor='middle'>{at:g}</text>" for at in places]
    marks.append(f"<text x='{LEFT - 6}' y='{HEIGHT - 10}' text-anchor='end'>{html.escape(axis)}</text>")
    drawn = []
    for i, curve in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        spots = [(x(at), _y(value, top), at, value) for at, value in curve.points.items()]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in spots)
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>")
        for a, b, at, value in spots:
            told = html.escape(f"{curve.name} at {at:g}: {value:.4g}")
            drawn.append(f"<circle cx='{a:.1f}' cy='{b:.1f}' r='3' fill='{color}'><title>{told}</title></circle>")
    return _frame([*marks, *drawn], [curve.name for curve in curves], top)


def bars(curves: Sequence[Line]) -> str:
    """One bar per curve: its first value."""
    values = [next(iter(curve.points.values())) for curve in curves]
    top = _ceiling(max(values))
    room = (WIDTH - LEFT - RIGHT) / len(values)
    drawn = []
    for i, value in enumerate(values):
        left, height = LEFT + room * (i + 0.2), HEIGHT - BOTTOM - _y(value, top)
        color = COLORS[i % len(COLORS)]
        drawn.append(
            f"<rect x='{left:.1f}' y='{_y(value, top):.1f}' width='{room * 0.6:.1f}' height='{height:.1f}' fill='{color}'/>"
        )
        middle = left + room * 0.3
        drawn.append(f"<text x='{middle:.1f}' y='{HEIGHT - 10}' text-anchor='middle'>{value:.4g}</text>")
    return _frame(drawn, [curve.name for curve in curves], top)


def _frame(inside: Sequence[str], names: Sequence[str], top: float) -> str:
    grid = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share * top, top)
        grid.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e4e4e4'/>")
        grid.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{share * top:.4g}</text>")
    legend = []
    for i, name in enumerate(names):
        y = HEIGHT + LEGEND * (i + 1) - 4
        legend.append(f"<rect x='{LEFT}' y='{y - 9}' width='10' height='10' fill='{COLORS[i % len(COLORS)]}'/>")
        legend.append(f"<text x='{LEFT + 16}' y='{y}'>{html.escape(name[:60])}</text>")
    height = HEIGHT + LEGEND * len(names) + 6
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    body = "".join([*grid, *inside, *legend])
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-size='11' fill='#444' role='img'>{body}</svg>"


def _y(value: float, top: float) -> float:
    return TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM)


def _ceiling(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten: divides into four even grid lines."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= value * 0.9999)
