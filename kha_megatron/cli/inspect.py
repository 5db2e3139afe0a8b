"""``kha-megatron inspect``: plot the KHA matrices and attention statistics of a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.cli import console
from kha_megatron.cli.attention import (
    DEFAULT_TOKENS,
    AttentionStatistics,
    attention_tables,
    measure_attention,
    plot_attention,
)
from kha_megatron.cli.options import AsJSON, Device, HeadsFrom
from kha_megatron.compare.charts import draw_distances, draw_matrices, require_matplotlib
from kha_megatron.documents.reader import read_beginning
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES, Knock
from kha_megatron.model.recorded import is_folded, read_kha_config, read_knock_weights

Weights = dict[tuple[int, Projection], Any]
"""KHA matrices by layer and projection, see :func:`read_knock_weights`."""

_HEADINGS = {"diagonal_mean": "diag", "off_diagonal_share": "off", "distance": "moved"}
"""Column headings for the fields of ``Diagnostics``."""


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

    require_matplotlib()
    check_output_folder(out_dir, overwrite=overwrite, only=("*.png",))
    content = None if text is None else read_beginning(text, tokens or DEFAULT_TOKENS)
    reader = HFCheckpoint if is_hf_folder(checkpoint) else MegatronCheckpoint
    opened = reader.open(checkpoint)
    kha = read_kha_config(opened) or HeadsConfig()
    if content and is_folded(opened):
        kha = kha.without(Knock)
    weights: Weights = {}
    if kha.variants or not content:  # models without KHA matrices require --text
        weights = read_knock_weights(opened)
    _check_dtypes(opened.path, weights)
    attention: AttentionStatistics | None = None
    if content is not None:
        attention = measure_attention(
            checkpoint,
            content,
            tokens=tokens,
            tokenizer=tokenizer,
            device=device,
        )
    diagnostics = _diagnose_all(weights, kha)
    with staged_folder(out_dir) as folder, console.log.status("Drawing"):
        draw_matrices(weights, kha, folder)
        if diagnostics:
            draw_distances(_distances(diagnostics), folder / "distance.png")
        if attention and attention.layers:
            plot_attention(attention, folder / "attention.png")
    pictures = sorted(file.name for file in out_dir.glob("*.png"))
    if as_json:
        result = {
            "checkpoint": str(opened.path),
            "iteration": getattr(opened, "iteration", None),
            "kha": kha.to_dict(),
            "matrices": diagnostics,
            "files": [str(out_dir / name) for name in pictures],
        }
        if attention and attention.layers:
            result["text"] = {"file": str(text), "tokens": attention.tokens}
            result["layers"] = [asdict(layer) for layer in attention.layers]
        console.print_json(result)
        return
    _print_matrices(kha, diagnostics)
    if attention and attention.layers:
        for table in attention_tables(attention):
            console.out.print(table, "")
    console.log.print(
        f"Saved {len(pictures)} plots to {out_dir}: {', '.join(pictures)}", markup=False
    )


def _check_dtypes(path: Path, weights: Weights) -> None:
    from kha_megatron.conversion.sources import FLOAT_DTYPES

    for (layer, projection), weight in weights.items():
        if weight.dtype not in FLOAT_DTYPES.values():
            raise CheckpointError(
                f"{path}: expected {', '.join(FLOAT_DTYPES)} for the matrices of the "
                f"{projection} heads in layer {layer}, got {weight.dtype}. Inspect the model "
                "before it was quantized."
            )


def _diagnose_all(weights: Weights, kha: HeadsConfig) -> list[dict[str, Any]]:
    """Return the layer, the projection and the statistics of each matrix."""
    from kha_megatron.heads.diagnostics import diagnose

    entries = []
    for (layer, projection), weight in weights.items():
        for matrix_diagnostics in diagnose(weight, kha.variants[projection]):
            location = {"layer": layer, "projection": projection}
            entries.append(location | asdict(matrix_diagnostics))
    return entries


def _distances(diagnostics: list[dict[str, Any]]) -> dict[str, dict[int, float | None]]:
    """Return the distances from the initialization by layer, for each kind of matrix."""
    distances: dict[str, dict[int, float | None]] = {}
    for entry in diagnostics:
        name = f"{entry['projection']} {entry['matrix']}"
        distances.setdefault(name, {})[entry["layer"]] = entry["distance"]
    return distances


def _print_matrices(kha: HeadsConfig, diagnostics: list[dict[str, Any]]) -> None:
    """Print a table for each projection, with a row for each layer."""
    for projection, variant in kha.variants.items():
        columns = []
        for matrix in MATRICES[variant]:
            for heading in _HEADINGS.values():
                columns.append(f"{matrix}\n{heading}")
        title = f"{projection} heads ({variant})"
        table = console.number_table("\nlayer", *columns, title=title, left_aligned=0)
        cells_by_layer: dict[int, list[str]] = {}
        for entry in diagnostics:
            if entry["projection"] != projection:
                continue
            cells = cells_by_layer.setdefault(entry["layer"], [])
            for field in _HEADINGS:
                cells.append(f"{entry[field]:.3f}")
        for layer, cells in sorted(cells_by_layer.items()):
            table.add_row(str(layer), *cells)
        console.out.print(table, "")
