"""Line charts as inline SVG, drawn for a phone's width; colours come from the page's style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 40


@dataclass(frozen=True)
class Line:
    """A curve and its band."""

    name: str
    colour: int
    """Number of the style class."""

    points: Sequence[tuple[float, float, float | None]]
    """x, y and half of the band's height; None where there is no band."""


def line_chart(
    lines: Sequence[Line], *, title: str, identity: str, y_label: str, zero: bool = False
) -> str:
    """An ``<svg>`` with axes, bands and lines.

    The range of y is that of the curves after the first tenth of x: a loss starts so high that
    nothing else would show. Bands, which are wide with two seeds, may at most triple it. What lies
    outside is cut off.

    Args:
        title: what a screen reader says.
        identity: unique in the page.
        zero: also show a line at y = 0.
    """
    last = max(x for line in lines for x, _, _ in line.points)
    low, high = _range([p for line in lines for p in line.points if p[0] >= last / 10], zero)

    def at(x: float, y: float) -> str:
        return f"{place_x(x):.1f},{min(max(place_y(y), -HEIGHT), 2 * HEIGHT):.1f}"

    def place_x(x: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * x / last

    def place_y(y: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - y) / (high - low)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{identity}-title">'
        f'<title id="{identity}-title">{escape(title)}</title>'
        f'<clipPath id="{identity}-clip"><rect x="{_LEFT}" y="{_TOP}" '
        f'width="{WIDTH - _LEFT - _RIGHT}" height="{HEIGHT - _TOP - _BOTTOM}"/></clipPath>'
    ]
    for y in ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" '
            f'y1="{place_y(y):.1f}" y2="{place_y(y):.1f}"/>'
            f'<text x="{_LEFT - 5}" y="{place_y(y) + 4:.1f}" text-anchor="end">{_number(y)}</text>'
        )
    for x in ticks(0, last, 5):
        parts.append(
            f'<text x="{place_x(x):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{_number(x)}</text>"
        )
    middle = _TOP + (HEIGHT - _TOP - _BOTTOM) / 2
    parts.append(
        f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">iteration</text>'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    parts.append(f'<g clip-path="url(#{identity}-clip)">')
    if zero:
        y = f"{place_y(0):.1f}"
        parts.append(f'<line class="zero" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
    for line in lines:
        banded = [(x, y, half) for x, y, half in line.points if half is not None]
        if banded:
            corners = [at(x, y + half) for x, y, half in banded]
            corners += [at(x, y - half) for x, y, half in reversed(banded)]
            parts.append(f'<polygon class="band c{line.colour}" points="{" ".join(corners)}"/>')
    for line in lines:
        corners = " ".join(at(x, y) for x, y, _ in line.points)
        parts.append(
            f'<polyline class="line c{line.colour}" points="{corners}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    return "".join([*parts, "</g></svg>"])


def _range(points: Sequence[tuple[float, float, float | None]], zero: bool) -> tuple[float, float]:
    """Lowest and highest y of a chart, with a margin."""
    means = [y for _, y, _ in points] + [0.0] * zero
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    bottom = min(y - (half or 0.0) for _, y, half in points)
    top = max(y + (half or 0.0) for _, y, half in points)
    margin = 0.05 * span
    return min(low, max(bottom, low - span)) - margin, max(high, min(top, high + span)) + margin


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 10 else f"{value:.6g}"
