"""A chart of points as one HTML file: an SVG with logarithmic axes, a text for each point under the mouse."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import List, Tuple

WIDTH, HEIGHT, MARGIN = 900, 520, 70
COLOURS = ("#0b6fb8", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#be185d", "#0e7490", "#4d7c0f")


@dataclass(frozen=True)
class Point:
    """x, y: above zero. group: what its colour tells. text: shown where the mouse rests on it."""

    x: float
    y: float
    group: str
    text: str


def scatter(title: str, x_name: str, y_name: str, points: List[Point]) -> str:
    """The whole page. points: at least one."""
    across = _Axis([point.x for point in points], MARGIN, WIDTH - MARGIN)
    up = _Axis([point.y for point in points], HEIGHT - MARGIN, MARGIN)
    groups = list(dict.fromkeys(point.group for point in points))
    colour = {group: COLOURS[number % len(COLOURS)] for number, group in enumerate(groups)}
    drawn = []
    for value, place in across.ticks():
        drawn.append(f'<path class="grid" d="M{place:.1f} {MARGIN}V{HEIGHT - MARGIN}"/>')
        drawn.append(f'<text x="{place:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{value:,.4g}</text>')
    for value, place in up.ticks():
        drawn.append(f'<path class="grid" d="M{MARGIN} {place:.1f}H{WIDTH - MARGIN}"/>')
        drawn.append(f'<text x="{MARGIN - 8}" y="{place + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    for point in points:
        drawn.append(
            f'<circle cx="{across.place(point.x):.1f}" cy="{up.place(point.y):.1f}" r="6" fill="{colour[point.group]}">'
            f"<title>{html.escape(point.text)}</title></circle>"
        )
    legend = " ".join(f'<span style="color:{colour[group]}">&#9679; {html.escape(group)}</span>' for group in groups)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>
body {{ font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: {WIDTH}px; color: #1c1917 }}
text {{ font-size: 12px; fill: #57534e }} .grid {{ stroke: #e7e5e4; fill: none }} circle {{ opacity: .75 }}
span {{ margin-right: 1rem; white-space: nowrap }}
</style></head><body><h1>{html.escape(title)}</h1><p>{legend}</p>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(drawn)}
<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">{html.escape(x_name)}</text>
<text x="20" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 20 {HEIGHT / 2})">{html.escape(y_name)}</text>
</svg></body></html>
"""


class _Axis:
    """A logarithmic axis from one place to another, wide enough for its values."""

    def __init__(self, values: List[float], start: float, end: float) -> None:
        self.low, self.high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> List[Tuple[float, float]]:
        """Values of 1, 2 and 5 times a power of ten and where they are; both ends' where there is none between them."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        within = [value for value in values if self.low <= math.log10(value) <= self.high]
        return [(value, self.place(value)) for value in within or (10**self.low, 10**self.high)]
