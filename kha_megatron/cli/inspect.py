"""``kha-megatron inspect``: what the shared matrices of a checkpoint have learnt, and what its
attention does with a text."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from kha_megatron.checkpoint.staging import check_output_folder, staged_folder
from kha_megatron.cli import console, plots
from kha_megatron.cli.attention import TOKENS, attention_figures, tables
from kha_megatron.cli.options import AsJSON, Device
from kha_megatron.config import KHAConfig
from kha_megatron.data.text_files import read_beginning
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import MATRICES, Variant
from kha_megatron.model.recorded import kha_of, knock_weights

if TYPE_CHECKING:
    from torch import Tensor

    from kha_megatron.checkpoint.hf_reader import HFCheckpoint
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.hf.instruments import LayerFigures

Weights = dict[tuple[int, Projection], "Tensor"]


def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_OR_HF",
            help="Megatron's --save folder, one iter_0000123 folder, or a Hugging Face model.",
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(help="Folder for the PNG files.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text file (UTF-8) to pass through the model, which may be any model."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=2**20,
            help="Tokens of the text that pass, its first ones.",
            show_default="512, or the model's positions if those are fewer",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer folder for --text, if a checkpoint of Megatron names none."),
    ] = None,
    device: Device = "auto",
    as_json: AsJSON = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the PNG files that OUT_DIR holds.")
    ] = False,
) -> None:
    """Draw the learnt knocking-heads matrices of every layer and print how far they have come.

    One PNG per projection and matrix, clipped to 0..1 as in the paper's Fig. 3, gates unclipped.
    Per layer: the mean of the diagonal, the share of the energy (sum of squares) off the diagonal,
    and the distance from the start, in units of the identity's norm.

    With --text, also of stock models: the share of each head's attention that the first token gets
    (attention sink; 64 tokens are asked, evenly spread), the largest value that each layer hands
    on, its feature and token (massive activation), how open gates are and what share of them is
    below 0.1, and the share of tokens that have a head (mixture-of-head). One pass of the model; a
    checkpoint of Megatron is converted into a temporary folder first.

    Examples:
      kha-megatron inspect my-hf-model pictures/ --text book.txt --tokens 2048
      kha-megatron inspect quickstart/run/checkpoints pictures/
      kha-megatron inspect my-hf-model pictures/ --json | jq '.matrices[0]'
    """
    plots.require_matplotlib()
    check_output_folder(out_dir, overwrite=overwrite, only=("*.png",))
    words = None if text is None else read_beginning(text, tokens or TOKENS)
    opened = _open(checkpoint)
    kha = kha_of(opened) or KHAConfig()
    # only a text says anything of a model without matrices
    weights = {} if words and not kha.variants else knock_weights(opened)
    passed = 0
    layers: list[LayerFigures] = []
    if words is not None:
        passed, layers = attention_figures(
            checkpoint, words, tokens=tokens, tokenizer=tokenizer, device=device
        )
    iteration = getattr(opened, "iteration", None)
    numbers = _diagnose(weights, kha)
    with staged_folder(out_dir) as folder:
        _draw(weights, kha, iteration, folder)
        if layers:
            plots.attention(layers, folder / "attention.png", title=f"{passed} tokens")
    files = sorted(file.name for file in out_dir.glob("*.png"))
    if as_json:
        result = {
            "checkpoint": str(opened.path),
            "iteration": iteration,
            "kha": kha.to_dict(),
            "matrices": numbers,
            "files": [str(out_dir / name) for name in files],
        }
        if layers:
            result["text"] = {"file": str(text), "tokens": passed}
            result["layers"] = [asdict(figures) for figures in layers]
        console.print_json(result)
        return
    for projection, variant in kha.variants.items():
        console.out.print(_table(projection, variant, numbers), "")
    if layers:
        for table in tables(layers, passed):
            console.out.print(table, "")
        console.out.print(
            "sink: share of a head's attention that the first token gets; peak: largest absolute "
            "value that the layer hands on; gate-score: mean of a gate; gate-shut: share of it "
            "below 0.1; head load: share of tokens that have the head"
        )
    if weights:
        _explain_matrices()
    console.log.print(f"{len(files)} pictures in {out_dir}: {', '.join(files)}", markup=False)


def _explain_matrices() -> None:
    console.out.print(
        "diag: mean of the diagonal; off: share of the energy (sum of squares) off the diagonal; "
        "moved: distance from the start, where 1 is the norm of the identity"
    )


def _open(path: Path) -> "MegatronCheckpoint | HFCheckpoint":
    from kha_megatron.checkpoint.hf_reader import HFCheckpoint, is_hf_folder
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint

    return (HFCheckpoint if is_hf_folder(path) else MegatronCheckpoint).open(path)


def _diagnose(weights: Weights, kha: KHAConfig) -> list[dict[str, Any]]:
    """One plain dictionary per layer, projection and matrix."""
    from kha_megatron.ops.diagnostics import diagnose

    return [
        {"layer": layer, "projection": projection} | asdict(diagnostics)
        for (layer, projection), weight in weights.items()
        for diagnostics in diagnose(weight, kha.variants[projection])
    ]


def _draw(weights: Weights, kha: KHAConfig, iteration: int | None, folder: Path) -> None:
    pictures = [(p, v, i, m) for p, v in kha.variants.items() for i, m in enumerate(MATRICES[v])]
    for projection, variant, index, matrix in track(
        pictures, "drawing", console=console.log, transient=True
    ):
        letter = projection[0].upper()
        symbol = f"T^{letter}" if matrix == "proj" else rf"W^{{{matrix}}}"
        when = "" if iteration is None else f"iteration {iteration}, "
        values = "unclipped" if matrix == "gate" else "clipped to 0..1"
        plots.matrix_grid(
            {
                layer: weight[index]
                for (layer, name), weight in weights.items()
                if name == projection
            },
            folder / f"{projection}_{matrix}.png",
            title=f"${symbol}$ on {projection} heads ({variant})\n{when}{values}",
            diverging=matrix == "gate",
        )


def _table(projection: Projection, variant: Variant, numbers: list[dict[str, Any]]) -> Table:
    rows: dict[int, list[str]] = {}
    for entry in numbers:
        if entry["projection"] == projection:
            values = (entry[k] for k in ("diagonal_mean", "off_diagonal_share", "distance"))
            rows.setdefault(entry["layer"], []).extend(f"{value:.3f}" for value in values)
    quantities = (f"{m}\n{what}" for m in MATRICES[variant] for what in ("diag", "off", "moved"))
    title = f"{projection} heads ({variant})"
    table = console.numbers("\nlayer", *quantities, title=title, names=0)
    for layer, cells in sorted(rows.items()):
        table.add_row(str(layer), *cells)
    return table
