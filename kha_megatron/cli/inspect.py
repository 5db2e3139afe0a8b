"""``kha-megatron inspect``: learnt matrices of a checkpoint, and its attention on a text."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.cli import console, plots
from kha_megatron.cli.attention import TOKENS, attention_figures, tables
from kha_megatron.cli.options import AsJSON, Device
from kha_megatron.compare.charts import matrix_grid, require_matplotlib
from kha_megatron.config import KHAConfig
from kha_megatron.data import read_beginning
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import MATRICES
from kha_megatron.model.recorded import kha_of, knock_weights

if TYPE_CHECKING:
    from torch import Tensor

    from kha_megatron.hf.instruments import LayerFigures

Weights = dict[tuple[int, Projection], "Tensor"]
"""Matrices by layer and projection, each ``[matrices, D, D]``."""
_QUANTITIES = {"diagonal_mean": "diag", "off_diagonal_share": "off", "distance": "moved"}


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_OR_HF",
            help="Megatron's --save directory, one iter_0000123 in it, or a Hugging Face model.",
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(help="Directory for the PNG files.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file (UTF-8) to run the model on; any model.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, max=2**20, help="Tokens of the text. Default: 512 or fewer."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer directory of a Megatron checkpoint that records none."),
    ] = None,
    device: Device = "auto",
    as_json: AsJSON = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the PNG files in OUT_DIR.")
    ] = False,
) -> None:
    """Draw the learnt knocking-heads matrices of every layer and print statistics.

    Writes one PNG per projection and matrix, clipped to 0..1 as in the paper's Fig. 3; gates are
    not clipped. Prints per layer the mean of the diagonal, the share of the sum of squares off the
    diagonal, and the distance from the initial value in units of the norm of the identity.

    With --text, also runs the model once and reports per layer: the share of attention on the first
    token (attention sink), the largest activation with its feature and token, the mean of each gate
    and its share below 0.1, and the share of tokens that have each head (mixture of heads).
    Megatron checkpoints are converted into a temporary directory first.

    Examples:
      kha-megatron inspect my-hf-model pictures/ --text book.txt --tokens 2048
      kha-megatron inspect quickstart/run/checkpoints pictures/
      kha-megatron inspect my-hf-model pictures/ --json | jq '.matrices[0]'
    """
    from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.heads.diagnostics import diagnose

    require_matplotlib()
    check_output_folder(out_dir, overwrite=overwrite, only=("*.png",))
    words = None if text is None else read_beginning(text, tokens or TOKENS)
    opened = (HFCheckpoint if is_hf_folder(checkpoint) else MegatronCheckpoint).open(checkpoint)
    kha = kha_of(opened) or KHAConfig()
    # a model without matrices can only be inspected on a text
    weights = {} if words and not kha.variants else knock_weights(opened)
    passed = 0
    layers: list[LayerFigures] = []
    if words is not None:
        passed, layers = attention_figures(
            checkpoint, words, tokens=tokens, tokenizer=tokenizer, device=device
        )
    numbers = [
        {"layer": layer, "projection": projection} | asdict(diagnostics)
        for (layer, projection), weight in weights.items()
        for diagnostics in diagnose(weight, kha.variants[projection])
    ]
    with staged_folder(out_dir) as folder, console.log.status("Drawing"):
        _draw(weights, kha, folder)
        if layers:
            plots.attention(layers, folder / "attention.png", title=f"{passed} tokens")
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
            result["text"] = {"file": str(text), "tokens": passed}
            result["layers"] = [asdict(figures) for figures in layers]
        console.print_json(result)
        return
    _print_matrices(kha, numbers)
    if layers:
        for table in tables(layers, passed):
            console.out.print(table, "")
    console.log.print(f"{len(files)} pictures in {out_dir}: {', '.join(files)}", markup=False)


def _draw(weights: Weights, kha: KHAConfig, folder: Path) -> None:
    for projection, variant in kha.variants.items():
        for index, matrix in enumerate(MATRICES[variant]):
            matrix_grid(
                {layer: w[index] for (layer, name), w in weights.items() if name == projection},
                folder / f"{projection}_{matrix}.png",
                title=f"{matrix} matrix on {projection} heads ({variant})",
                diverging=matrix == "gate",
            )


def _print_matrices(kha: KHAConfig, numbers: list[dict[str, Any]]) -> None:
    """Print one table per projection, with three columns per matrix."""
    for projection, variant in kha.variants.items():
        columns = [f"{m}\n{what}" for m in MATRICES[variant] for what in _QUANTITIES.values()]
        title = f"{projection} heads ({variant})"
        table = console.numbers("\nlayer", *columns, title=title, names=0)
        rows: dict[int, list[str]] = {}
        for entry in numbers:
            if entry["projection"] == projection:
                cells = [f"{entry[quantity]:.3f}" for quantity in _QUANTITIES]
                rows.setdefault(entry["layer"], []).extend(cells)
        for layer, cells in sorted(rows.items()):
            table.add_row(str(layer), *cells)
        console.out.print(table, "")
