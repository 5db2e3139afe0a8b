"""Draw line charts as inline SVG and learnt matrices as PNG."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kha_megatron.errors import MissingDependencyError

if TYPE_CHECKING:
    from torch import Tensor


def require_matplotlib() -> Any:
    """Return matplotlib's ``Figure`` class, which needs no display.

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
    """One curve with an optional confidence band."""

    name: str
    colour: str
    """A matplotlib colour such as ``C0``."""
    points: Sequence[tuple[float, float, float | None]]
    """x, y and half of the band's height; None without a band."""


def line_chart(lines: Sequence[Line], *, title: str, y_label: str, zero: bool = False) -> str:
    """Return an ``<svg>`` element with one curve per line.

    The y range covers the curves after the first tenth of the iterations, because the loss starts
    very high. Bands widen the range by at most its own height on each side.

    Args:
        lines: at least one, with at least one point.
        title: label for screen readers; unique in a page.
        y_label: label of the y axis.
        zero: also draw a line at y = 0.
    """
    figure = require_matplotlib()(figsize=(6, 4), layout="constrained")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        axis = figure.subplots()
        axis.set(xlabel="iteration", ylabel=y_label)
        axis.grid(axis="y", alpha=0.4)
        if zero:
            axis.axhline(0, color="black", linewidth=1, linestyle="--")
        for line in lines:
            xs, ys, halves = zip(*line.points, strict=True)
            axis.plot(xs, ys, color=line.colour, label=line.name)
            bands = [(y, half or 0.0) for y, half in zip(ys, halves, strict=True)]
            if any(half for _, half in bands):
                low, high = [y - half for y, half in bands], [y + half for y, half in bands]
                axis.fill_between(xs, low, high, color=line.colour, alpha=0.2, linewidth=0)
        axis.set_ylim(*_y_range([point for line in lines for point in line.points], zero))
        axis.legend(frameon=False)
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata)
    svg = file.getvalue().partition("<svg")[2]
    return f'<svg role="img" aria-label="{escape(title)}"{svg}'


def _y_range(
    points: Sequence[tuple[float, float, float | None]], zero: bool
) -> tuple[float, float]:
    start = max(x for x, _, _ in points) / 10
    shown = [(y, half or 0.0) for x, y, half in points if x >= start]
    means = [y for y, _ in shown] + [0.0] * zero
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    low = min(low, max(low - span, min(y - half for y, half in shown)))
    high = max(high, min(high + span, max(y + half for y, half in shown)))
    return low - 0.05 * span, high + 0.05 * span


def matrix_grid(
    matrices: "Mapping[int, Tensor]", out_png: Path, *, title: str, diverging: bool = False
) -> None:
    """Draw one ``[D, D]`` matrix per layer in a grid with one colour bar (the paper's Fig. 3).

    Args:
        matrices: by layer, for ``x @ M``: rows are input features.
        out_png: file to write.
        title: above the grid; may contain matplotlib's mathtext.
        diverging: show all values with colours that diverge from 0 (gates) instead of clipping to
            0..1. NaN and infinity are magenta in both cases.
    """
    columns = min(len(matrices), 6)
    rows = math.ceil(len(matrices) / columns)
    figure = require_matplotlib()(
        figsize=(1.35 * columns + 1.6, 1.45 * rows + 0.9), layout="constrained"
    )
    from matplotlib import colormaps

    finite = [m[m.isfinite()].abs().max().item() for m in matrices.values() if m.isfinite().any()]
    limit = max(finite, default=0.0) or 1.0
    low, high = (-limit, limit) if diverging else (0.0, 1.0)
    colours = colormaps["RdBu_r" if diverging else "viridis"].with_extremes(bad="magenta")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (layer, matrix) in zip(axes.flat, sorted(matrices.items()), strict=False):
        values = matrix.float().masked_fill(~matrix.isfinite(), math.nan).numpy()
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=high)
        axis.set_title(f"layer {layer}", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=min(1.0, 3 / rows))
    figure.suptitle(title, fontsize=10)
    figure.savefig(out_png, format="png", dpi=120)
