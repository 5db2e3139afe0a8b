"""Tables and plots of attention statistics for ``kha-megatron inspect --text``.

The metrics follow arXiv:2505.06708 (section 4) and arXiv:2410.11842 (Figure 3).
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.cli.generate import check_tokens, load_model, parse_device
from kha_megatron.compare.charts import require_matplotlib
from kha_megatron.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerStatistics

DEFAULT_TOKENS = 512
"""Default value of ``--tokens``."""


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of a model for one text."""

    tokens: int
    """Number of tokens of the text that the model was run on."""
    layers: "list[LayerStatistics]"


def measure_attention(
    checkpoint: Path,
    text: str,
    *,
    tokens: int | None,
    tokenizer: Path | None,
    device: str,
) -> AttentionStatistics:
    """Run a model on the first tokens of a text.

    Megatron checkpoints are converted to Hugging Face format first, in a temporary directory.

    Raises:
        CheckpointError: If the checkpoint cannot be loaded or has no tokenizer.
        ConfigError: If the device does not exist or ``tokens`` exceeds the maximum length.
        DataError: If the text has fewer than two tokens.
    """
    from kha_megatron.checkpoint.hf_reader import is_hf_folder
    from kha_megatron.hf.instruments import measure_layers

    torch_device = parse_device(device)
    if is_hf_folder(checkpoint):
        hf_tokenizer, model = load_model(checkpoint, torch_device)
    else:
        with tempfile.TemporaryDirectory(prefix="kha-inspect-") as scratch:
            exported = Path(scratch, "model")
            _export(checkpoint, exported, tokenizer)
            hf_tokenizer, model = load_model(exported, torch_device)
    config = model.config.get_text_config()
    max_length = getattr(config, "max_position_embeddings", None) or DEFAULT_TOKENS
    token_limit = tokens or min(DEFAULT_TOKENS, max_length)
    token_ids = hf_tokenizer(text, return_tensors="pt").input_ids
    token_ids = token_ids[:, :token_limit]
    length = token_ids.shape[1]
    if length < 2:
        raise DataError(f"The text must have at least 2 tokens, got {length}.")
    check_tokens(token_ids, model)
    layers = measure_layers(model, token_ids.to(torch_device))
    return AttentionStatistics(tokens=length, layers=layers)


def _export(checkpoint: Path, out: Path, tokenizer: Path | None) -> None:
    """Convert a Megatron checkpoint to Hugging Face format. It must have a tokenizer."""
    from kha_megatron.conversion import to_hf

    plan = to_hf.plan_export(checkpoint, tokenizer=tokenizer)
    if plan.source.tokenizer.path is None:
        raise CheckpointError(
            f"No Hugging Face tokenizer found for {checkpoint}. Pass --tokenizer DIRECTORY."
        )
    with console.log.status(f"Converting {checkpoint}"):
        plan.write(out)


def attention_tables(statistics: AttentionStatistics) -> Iterator[Table]:
    """Yield a table of attention sinks and activations (and one of mechanisms, if present)."""
    yield _sink_table(statistics)
    metrics_by_layer = [_summarize_mechanisms(layer) for layer in statistics.layers]
    names: dict[str, None] = {}  # in order, without duplicates
    for metrics in metrics_by_layer:
        names |= dict.fromkeys(metrics)
    if not names:
        return
    headings = [name.replace("/", "\n") for name in names]
    table = console.number_table("layer", *headings, title="head mechanisms", left_aligned=0)
    for layer, metrics in zip(statistics.layers, metrics_by_layer, strict=True):
        cells = [str(layer.layer)]
        for name in names:
            cells.append(f"{metrics[name]:.3f}" if name in metrics else "")
        table.add_row(*cells)
    yield table


def _sink_table(statistics: AttentionStatistics) -> Table:
    table = console.number_table(
        "layer",
        "sink mean",
        "sink max",
        "head",
        "peak",
        "feature",
        "token",
        "median",
        title=f"attention over {statistics.tokens} tokens",
        left_aligned=0,
    )
    for layer in statistics.layers:
        table.add_row(
            str(layer.layer),
            *_sink_cells(layer.sinks),
            f"{layer.peak:.3g}",
            str(layer.peak_feature),
            str(layer.peak_token),
            f"{layer.median:.3g}",
        )
    return table


def _sink_cells(sinks: "Sequence[float]") -> tuple[str, str, str]:
    """Format the mean, the largest sink, and the index of its head."""
    if not sinks:
        return "", "", ""
    mean = sum(sinks) / len(sinks)
    largest = max(sinks)
    return f"{mean:.3f}", f"{largest:.3f}", str(sinks.index(largest))


def _summarize_mechanisms(layer: "LayerStatistics") -> dict[str, float]:
    """Return a layer's metrics by name, with the least and the most of those for each head."""
    metrics = dict(layer.means)
    for name, values in layer.per_head.items():
        metrics[f"least {name}"] = min(values)
    for name, values in layer.per_head.items():
        metrics[f"most {name}"] = max(values)
    return metrics


def plot_attention(statistics: AttentionStatistics, out_png: Path) -> None:
    """Plot attention statistics by layer: those of each head as heatmaps, the rest as curves."""
    layers = statistics.layers
    heatmaps = _list_heatmaps(layers)
    mechanism_metrics: set[str] = set()
    for layer in layers:
        mechanism_metrics.update(layer.means)
    curve_plots = 2 if mechanism_metrics else 1
    plots = len(heatmaps) + curve_plots
    figure = require_matplotlib()(figsize=(4.5 * plots, 4), layout="constrained")
    figure.suptitle(f"{statistics.tokens} tokens")
    axes = iter(figure.subplots(1, plots, squeeze=False).flat)
    for name, values_by_layer in heatmaps.items():
        axis = next(axes)
        image = axis.imshow(_pad_rows(values_by_layer), vmin=0, vmax=1, aspect="auto")
        figure.colorbar(image, ax=axis)
        axis.set(title=name, xlabel="head", ylabel="layer")
    peaks = {"largest": [layer.peak for layer in layers]}
    _plot_curves(next(axes), layers, peaks, title="largest activation", yscale="log")
    if mechanism_metrics:
        curves = {}
        for name in sorted(mechanism_metrics):
            curves[name] = [layer.means.get(name, math.nan) for layer in layers]
        _plot_curves(next(axes), layers, curves, title="mechanisms", yscale="linear")
    figure.savefig(out_png, format="png", dpi=120)


def _list_heatmaps(layers: "Sequence[LayerStatistics]") -> dict[str, list[list[float]]]:
    """Return the values of each heatmap by title: one row for each layer, one value per head."""
    heatmaps = {}
    if any(layer.sinks for layer in layers):
        heatmaps["attention to the first token"] = [layer.sinks for layer in layers]
    for name in layers[0].per_head:
        heatmaps[name] = [layer.per_head.get(name, []) for layer in layers]
    return heatmaps


def _plot_curves(
    axis: Any,
    layers: "Sequence[LayerStatistics]",
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    yscale: str,
) -> None:
    indices = [layer.layer for layer in layers]
    for label, values in curves.items():
        axis.plot(indices, values, "o-", label=label)
    axis.set(title=title, xlabel="layer", yscale=yscale)
    axis.legend()


def _pad_rows(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Pad rows with NaN to the same length."""
    length = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = [math.nan] * (length - len(row))
        padded.append([*row, *padding])
    return padded
