"""Plots for comparison reports (requires matplotlib)."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kha_megatron.errors import MissingDependencyError
from kha_megatron.heads import Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES

if TYPE_CHECKING:
    from torch import Tensor


def require_matplotlib() -> Any:
    """Import ``Figure``. Raises MissingDependencyError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing", "plots") from error
    return Figure


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    half_width: float | None
    """Half the width of the error band at this point."""

    @property
    def low(self) -> float:
        return self.y - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.y + (self.half_width or 0.0)


@dataclass(frozen=True)
class Line:
    name: str
    colour: str  # matplotlib color, e.g. C0
    points: Sequence[Point]


def draw_line_chart(lines: Sequence[Line], *, title: str, y_label: str, zero: bool = False) -> str:
    """Draw a line chart and return it as an ``<svg>`` element.

    The title is not visible. We use it as a label for screen readers and as a seed for element ids,
    so do not use the same title twice on a page. With ``zero=True``, a dashed line is drawn at y=0.
    """
    figure = require_matplotlib()(figsize=(6, 4), layout="constrained")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        axis = figure.subplots()
        axis.set(xlabel="iteration", ylabel=y_label)
        axis.grid(axis="y", alpha=0.4)
        if zero:
            axis.axhline(0, color="black", linewidth=1, linestyle="--")
        all_points: list[Point] = []
        for line in lines:
            all_points += line.points
            xs = [point.x for point in line.points]
            ys = [point.y for point in line.points]
            axis.plot(xs, ys, color=line.colour, label=line.name)
            if any(point.half_width for point in line.points):
                low = [point.low for point in line.points]
                high = [point.high for point in line.points]
                axis.fill_between(xs, low, high, color=line.colour, alpha=0.2, linewidth=0)
        axis.set_ylim(*_y_range(all_points, zero))
        axis.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue().partition("<svg")[2]
    return f'<svg role="img" aria-label="{escape(title)}"{svg}'


def _y_range(points: Sequence[Point], zero: bool) -> tuple[float, float]:
    # The loss is very high in the beginning, so skip the first 10% of the iterations. Wide error
    # bands can increase the range by a factor of 3 at most.
    start = max(point.x for point in points) / 10
    shown = [point for point in points if point.x >= start]
    means = [point.y for point in shown]
    if zero:
        means.append(0.0)
    lowest_mean = min(means)
    highest_mean = max(means)
    span = highest_mean - lowest_mean or abs(highest_mean) or 1.0
    lowest_shown = max(lowest_mean - span, min(point.low for point in shown))
    highest_shown = min(highest_mean + span, max(point.high for point in shown))
    margin = 0.05 * span
    return min(lowest_mean, lowest_shown) - margin, max(highest_mean, highest_shown) + margin


def draw_matrices(
    weights: "Mapping[tuple[int, Projection], Tensor]", kha: HeadsConfig, folder: Path
) -> None:
    """Plot all KHA matrices to PNG files, e.g. ``value_up.png``.

    Args:
        weights: KHA weights by (layer, projection). Each has shape (num_matrices, head_dim,
            head_dim).
    """
    for projection, variant in kha.variants.items():
        weight_by_layer = {}
        for (layer, weight_projection), weight in weights.items():
            if weight_projection == projection:
                weight_by_layer[layer] = weight
        for index, matrix in enumerate(MATRICES[variant]):
            draw_matrix_grid(
                {layer: weight[index] for layer, weight in weight_by_layer.items()},
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

    if diverging:
        high = _largest_finite_value(matrices) or 1.0
        low = -high
        colours = colormaps["RdBu_r"]
    else:
        high = 1.0
        low = 0.0
        colours = colormaps["viridis"]
    colours = colours.with_extremes(bad="magenta")
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


def _largest_finite_value(matrices: "Mapping[int, Tensor]") -> float:
    largest = 0.0
    for matrix in matrices.values():
        finite = matrix[matrix.isfinite()]
        if finite.numel():
            largest = max(largest, finite.abs().max().item())
    return largest
