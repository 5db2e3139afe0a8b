"""Line charts as inline SVG, drawn for a phone's width; colours come from the page's style."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kha_megatron.errors import MissingDependencyError

WIDTH, HEIGHT = 360, 265
"""In CSS pixels where a page shows them whole."""
_FONT = 13
_EDGE, _TEXT = "#d9dce1", "#1c1e21"
"""Stand for the colours of the style that follow a reader's light or dark screen."""

_GID = re.compile(r'<g id="(line|band) c(\d+)">')
_OTHER_IDS = re.compile(r' (?:id="(?!p[0-9a-f]{10}")|xmlns(?::xlink)?=")[^"]*"')


def require_matplotlib() -> Any:
    """matplotlib's ``Figure`` class, which draws to files and needs no display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing", "plots") from error
    return Figure


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

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = require_matplotlib()(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    from matplotlib import rc_context

    last = max(x for line in lines for x, _, _ in line.points)
    low, high = _range([p for line in lines for p in line.points if p[0] >= last / 10], zero)
    far = high - low  # a renderer may choke on coordinates that are further away

    def near(y: float) -> float:
        return min(max(y, low - far), high + far)

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": identity, "font.size": _FONT}):
        axis = figure.subplots()
        axis.set(xlim=(0, last), ylim=(low, high), xlabel="iteration", ylabel=y_label)
        axis.set_frame_on(False)
        figure.patch.set_visible(False)
        axis.grid(axis="y", color=_EDGE, linewidth=1)
        axis.locator_params(axis="x", nbins=4, integer=True)
        axis.ticklabel_format(axis="y", style="plain", useOffset=False)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(length=0)
        if zero:
            axis.axhline(0, color=_TEXT, linewidth=1, dashes=(4, 3))
        for line in lines:
            banded = [(x, y, half) for x, y, half in line.points if half is not None]
            corners = [(x, near(y + half)) for x, y, half in banded]
            corners += [(x, near(y - half)) for x, y, half in reversed(banded)]
            if corners:
                axis.fill(*zip(*corners, strict=True), gid=f"band c{line.colour}")
        for line in lines:
            xs, ys, _ = zip(*line.points, strict=True)
            axis.plot(xs, [near(y) for y in ys], linewidth=1.8, gid=f"line c{line.colour}")
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    names = iter(line.name for line in lines)

    def named(group: re.Match[str]) -> str:
        title = f"<title>{escape(next(names))}</title>" if group[1] == "line" else ""
        return f'<g class="{group[1]} c{group[2]}">{title}'

    svg = "<svg" + file.getvalue().partition("<svg")[2]
    svg = _OTHER_IDS.sub("", _GID.sub(named, svg))
    svg = svg.replace(_EDGE, "var(--edge)").replace(_TEXT, "var(--text)")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _range(points: Sequence[tuple[float, float, float | None]], zero: bool) -> tuple[float, float]:
    """Lowest and highest y of a chart, with a margin."""
    means = [y for _, y, _ in points] + [0.0] * zero
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    bottom = min(y - (half or 0.0) for _, y, half in points)
    top = max(y + (half or 0.0) for _, y, half in points)
    margin = 0.05 * span
    return min(low, max(bottom, low - span)) - margin, max(high, min(top, high + span)) + margin
