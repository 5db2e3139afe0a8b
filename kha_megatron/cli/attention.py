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
            if plan.source.tokenizer.origin is None:
                raise CheckpointError(
                    f"No Hugging Face tokenizer found for {checkpoint}. Pass --tokenizer DIRECTORY."
                )
            folder = Path(scratch) / "model"
            with console.log.status(f"Converting {checkpoint}"):
                plan.write(folder)
        encode, model = load_model(folder, target)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or TOKENS
    ids = encode(text, return_tensors="pt").input_ids[:, : tokens or min(TOKENS, limit)]
    if ids.shape[1] < 2:
        raise DataError(f"The text must have at least 2 tokens, got {ids.shape[1]}.")
    check_tokens(ids, model)
    return ids.shape[1], measure_layers(model, ids.to(target))


def attention_tables(layers: "Sequence[LayerStatistics]", tokens: int) -> Iterator[Table]:
    """Yield a table of attention sinks and activations (and one of mechanisms, if present)."""
    columns = ("layer", "sink mean", "sink max", "head", "peak", "feature", "token", "median")
    table = console.number_table(*columns, title=f"attention over {tokens} tokens", names=0)
    for x in layers:
        sinks = ["", "", ""]
        if x.sinks:
            most = max(x.sinks)
            sinks = [f"{sum(x.sinks) / len(x.sinks):.3f}", f"{most:.3f}", str(x.sinks.index(most))]
        peak = [f"{x.peak:.3g}", str(x.peak_feature), str(x.peak_token), f"{x.median:.3g}"]
        table.add_row(str(x.layer), *sinks, *peak)
    yield table
    rows = [
        x.means
        | {f"least {n}": min(values) for n, values in x.per_head.items()}
        | {f"most {n}": max(values) for n, values in x.per_head.items()}
        for x in layers
    ]
    if names := list(dict.fromkeys(name for row in rows for name in row)):
        heads = [name.replace("/", "\n") for name in names]
        table = console.number_table("layer", *heads, title="head mechanisms", names=0)
        for x, row in zip(layers, rows, strict=True):
            cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
            table.add_row(str(x.layer), *cells)
        yield table


def plot_attention(
    layers: "Sequence[LayerStatistics]",
    out_png: Path,
    *,
    title: str,
) -> None:
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
