"""``kha-megatron convert``: checkpoints from Megatron to Hugging Face."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from kha_megatron.cli import console
from kha_megatron.errors import ConfigError
from kha_megatron.files import check_output_folder
from kha_megatron.mcore.compat import check_training_version

if TYPE_CHECKING:
    from kha_megatron.conversion.to_hf import Conversion
    from kha_megatron.conversion.verify import Agreement

app = typer.Typer(name="convert", help="Convert checkpoints.", no_args_is_help=True)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.callback()
def _commands() -> None:
    """Convert checkpoints between Megatron and Hugging Face."""


@app.command("to-hf")
def to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="Megatron's --save folder, or one iter_0000123 folder of it.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder, if not the one the run names.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Such as 500MB or 5GB.")] = "5GB",
    verify: Annotated[
        bool, typer.Option(help="Compare the logits with Megatron's own model on the CPU.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a converted model at OUT.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a trained checkpoint as a Hugging Face folder, and prove that it computes the same.

    Reads torch_dist checkpoints whatever TP, PP or EP wrote them; writes safetensors, the
    configuration, the tokenizer and the generation configuration.

    \b
    Example:
      kha-megatron convert to-hf runs/quickstart/checkpoints my-model
      kha-megatron convert to-hf ckpt/iter_0001000 my-model --dtype bfloat16 --json
    """
    result = convert(
        checkpoint,
        out,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_bytes=_bytes(max_shard_size),
        check=verify,
        overwrite=overwrite,
    )
    if as_json:
        typer.echo(json.dumps(_plain(*result), indent=2, allow_nan=False))
    else:
        console.out.print(_table(*result))
    _judge(result[1])


def convert(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    check: bool = True,
    overwrite: bool = False,
) -> "tuple[Conversion, Agreement | None]":
    """What the command does, for other commands: convert with a progress bar, then verify."""
    check_output_folder(out, overwrite=overwrite, mark="config.json")
    if check:
        check_training_version()
    from kha_megatron.conversion import to_hf, verify

    planned = to_hf.plan(checkpoint, dtype=dtype, tokenizer=tokenizer)
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.log, transient=True) as progress:
        task = progress.add_task("", total=planned.size)
        written = to_hf.convert(
            planned,
            out,
            max_shard_bytes=max_shard_bytes,
            on_bytes=lambda count: progress.advance(task, count),
        )
    if planned.tokenizer is None:
        console.log.print("no tokenizer written: the run did not use a Hugging Face tokenizer")
    elif (rows := planned.config.vocab_size) > (entries := len(planned.tokenizer)):
        console.log.print(
            f"all {rows} rows of the embedding are kept: padding does not explain that the "
            f"tokenizer has only {entries} entries"
        )
    if not check:
        return written, None
    if not verify.fits_in_memory(planned.checkpoint):
        needed = verify.needed_bytes(planned.checkpoint) / 10**9
        console.log.print(f"not verified: both models need {needed:.1f} GB of free memory")
        return written, None
    with console.log.status("verifying: running Megatron's model and the converted one"):
        return written, verify.verify(planned.checkpoint, out, planned.dtype)


def _judge(agreement: "Agreement | None") -> None:
    """Exit with 1 when the two models disagree by more than rounding."""
    from kha_megatron.conversion.verify import TOLERANCE

    if agreement is not None and not agreement.max_difference < TOLERANCE:
        console.error(
            f"the converted model's logits differ by {agreement.max_difference:.2e} from "
            f"Megatron's, more than {TOLERANCE:g}: do not use it, and report this"
        )
        raise typer.Exit(1)


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        number = text.upper().removesuffix(unit)
        if number != text.upper() and number.strip().isdecimal() and int(number) > 0:
            return int(number) * factor
    raise ConfigError(f"--max-shard-size {text!r} is no size: write 500MB or 5GB")


def _plain(written: "Conversion", agreement: "Agreement | None") -> dict[str, Any]:
    conversion = asdict(written) | {"path": str(written.path)}
    if agreement is None:
        return conversion | {"verification": None}
    numbers = asdict(agreement).items()  # JSON has no NaN
    verification = {name: value if math.isfinite(value) else None for name, value in numbers}
    return conversion | {"verification": verification}


def _table(written: "Conversion", agreement: "Agreement | None") -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("written", str(written.path))
    table.add_row(
        "tensors",
        f"{written.tensors} ({written.parameters:,} parameters, {written.size / 1e6:,.1f} MB "
        f"of {written.dtype} in {written.shards} file{'s' if written.shards > 1 else ''})",
    )
    table.add_row("tokenizer", written.tokenizer or "none")
    if agreement is None:
        table.add_row("verified", "no")
        return table
    table.add_row(
        "logits against Megatron",
        f"largest difference {agreement.max_difference:.2e}, mean {agreement.mean_difference:.2e}",
    )
    table.add_row("KL divergence", f"{agreement.kl:.2e} nats")
    table.add_row("same most likely token", f"{agreement.argmax:.2%} of {agreement.tokens}")
    return table
