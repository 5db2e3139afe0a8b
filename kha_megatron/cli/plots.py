"""Plots of attention statistics and training losses."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import DataError
from kha_megatron.recipes.log_lines import LOSS, VALIDATION_LOSS

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerStatistics


def plot_attention(layers: Sequence["LayerStatistics"], out_png: Path, *, title: str) -> None:
    """Plot attention statistics by layer: those of each head as heatmaps, the rest as curves."""
    maps = {
        "attention to the first token": [x.sinks for x in layers],
        **{name: [x.per_head.get(name, []) for x in layers] for name in layers[0].per_head},
    }
    maps = {name: rows for name, rows in maps.items() if any(rows)}
    curves = {
        "largest activation": {"largest": [x.peak for x in layers]},
        "mechanisms": {
            name: [x.means.get(name, math.nan) for x in layers]
            for name in sorted({name for x in layers for name in x.means})
        },
    }
    curves = {name: lines for name, lines in curves.items() if lines}
    number = len(maps) + len(curves)
    figure = require_matplotlib()(figsize=(4.5 * number, 4), layout="constrained")
    figure.suptitle(title)
    axes = iter(figure.subplots(1, number, squeeze=False)[0])
    for name, rows in maps.items():
        axis, heads = next(axes), max(map(len, rows))
        values = [[*row, *[math.nan] * (heads - len(row))] for row in rows]
        figure.colorbar(axis.imshow(values, vmin=0, vmax=1, aspect="auto"), ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
    for name, lines in curves.items():
        axis = next(axes)
        for label, points in lines.items():
            axis.plot([x.layer for x in layers], points, "o-", label=label)
        axis.set(title=name, xlabel="layer", yscale="linear" if name == "mechanisms" else "log")
        axis.legend()
    figure.savefig(out_png, format="png", dpi=120)


def plot_loss_curve(history: Mapping[str, Sequence[tuple[int, float]]], out_png: Path) -> None:
    """Plot the training and validation loss.

    Raises:
        DataError: If there is no finite training loss.
    """
    if not any(math.isfinite(value) for _, value in history.get(LOSS, ())):
        raise DataError(f"No finite {LOSS!r} values found.")
    figure = require_matplotlib()(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, label in ((LOSS, "training"), (VALIDATION_LOSS, "validation")):
        if points := history.get(name):
            axis.plot(*zip(*points, strict=True), "o-" if len(points) < 50 else "-", label=label)
    axis.set(xlabel="iteration", ylabel="loss (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out_png, format="png", dpi=120)
