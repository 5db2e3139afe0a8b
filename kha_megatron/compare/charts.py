"""Plots for comparison reports (requires matplotlib)."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import MissingDependencyError
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import MATRICES

if TYPE_CHECKING:
    from torch import Tensor


def require_matplotlib() -> Any:
    """Import ``Figure``. Raises MissingDependencyError if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing", "plots") from error
    return Figure


@dataclass(frozen=True)
class Line:
    name: str
    colour: str  # matplotlib color, e.g. C0
    points: Sequence[tuple[float, float, float | None]]  # x, y, error (half the width of the band)


def draw_line_chart(lines: Sequence[Line], *, title: str, y_label: str, zero: bool = False) -> str:
    """Draw a line chart and return it as an ``<svg>`` element.

    The title isn't visible. We use it as a label for screen readers and as a seed for element ids,
    so don't use the same title twice on a page. With ``zero=True``, a dashed line is drawn at y=0.
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
            if any(halves):
                low = [y - (half or 0) for y, half in zip(ys, halves, strict=True)]
                high = [y + (half or 0) for y, half in zip(ys, halves, strict=True)]
                axis.fill_between(xs, low, high, color=line.colour, alpha=0.2, linewidth=0)
        axis.set_ylim(*_y_range([point for line in lines for point in line.points], zero))
        axis.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue().partition("<svg")[2]
    return f'<svg role="img" aria-label="{escape(title)}"{svg}'


def _y_range(
    points: Sequence[tuple[float, float, float | None]], zero: bool
) -> tuple[float, float]:
    # The loss is very high in the beginning, so skip the first 10% of the iterations. Wide error
    # bands can increase the range by a factor of 3 at most.
    start = max(x for x, _, _ in points) / 10
    shown = [(y, half or 0.0) for x, y, half in points if x >= start]
    means = [y for y, _ in shown] + [0.0] * zero
    low, high = min(means), max(means)
    span = high - low or abs(high) or 1.0
    low = min(low, max(low - span, min(y - half for y, half in shown)))
    high = max(high, min(high + span, max(y + half for y, half in shown)))
    return low - 0.05 * span, high + 0.05 * span


def draw_matrices(
    weights: "Mapping[tuple[int, Projection], Tensor]", kha: KHAConfig, folder: Path
) -> None:
    """Plot all KHA matrices to PNG files, e.g. ``value_up.png``.

    Args:
        weights: KHA weights by (layer, projection). Each has shape (num_matrices, head_dim,
            head_dim).
    """
    for projection, variant in kha.variants.items():
        for i, matrix in enumerate(MATRICES[variant]):
            draw_matrix_grid(
                {layer: w[i] for (layer, name), w in weights.items() if name == projection},
                folder / f"{projection}_{matrix}.png",
                title=f"{matrix} matrix on {projection} heads ({variant})",
                diverging=matrix == "gate",
            )


def draw_matrix_grid(
    matrices: "Mapping[int, Tensor]", out_png: Path, *, title: str, diverging: bool = False
) -> None:
    """Plot one matrix per layer in a grid, similar to Figure 3 in the paper.

    Args:
        matrices: Maps layer indices to square matrices. Rows correspond to input features.
        diverging: By default, the colors range from 0 to 1. Set this for matrices with negative
            entries (e.g. gates) to get a symmetric range. NaN and inf are always magenta.
    """
    columns = min(len(matrices), 6)
    rows = math.ceil(len(matrices) / columns)
    size = (1.35 * columns + 1.6, 1.45 * rows + 0.9)
    figure = require_matplotlib()(figsize=size, layout="constrained")
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
