"""Pictures: the shared matrices (the paper's Fig. 3) and the loss."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import DataError
from kha_megatron.recipes.log_lines import LOSS, VALIDATION_LOSS

if TYPE_CHECKING:
    from torch import Tensor

    from kha_megatron.hf.instruments import LayerFigures

_DPI = 160


def matrix_grid(
    matrices: Mapping[int, "Tensor"], out_png: Path, *, title: str, diverging: bool = False
) -> None:
    """Draw one matrix of every layer in a grid with one colour bar, as the paper's Fig. 3 does.

    Args:
        matrices: by layer, each ``[D, D]`` for ``x @ M``: rows are input features.
        out_png: written in place.
        title: above the grid; matplotlib's mathtext.
        diverging: show all values, with colours that diverge from 0 (gates), instead of clipping
            to 0..1. NaN and infinity are magenta in both.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    from matplotlib import colormaps

    columns, rows = _grid(len(matrices))
    cell = 1.35 if columns > 3 else 2.0  # inches
    size = (cell * columns + 1.1, (cell + 0.1) * rows + 0.9)
    figure = figure_class(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    finite = [m[m.isfinite()].abs().max().item() for m in matrices.values() if m.isfinite().any()]
    limit = max(finite, default=0.0) or 1.0
    low, high = (-limit, limit) if diverging else (0.0, 1.0)
    colours = colormaps["RdBu_r" if diverging else "viridis"].with_extremes(bad="magenta")
    for axis in axes.flat[len(matrices) :]:
        axis.set_visible(False)
    for axis, (layer, matrix) in zip(axes.flat, sorted(matrices.items()), strict=False):
        values = matrix.float().masked_fill(~matrix.isfinite(), math.nan).numpy()
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=high)
        axis.set_title(f"layer {layer}", fontsize=8, pad=3)
        axis.set_xticks([])
        axis.set_yticks([])
    bar = figure.colorbar(
        image, ax=axes, shrink=min(1.0, 3 / rows), extend="neither" if diverging else "both"
    )
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(out_png, format="png", dpi=_DPI)


def attention(layers: Sequence["LayerFigures"], out_png: Path, *, title: str) -> None:
    """Draw what attention does with a text: sinks and the load of heads as maps of layers and
    heads, peaks and gates over layers.

    Args:
        layers: figures of every layer.
        out_png: written in place.
        title: above the panels.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    maps = {
        "share of attention on the first token": [x.sinks for x in layers],
        "share of tokens that have the head": [x.load for x in layers],
    }
    maps = {name: rows for name, rows in maps.items() if any(rows)}
    gates = sorted({name for x in layers for name in x.gates})
    number = len(maps) + 1 + bool(gates)
    figure = figure_class(figsize=(1 + 4.2 * number, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(1, number, squeeze=False)[0]
    axes = iter(panels)
    for (name, rows), axis in zip(maps.items(), axes, strict=False):
        heads = max(map(len, rows))
        values = [[*row, *[math.nan] * (heads - len(row))] for row in rows]
        image = axis.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        figure.colorbar(image, ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
        axis.yaxis.get_major_locator().set_params(integer=True)
    numbers = [x.layer for x in layers]
    peaks = {"largest": [x.peak for x in layers], "median": [x.median for x in layers]}
    of_gates = {name: [x.gates.get(name, math.nan) for x in layers] for name in gates}
    curves = (("absolute values handed on", "log", peaks), ("gates", "linear", of_gates))
    for (name, scale, lines), axis in zip(curves, axes, strict=False):
        for label, points in lines.items():
            axis.plot(numbers, points, "o-", label=label, markersize=3)
        axis.set(xlabel="layer", title=name, yscale=scale)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    for axis in panels:
        axis.title.set_fontsize(9)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(out_png, format="png", dpi=_DPI)


def loss_curve(history: Mapping[str, Sequence[tuple[int, float]]], out_png: Path) -> None:
    """Draw the training loss over iterations, and the validation loss where there is one.

    Args:
        history: from ``kha_megatron.recipes.log_lines``; its ``lm loss`` and
            ``lm loss validation`` are drawn. Values that are not finite leave gaps.
        out_png: written at once or not at all; its folder must exist.

    Raises:
        DataError: no finite training loss, or no folder to write to.
        MissingDependencyError: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    out_png = Path(out_png)
    if not any(math.isfinite(value) for _, value in history.get(LOSS, ())):
        held = ", ".join(sorted(history)) or "nothing"
        raise DataError(f"no finite {LOSS!r} to draw: the history holds {held}")
    if not out_png.parent.is_dir():
        raise DataError(f"{out_png.parent} is not a folder: make it before drawing {out_png.name}")
    figure = figure_class(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, label, style in ((LOSS, "training", "C0-"), (VALIDATION_LOSS, "validation", "C1--")):
        if points := history.get(name):
            few = "o" if len(points) < 50 else ""  # a line through one point would not show
            axis.plot(*zip(*points, strict=True), style + few, label=label, markersize=4)
    axis.set_xlabel("iteration")
    axis.set_ylabel("language-model loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    with staged_file(out_png) as file:
        figure.savefig(file, format="png", dpi=_DPI)


def _grid(n: int) -> tuple[int, int]:
    """Columns and rows for ``n`` cells: near a square, with as few empty cells as possible."""
    side = math.ceil(math.sqrt(n))
    columns = min(range(side, min(n, 2 * side) + 1), key=lambda c: (-n % c, c))
    return columns, math.ceil(n / columns)
