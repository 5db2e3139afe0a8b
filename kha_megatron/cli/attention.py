"""Tables and plots of attention statistics for ``kha-megatron inspect --text``.

The metrics follow arXiv:2505.06708 (section 4) and arXiv:2410.11842 (Figure 3).
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.generate import check_tokens, load_model, parse_device
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerStatistics

TOKENS = 512
"""Default value of ``--tokens``."""


def measure_attention(
    checkpoint: Path,
    text: str,
    *,
    tokens: int | None,
    tokenizer: Path | None,
    device: str,
) -> "tuple[int, list[LayerStatistics]]":
    """Run a model on the first tokens of a text, and return their number and statistics per layer.

    Megatron checkpoints are converted to Hugging Face format first, in a temporary directory.

    Raises:
        CheckpointError: If the checkpoint cannot be loaded or has no tokenizer.
        ConfigError: If the device does not exist or ``tokens`` exceeds the maximum length.
        DataError: If the text has fewer than two tokens.
    """
    from kha_megatron.checkpoint.hf_reader import is_hf_folder
    from kha_megatron.conversion import to_hf
    from kha_megatron.hf.instruments import measure_layers

    target = parse_device(device)
    with tempfile.TemporaryDirectory(prefix="kha-inspect-") as scratch:
        folder = checkpoint
        if not is_hf_folder(checkpoint):
            plan = to_hf.plan_export(checkpoint, tokenizer=tokenizer)
            if plan.source.tokenizer.path is None:
                raise CheckpointError(
                    f"No Hugging Face tokenizer found for {checkpoint}. Pass --tokenizer DIRECTORY."
                )
            folder = Path(scratch) / "model"
            with console.log.status(f"Converting {checkpoint}"):
                plan.write(folder)
        encode, model = load_model(folder, target)
    config = model.config.get_text_config()
    max_length = getattr(config, "max_position_embeddings", None) or TOKENS
    ids = encode(text, return_tensors="pt").input_ids
    ids = ids[:, : tokens or min(TOKENS, max_length)]
    length = ids.shape[1]
    if length < 2:
        raise DataError(f"The text must have at least 2 tokens, got {length}.")
    check_tokens(ids, model)
    return length, measure_layers(model, ids.to(target))


def attention_tables(layers: "Sequence[LayerStatistics]", tokens: int) -> Iterator[Table]:
    """Yield a table of attention sinks and activations (and one of mechanisms, if present)."""
    columns = ("layer", "sink mean", "sink max", "head", "peak", "feature", "token", "median")
    table = console.number_table(
        *columns,
        title=f"attention over {tokens} tokens",
        names=0,
    )
    for layer in layers:
        table.add_row(
            str(layer.layer),
            *_sink_cells(layer.sinks),
            f"{layer.peak:.3g}",
            str(layer.peak_feature),
            str(layer.peak_token),
            f"{layer.median:.3g}",
        )
    yield table
    figures_by_layer = [_summarize_mechanisms(layer) for layer in layers]
    names: dict[str, None] = {}
    for figures in figures_by_layer:
        names |= dict.fromkeys(figures)
    if not names:
        return
    headings = [name.replace("/", "\n") for name in names]
    table = console.number_table("layer", *headings, title="head mechanisms", names=0)
    for layer, figures in zip(layers, figures_by_layer, strict=True):
        cells = [f"{figures[name]:.3f}" if name in figures else "" for name in names]
        table.add_row(str(layer.layer), *cells)
    yield table


def _sink_cells(sinks: "Sequence[float]") -> tuple[str, str, str]:
    """Format the mean, the largest sink, and the index of its head."""
    if not sinks:
        return "", "", ""
    mean = sum(sinks) / len(sinks)
    largest = max(sinks)
    return f"{mean:.3f}", f"{largest:.3f}", str(sinks.index(largest))


def _summarize_mechanisms(layer: "LayerStatistics") -> dict[str, float]:
    figures = layer.means
    for name, values in layer.per_head.items():
        figures[f"least {name}"] = min(values)
    for name, values in layer.per_head.items():
        figures[f"most {name}"] = max(values)
    return figures


def plot_attention(
    layers: "Sequence[LayerStatistics]",
    out_png: Path,
    *,
    title: str,
) -> None:
    """Plot attention statistics by layer: those of each head as heatmaps, the rest as curves."""
    heatmaps = {}
    if any(layer.sinks for layer in layers):
        heatmaps["attention to the first token"] = [layer.sinks for layer in layers]
    for name in layers[0].per_head:
        heatmaps[name] = [layer.per_head.get(name, []) for layer in layers]
    mechanism_figures: set[str] = set()
    for layer in layers:
        mechanism_figures.update(layer.means)
    plots = len(heatmaps) + (2 if mechanism_figures else 1)
    figure = require_matplotlib()(figsize=(4.5 * plots, 4), layout="constrained")
    figure.suptitle(title)
    axes = iter(figure.subplots(1, plots, squeeze=False).flat)
    for name, values_by_layer in heatmaps.items():
        axis = next(axes)
        image = axis.imshow(_pad_rows(values_by_layer), vmin=0, vmax=1, aspect="auto")
        figure.colorbar(image, ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
    indices = [layer.layer for layer in layers]
    axis = next(axes)
    axis.plot(indices, [layer.peak for layer in layers], "o-", label="largest")
    axis.set(title="largest activation", xlabel="layer", yscale="log")
    axis.legend()
    if mechanism_figures:
        axis = next(axes)
        for name in sorted(mechanism_figures):
            means = [layer.means.get(name, math.nan) for layer in layers]
            axis.plot(indices, means, "o-", label=name)
        axis.set(title="mechanisms", xlabel="layer", yscale="linear")
        axis.legend()
    figure.savefig(out_png, format="png", dpi=120)


def _pad_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Pad rows with NaN to the same length."""
    length = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = [math.nan] * (length - len(row))
        padded.append([*row, *padding])
    return padded
