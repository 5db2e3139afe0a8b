"""``kha-megatron verify``: are two checkpoints the same model?"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kha_megatron.cli import console

if TYPE_CHECKING:
    from kha_megatron.conversion.verify import Verification


def verify(
    one: Annotated[Path, typer.Argument(help="A Megatron checkpoint or a Hugging Face folder.")],
    other: Annotated[Path, typer.Argument(help="Another one, of either side.")],
    logits: Annotated[bool, typer.Option(help="Run both models, if they fit into memory.")] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare two checkpoints key by key, and by the logits that each one's own library computes.

    A model with linear knocking heads equals its folded form, and an upcycled model the one that it
    was made of. Exits with 1 when they differ.

    \b
    Example:
      kha-megatron verify ckpt/iter_0001000 my-model
      kha-megatron verify my-kha-model my-qwen3 --json
      kha-megatron verify ckpt/a ckpt/b --no-logits
    """
    if logits:
        from kha_megatron.mcore.compat import check_training_version

        check_training_version()
    verification = report(one, other, workers, logits=logits)
    if as_json:
        typer.echo(json.dumps(plain(verification), indent=2, allow_nan=False))
    else:
        table = Table(show_header=False, box=None)
        add_rows(table, verification)
        console.out.print(table)
    judge(verification)


def report(one: Path, other: Path, workers: int | None, *, logits: bool = True) -> "Verification":
    """Compare two checkpoints, and say on stderr that it takes time."""
    from kha_megatron.conversion import verify as comparison

    with console.log.status("verifying: comparing every tensor, then running both models"):
        return comparison.Pair.open(one, other).verify(logits=logits, workers=workers)


def plain(verification: "Verification | None") -> dict[str, Any] | None:
    """As JSON, which has no NaN."""
    if verification is None:
        return None
    values = asdict(verification) | {"agrees": verification.agrees}
    if values["logits"] is not None:
        values["logits"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values["logits"].items()
        }
    return values


def add_rows(table: Table, verification: "Verification") -> None:
    """The comparison, for a table of two columns."""
    tensors, logits = verification.tensors, verification.logits
    how = "" if tensors.remark == "as they are" else f", {tensors.remark}"
    table.add_row("tensors compared", f"{tensors.tensors}{how}")
    for name in ("missing", "unexpected", "mismatched", "different"):
        if names := getattr(tensors, name):
            table.add_row(name, f"{len(names)}: {', '.join(names[:5])}")
    if tensors.agrees:
        table.add_row("", "all equal, none missing, none too many")
    if logits is None:
        table.add_row("logits", "not compared")
        return
    table.add_row(
        "logits",
        f"largest difference {logits.max_difference:.2e}, mean {logits.mean_difference:.2e}",
    )
    table.add_row("KL divergence", f"{logits.kl:.2e} nats")
    table.add_row("same most likely token", f"{logits.argmax:.2%} of {logits.tokens}")
    if not logits.agrees:
        table.add_row("first layer that differs", str(logits.first_layer))


def judge(verification: "Verification | None") -> None:
    """Exit with 1 when the two models disagree by more than rounding."""
    if verification is None or verification.agrees:
        return
    tensors, logits = verification.tensors, verification.logits
    problems = [
        f"{len(names)} tensors {name}, {names[0]} for one"
        for name in ("missing", "unexpected", "mismatched", "different")
        if (names := getattr(tensors, name))
    ]
    if logits is not None and not logits.agrees:
        where = "" if logits.first_layer is None else f", from layer {logits.first_layer} on"
        problems.append(
            f"logits differ by {logits.max_difference:.2e}, more than {logits.limit:g}{where}"
        )
    console.error(f"not the same model: {'; '.join(problems)}")
    raise typer.Exit(1)
