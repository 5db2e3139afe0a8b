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


_SETTLING_FRACTION = 0.1
"""The loss is very high in this fraction of the iterations, which the y axis does not cover."""
_MARGIN = 0.05
"""Empty space above and below the lines, as a fraction of their range."""


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


def draw_line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    y_label: str,
    zero_line: bool = False,
) -> str:
    """Draw a line chart and return it as an ``<svg>`` element.

    The title is not visible. We use it as a label for screen readers and as a seed for element ids,
    so do not use the same title twice on a page. With ``zero_line=True``, a dashed line is drawn at
    y=0.
    """
    figure_class = require_matplotlib()
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = figure_class(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        axis.set(xlabel="iteration", ylabel=y_label)
        axis.grid(axis="y", alpha=0.4)
        if zero_line:
            axis.axhline(0, color="black", linewidth=1, linestyle="--")
        for line in lines:
            _draw_line(axis, line)
        axis.set_ylim(*_y_range(lines, includes_zero=zero_line))
        axis.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    _xml_header, _, attributes_and_content = file.getvalue().partition("<svg")
    return f'<svg role="img" aria-label="{escape(title)}"{attributes_and_content}'


def _draw_line(axis: Any, line: Line) -> None:
    xs = []
    ys = []
    lows = []
    highs = []
    for point in line.points:
        xs.append(point.x)
        ys.append(point.y)
        lows.append(point.low)
        highs.append(point.high)
    axis.plot(xs, ys, color=line.colour, label=line.name)
    if lows != highs:
        axis.fill_between(
            xs,
            lows,
            highs,
            color=line.colour,
            alpha=0.2,
            linewidth=0,
        )


def _y_range(lines: Sequence[Line], *, includes_zero: bool) -> tuple[float, float]:
    """Return the limits of the y axis.

    Wide error bands can increase the range of the lines by a factor of 3 at most.
    """
    points: list[Point] = []
    for line in lines:
        points += line.points
    last_iteration = max(point.x for point in points)
    settled = [point for point in points if point.x >= _SETTLING_FRACTION * last_iteration]

    means = [point.y for point in settled]
    if includes_zero:
        means.append(0.0)
    lowest_mean = min(means)
    highest_mean = max(means)
    span = highest_mean - lowest_mean
    if span == 0:
        span = abs(highest_mean) or 1.0

    lowest_band = min(point.low for point in settled)
    highest_band = max(point.high for point in settled)
    low = max(lowest_band, lowest_mean - span)
    high = min(highest_band, highest_mean + span)
    margin = _MARGIN * span
    return min(low, lowest_mean) - margin, max(high, highest_mean) + margin


def draw_matrices(
    weights: "Mapping[tuple[int, Projection], Tensor]",
    kha: HeadsConfig,
    folder: Path,
) -> None:
    """Plot all KHA matrices to PNG files, e.g. ``value_up.png``.

    Args:
        weights: KHA weights by (layer, projection). Each has shape (num_matrices, head_dim,
            head_dim).
    """
    for projection, variant in kha.variants.items():
        for index, name in enumerate(MATRICES[variant]):
            matrix_by_layer = {}
            for (layer, weight_projection), weight in weights.items():
                if weight_projection == projection:
                    matrix_by_layer[layer] = weight[index]
            draw_matrix_grid(
                matrix_by_layer,
                folder / f"{projection}_{name}.png",
                title=f"{name} matrix on {projection} heads ({variant})",
                diverging=name == "gate",
            )


def draw_distances(
    distances: Mapping[str, Mapping[int, float | None]],
    out_png: Path,
) -> None:
    """Plot how far each kind of matrix has moved from its initialization, by layer.

    Args:
        distances: Maps names of lines to distances by layer, relative to the norm of the identity.
            Those that are not finite are None.
    """
    figure_class = require_matplotlib()
    figure = figure_class(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel="layer", ylabel="distance from initialization")
    axis.grid(axis="y", alpha=0.4)
    for name, distance_by_layer in distances.items():
        values = []
        for distance in distance_by_layer.values():
            values.append(math.nan if distance is None else distance)
        axis.plot(list(distance_by_layer), values, marker=".", label=name)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    figure.savefig(out_png, format="png", dpi=120)


def draw_matrix_grid(
    matrices: "Mapping[int, Tensor]",
    out_png: Path,
    *,
    title: str,
    diverging: bool = False,
) -> None:
    """Plot one matrix per layer in a grid, similar to Figure 3 in the paper.

    Args:
        matrices: Maps layer indices to square matrices. Rows correspond to input features.
        diverging: By default, the colors range from 0 to 1. Set this for matrices with negative
            entries (e.g. gates) to get a symmetric range. NaN and inf are always magenta.
    """
    figure_class = require_matplotlib()
    from matplotlib import colormaps

    columns = min(len(matrices), 6)
    rows = math.ceil(len(matrices) / columns)
    width = 1.35 * columns + 1.6
    height = 1.45 * rows + 0.9
    figure = figure_class(figsize=(width, height), layout="constrained")

    if diverging:
        high = _largest_finite_value(matrices) or 1.0
        low = -high
        colormap = colormaps["RdBu_r"]
    else:
        high = 1.0
        low = 0.0
        colormap = colormaps["viridis"]
    colormap = colormap.with_extremes(bad="magenta")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, layer in zip(axes.flat, sorted(matrices), strict=False):
        matrix = matrices[layer].float()
        is_invalid = ~matrix.isfinite()
        values = matrix.masked_fill(is_invalid, math.nan).numpy()
        image = axis.imshow(values, cmap=colormap, vmin=low, vmax=high)
        axis.set_title(f"layer {layer}", fontsize=8)
    height_of_colorbar = min(1.0, 3 / rows)
    figure.colorbar(image, ax=axes, shrink=height_of_colorbar)
    figure.suptitle(title, fontsize=10)
    figure.savefig(out_png, format="png", dpi=120)


def _largest_finite_value(matrices: "Mapping[int, Tensor]") -> float:
    largest = 0.0
    for matrix in matrices.values():
        finite = matrix[matrix.isfinite()]
        if finite.numel():
            largest_of_layer = finite.abs().max().item()
            largest = max(largest, largest_of_layer)
    return largest
