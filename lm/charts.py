"""Charts as SVG, and the page around them: one HTML file that needs nothing else. Texts are under the mouse."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Dict, Iterable, List, Sequence, Tuple

WIDTH, HEIGHT, MARGIN = 900, 520, 70
COLOURS = ("#0b6fb8", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#be185d", "#0e7490", "#4d7c0f")
STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 960px; color: #1c1917 }
text { font-size: 12px; fill: #57534e } .grid { stroke: #e7e5e4; fill: none } circle { opacity: .75 }
.line { fill: none; stroke-width: 2; opacity: .8 } .line:hover { stroke-width: 4; opacity: 1 }
.legend span { margin-right: 1rem; white-space: nowrap }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; white-space: nowrap }
#difference td { white-space: normal; overflow-wrap: anywhere }
"""


@dataclass(frozen=True)
class Point:
    """x, y: above zero. group: what its colour tells. text: shown where the mouse rests on it."""

    x: float
    y: float
    group: str
    text: str


@dataclass(frozen=True)
class Line:
    """Points from left to right, with a name that the mouse shows."""

    name: str
    points: Sequence[Tuple[float, float]]


class Axis:
    """From one place to another, wide enough for its values; logarithmic for values above zero."""

    def __init__(self, values: Iterable[float], start: float, end: float, logarithmic: bool = False) -> None:
        self.start, self.end, self.logarithmic = start, end, logarithmic
        scaled = [math.log10(value) if logarithmic else value for value in values]
        low, high = min(scaled), max(scaled)
        margin = 0.05 if logarithmic else 0.02 * (high - low or abs(high) or 1.0)
        self.low, self.high = low - margin, high + margin

    def place(self, value: float) -> float:
        scaled = math.log10(value) if self.logarithmic else value
        return self.start + (scaled - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> List[Tuple[float, float]]:
        """Round values and where they are; both ends' where there is no round one between them."""
        if self.logarithmic:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            within = [value for value in values if self.low <= math.log10(value) <= self.high]
            ends = (10**self.low, 10**self.high)
        else:
            power = 10.0 ** math.floor(math.log10(self.high - self.low))
            steps = (power * digit for digit in (0.1, 0.2, 0.5, 1, 2))
            step = next(step for step in steps if (self.high - self.low) / step <= 10)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            within, ends = [number * step for number in range(first, last + 1)], (self.low, self.high)
        return [(value, self.place(value)) for value in within or ends]


def colours(groups: Iterable[str]) -> Dict[str, str]:
    """A colour for each, in the order in which they come."""
    return {group: COLOURS[number % len(COLOURS)] for number, group in enumerate(dict.fromkeys(groups))}


def legend(colour: Dict[str, str]) -> str:
    """Each group in its colour."""
    spans = (f'<span style="color:{one}">&#9679; {html.escape(group)}</span>' for group, one in colour.items())
    return f'<p class="legend">{" ".join(spans)}</p>'


def scatter(x_name: str, y_name: str, points: Sequence[Point]) -> str:
    """Points on logarithmic axes, under their legend. points: at least one."""
    across = Axis([point.x for point in points], MARGIN, WIDTH - MARGIN, logarithmic=True)
    up = Axis([point.y for point in points], HEIGHT - MARGIN, MARGIN, logarithmic=True)
    colour = colours(point.group for point in points)
    drawn = [
        f'<circle cx="{across.place(point.x):.1f}" cy="{up.place(point.y):.1f}" r="6" fill="{colour[point.group]}">'
        f"<title>{html.escape(point.text)}</title></circle>"
        for point in points
    ]
    return legend(colour) + _framed(x_name, y_name, across, up, drawn)


def curves(x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Lines on plain axes, under their legend. lines: at least one, each of at least one point."""
    across = Axis([x for line in lines for x, _ in line.points], MARGIN, WIDTH - MARGIN)
    up = Axis([y for line in lines for _, y in line.points], HEIGHT - MARGIN, MARGIN)
    colour = colours(line.name for line in lines)
    drawn = [
        _path(line.name, colour[line.name], [(across.place(x), up.place(y)) for x, y in line.points]) for line in lines
    ]
    return legend(colour) + _framed(x_name, y_name, across, up, drawn)


def parallel_coordinates(names: Sequence[str], rows: Dict[str, Sequence[float]]) -> str:
    """An upright axis a name and a line a row, which has a value for each. At least two names and one row."""
    step = (WIDTH - 2 * MARGIN) / (len(names) - 1)
    axes = [Axis([row[number] for row in rows.values()], HEIGHT - MARGIN, MARGIN) for number in range(len(names))]
    drawn = []
    for number, (name, axis) in enumerate(zip(names, axes)):
        x = MARGIN + number * step
        drawn.append(f'<path class="grid" d="M{x:.1f} {MARGIN}V{HEIGHT - MARGIN}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{MARGIN - 14}" text-anchor="middle">{html.escape(name)}</text>')
        for value, place in axis.ticks():
            drawn.append(f'<text x="{x + 4:.1f}" y="{place + 4:.1f}">{value:,.4g}</text>')
    colour = colours(rows)
    for name, row in rows.items():
        places = [(MARGIN + number * step, axis.place(value)) for number, (axis, value) in enumerate(zip(axes, row))]
        drawn.append(_path(name, colour[name], places))
    return legend(colour) + _svg(" and ".join(names), drawn)


def page(title: str, sections: Dict[str, str]) -> str:
    """The whole file: a heading, and each section under its own; sections are HTML."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{content}" if name else content for name, content in sections.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>{body}</body></html>
"""


def _path(name: str, colour: str, places: Sequence[Tuple[float, float]]) -> str:
    points = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="line" stroke="{colour}" d="M{points}"><title>{html.escape(name)}</title></path>'


def _framed(x_name: str, y_name: str, across: Axis, up: Axis, drawn: List[str]) -> str:
    grid = []
    for value, place in across.ticks():
        grid.append(f'<path class="grid" d="M{place:.1f} {MARGIN}V{HEIGHT - MARGIN}"/>')
        grid.append(f'<text x="{place:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{value:,.4g}</text>')
    for value, place in up.ticks():
        grid.append(f'<path class="grid" d="M{MARGIN} {place:.1f}H{WIDTH - MARGIN}"/>')
        grid.append(f'<text x="{MARGIN - 8}" y="{place + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    y = HEIGHT / 2
    names = [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">{html.escape(x_name)}</text>',
        f'<text x="20" y="{y}" text-anchor="middle" transform="rotate(-90 20 {y})">{html.escape(y_name)}</text>',
    ]
    return _svg(f"{y_name} against {x_name}", [*grid, *drawn, *names])


def _svg(label: str, drawn: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{"".join(drawn)}</svg>'
