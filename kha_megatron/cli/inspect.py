"""``kha-megatron inspect``: plot the KHA matrices and attention statistics of a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.cli import console
from kha_megatron.cli.attention import TOKENS, attention_tables, measure_attention, plot_attention
from kha_megatron.cli.options import AsJSON, Device, HeadsFrom
from kha_megatron.compare.charts import draw_distances, draw_matrices, require_matplotlib
from kha_megatron.documents.reader import read_beginning
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES, Knock
from kha_megatron.model.recorded import is_folded, read_kha_config, read_knock_weights

if TYPE_CHECKING:
    from kha_megatron.hf.instruments import LayerStatistics

_QUANTITIES = {"diagonal_mean": "diag", "off_diagonal_share": "off", "distance": "moved"}


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_OR_HF", help="Path to a Megatron checkpoint or Hugging Face model."
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(help="Output directory for PNG files.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to run the model on.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, max=2**20, help="Maximum number of tokens (default: 512).")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer directory, if the checkpoint has none.")
    ] = None,
    device: Device = "auto",
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace PNG files.")] = False,
) -> None:
    """Plot the learned KHA matrices of each layer and print their statistics.

    Each PNG file shows one kind of matrix for all layers. As in Figure 3 of the paper, values are
    clipped to [0, 1] (except for gates). The tables have three columns per matrix: "diag" is the
    mean of the diagonal, "off" is the share of the squared Frobenius norm off the diagonal, and
    "moved" is the distance from the initialization relative to the norm of the identity, which is
    also plotted for all layers in distance.png.

    If you pass --text, the model also runs on that text and you get attention statistics for each
    layer: how much attention goes to the first token (attention sink), the largest activation, the
    mean of each gate and how often it is below 0.1, and the share of tokens per head in MoH.

    Examples:
      kha-megatron inspect my-hf-model pictures/ --text book.txt --tokens 2048
      kha-megatron inspect quickstart/run/checkpoints pictures/
      kha-megatron inspect my-hf-model pictures/ --json | jq '.matrices[0]'
    """
    from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.conversion.sources import FLOAT_DTYPES
    from kha_megatron.heads.diagnostics import diagnose

    require_matplotlib()
    check_output_folder(out_dir, overwrite=overwrite, only=("*.png",))
    content = None if text is None else read_beginning(text, tokens or TOKENS)
    reader = HFCheckpoint if is_hf_folder(checkpoint) else MegatronCheckpoint
    opened = reader.open(checkpoint)
    kha = read_kha_config(opened) or HeadsConfig()
    if content and is_folded(opened):
        kha = kha.without(Knock)
    weights = {}
    if kha.variants or not content:  # models without KHA matrices require --text
        weights = read_knock_weights(opened)
    for (layer, projection), weight in weights.items():
        if weight.dtype not in FLOAT_DTYPES.values():
            raise CheckpointError(
                f"{opened.path}: expected {', '.join(FLOAT_DTYPES)} for the matrices of the "
                f"{projection} heads in layer {layer}, got {weight.dtype}. Inspect the model "
                "before it was quantized."
            )
    used = 0
    layers: list[LayerStatistics] = []
    if content is not None:
        used, layers = measure_attention(
            checkpoint,
            content,
            tokens=tokens,
            tokenizer=tokenizer,
            device=device,
        )
    numbers = []
    for (layer, projection), weight in weights.items():
        for diagnostics in diagnose(weight, kha.variants[projection]):
            entry = {"layer": layer, "projection": projection}
            numbers.append(entry | asdict(diagnostics))
    with staged_folder(out_dir) as folder, console.log.status("Drawing"):
        draw_matrices(weights, kha, folder)
        if numbers:
            draw_distances(_distances(numbers), folder / "distance.png")
        if layers:
            plot_attention(layers, folder / "attention.png", title=f"{used} tokens")
    files = sorted(file.name for file in out_dir.glob("*.png"))
    if as_json:
        result = {
            "checkpoint": str(opened.path),
            "iteration": getattr(opened, "iteration", None),
            "kha": kha.to_dict(),
            "matrices": numbers,
            "files": [str(out_dir / name) for name in files],
        }
        if layers:
            result["text"] = {"file": str(text), "tokens": used}
            result["layers"] = [asdict(figures) for figures in layers]
        console.print_json(result)
        return
    _print_matrices(kha, numbers)
    if layers:
        for table in attention_tables(layers, used):
            console.out.print(table, "")
    console.log.print(f"Saved {len(files)} plots to {out_dir}: {', '.join(files)}", markup=False)


def _distances(numbers: list[dict[str, Any]]) -> dict[str, dict[int, float | None]]:
    """Return the distances from the initialization by layer, for each kind of matrix."""
    distances: dict[str, dict[int, float | None]] = {}
    for entry in numbers:
        name = f"{entry['projection']} {entry['matrix']}"
        distances.setdefault(name, {})[entry["layer"]] = entry["distance"]
    return distances


def _print_matrices(kha: HeadsConfig, numbers: list[dict[str, Any]]) -> None:
    for projection, variant in kha.variants.items():
        columns = []
        for matrix in MATRICES[variant]:
            for heading in _QUANTITIES.values():
                columns.append(f"{matrix}\n{heading}")
        title = f"{projection} heads ({variant})"
        table = console.number_table("\nlayer", *columns, title=title, names=0)
        cells_by_layer: dict[int, list[str]] = {}
        for entry in numbers:
            if entry["projection"] != projection:
                continue
            cells = cells_by_layer.setdefault(entry["layer"], [])
            for quantity in _QUANTITIES:
                cells.append(f"{entry[quantity]:.3f}")
        for layer, cells in sorted(cells_by_layer.items()):
            table.add_row(str(layer), *cells)
        console.out.print(table, "")
