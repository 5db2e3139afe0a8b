"""``kha-megatron convert``: checkpoints between Megatron and Hugging Face, four ways."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.checkpoint.tracker import RELEASE, TRACKER, newest
from kha_megatron.cli import console
from kha_megatron.cli.verify import add_rows, judge, plain, report
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError, OutputError
from kha_megatron.mcore.compat import check_training_version

if TYPE_CHECKING:
    from kha_megatron.conversion.engine import Conversion, Plan
    from kha_megatron.conversion.verify import Verification

app = typer.Typer(name="convert", help="Convert checkpoints.", no_args_is_help=True)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_HF_MARK = "config.json"

Source = Annotated[
    Path,
    typer.Argument(help="Megatron's --save folder, one iteration of it, or a Hugging Face folder."),
]
Out = Annotated[Path, typer.Argument(help="Folder to write; new or empty.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")
]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer folder, if not the model's own.")]
ShardSize = Annotated[str, typer.Option(help="Such as 500MB or 5GB.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; default: one for each core.")]
Verify = Annotated[
    bool, typer.Option(help="Compare every tensor, and the logits of both libraries' models.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a converted model at OUT.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
DivisibleBy = Annotated[
    int,
    typer.Option(
        "--make-vocab-size-divisible-by", min=1, help="As in the training that goes on from it."
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-model-parallel-size",
        min=1,
        help="Pads the vocabulary as that training would; any other size loads it as well.",
    ),
]


@app.callback()
def _commands() -> None:
    """Convert checkpoints between Megatron and Hugging Face."""


@app.command("to-hf")
def to_hf(
    checkpoint: Source,
    out: Out,
    architecture: Annotated[
        str,
        typer.Option(
            help="kha, which has every attention and variant; of models without KHA also qwen3, "
            "qwen3_moe, glm4_moe, deepseek_v3 (MLA), llama, mistral, or auto for the one that fits."
        ),
    ] = "kha",
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, and prove that it computes the same.

    Reads torch_dist checkpoints whatever TP, PP or EP wrote them; writes safetensors, the
    configuration, the tokenizer and the generation configuration.

    \b
    Example:
      kha-megatron convert to-hf runs/quickstart/checkpoints my-model
      kha-megatron convert to-hf ckpt/iter_0001000 my-model --dtype bfloat16 --json
      kha-megatron convert to-hf baseline/checkpoints my-qwen3 --architecture auto
    """
    from kha_megatron.conversion import to_hf

    size = _bytes(max_shard_size)
    _check(out, _HF_MARK, overwrite, verify)
    planned = to_hf.plan(
        checkpoint,
        architecture=architecture,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_bytes=size,
    )
    _finish(_write(checkpoint, planned, out, workers, verify), as_json)


@app.command("to-megatron")
def to_megatron(
    model: Source,
    out: Out,
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    divisible_by: DivisibleBy = 128,
    tensor_parallel: TensorParallel = 1,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Write a Hugging Face model as a Megatron checkpoint for --load, under any layout of ranks.

    Takes kha, qwen3, qwen3_moe, llama, mistral, glm4_moe and deepseek_v3. The folder holds a
    release, which starts a run at iteration 0 without optimizer state, and the tokenizer.

    \b
    Example:
      kha-megatron convert to-megatron Qwen3-0.6B-Base ckpt/qwen3
      kha-megatron convert to-megatron my-model ckpt/my-model --tensor-model-parallel-size 4
    """
    from kha_megatron.conversion import to_megatron

    _check(out, TRACKER, overwrite, verify)
    planned = to_megatron.plan(
        model,
        dtype=dtype,
        tokenizer=tokenizer,
        divisible_by=divisible_by,
        tensor_parallel=tensor_parallel,
    )
    _finish(_write(model, planned, out, workers, verify), as_json)


@app.command()
def fold(
    checkpoint: Source,
    out: Out,
    architecture: Annotated[
        str,
        typer.Option(
            help="qwen3, qwen3_moe, glm4_moe, deepseek_v3, llama or mistral; auto: what fits."
        ),
    ] = "auto",
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Fold linear knocking heads into the projections: a stock model that any server runs.

    W' = W T for each head, computed in float64 and rounded once. MLA becomes deepseek_v3; GTA and
    GLA have no stock architecture.

    \b
    Example:
      kha-megatron convert fold runs/kha-linear/checkpoints my-qwen3
      kha-megatron convert fold my-kha-model my-qwen3 --dtype bfloat16
    """
    from kha_megatron.conversion import to_hf

    _check(out, _HF_MARK, overwrite, verify)
    planned = to_hf.plan(
        checkpoint,
        architecture=architecture,
        dtype=dtype,
        tokenizer=tokenizer,
        fold=True,
        max_shard_bytes=_bytes(max_shard_size),
    )
    _finish(_write(checkpoint, planned, out, workers, verify), as_json)


@app.command()
def upcycle(
    model: Source,
    out: Out,
    to: Annotated[str, typer.Option(help="megatron or hf.")] = "megatron",
    kha_preset: Annotated[str | None, typer.Option(help="Such as kha_mlp or kha_linear.")] = None,
    kha_query: Annotated[
        str | None, typer.Option(help="linear, mlp, gate or none, over the preset.")
    ] = None,
    kha_key: Annotated[str | None, typer.Option(help="As --kha-query.")] = None,
    kha_value: Annotated[str | None, typer.Option(help="As --kha-query.")] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.FIELD=VALUE", help="A head mechanism's setting; repeat it."),
    ] = None,
    dtype: Dtype = None,
    tokenizer: Tokenizer = None,
    divisible_by: DivisibleBy = 128,
    tensor_parallel: TensorParallel = 1,
    max_shard_size: ShardSize = "5GB",
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Give a pretrained model knocking heads at the identity: the same logits, ready to train on.

    Takes stock Hugging Face models and checkpoints of plain Megatron. Models with multi-latent
    attention (deepseek_v3) take linear matrices only.

    \b
    Example:
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/qwen3-kha --kha-preset kha_linear
      kha-megatron convert upcycle ckpt/baseline my-kha --to hf --kha-value mlp
    """
    if to not in ("megatron", "hf"):
        raise ConfigError(f"--to {to!r}: choose megatron or hf")
    kha = KHAConfig.asked(
        {"preset": kha_preset, "query": kha_query, "key": kha_key, "value": kha_value}
        | {"heads": heads or ()}
    )
    if kha is None:
        raise ConfigError(
            "nothing to knock: give --kha-preset, or --kha-query, --kha-key, --kha-value"
        )
    size = _bytes(max_shard_size)
    _check(out, _HF_MARK if to == "hf" else TRACKER, overwrite, verify)
    planned: Plan
    if to == "hf":
        from kha_megatron.conversion import to_hf

        planned = to_hf.plan(
            model, dtype=dtype, tokenizer=tokenizer, upcycle=kha, max_shard_bytes=size
        )
    else:
        from kha_megatron.conversion import to_megatron

        planned = to_megatron.plan(
            model,
            dtype=dtype,
            tokenizer=tokenizer,
            upcycle=kha,
            divisible_by=divisible_by,
            tensor_parallel=tensor_parallel,
        )
    _finish(_write(model, planned, out, workers, verify), as_json)


def convert(
    checkpoint: Path, out: Path, *, overwrite: bool = False
) -> "tuple[Conversion, Verification | None]":
    """What ``to-hf`` does by itself, for other commands."""
    from kha_megatron.conversion import to_hf

    _check(out, _HF_MARK, overwrite, verify=True)
    return _write(checkpoint, to_hf.plan(checkpoint), out, workers=None, check=True)


def _check(out: Path, mark: str, overwrite: bool, verify: bool) -> None:
    check_output_folder(out, overwrite=overwrite, mark=mark)
    if mark == TRACKER and (last := newest(out)) and last.name != RELEASE:
        raise OutputError(
            f"{out} holds {last.name} of a training, which --overwrite would delete: name another "
            "folder"
        )
    if verify:
        check_training_version()


def _write(
    source: Path, planned: "Plan", out: Path, workers: int | None, check: bool
) -> "tuple[Conversion, Verification | None]":
    """Write what was planned under a bar of bytes, with rate and time left, then verify it."""
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.log, transient=True) as progress:
        task = progress.add_task("", total=planned.size)
        advance = partial(progress.advance, task)
        written = planned.write(out, workers=workers, on_bytes=advance)
    companions, rows = planned.source.companions, planned.source.model.vocab_size
    if companions.origin is None:
        console.log.print("no tokenizer written: there is none of Hugging Face")
    elif companions.loaded is None or planned.source.padding_arguments:
        pass  # either nothing is known, or the padding is kept on purpose
    elif rows > (entries := len(companions.loaded)):
        console.log.print(
            f"all {rows} rows of the embedding are kept: padding does not explain that the "
            f"tokenizer has only {entries} entries"
        )
    return written, report(source, out, workers) if check else None


def _finish(result: "tuple[Conversion, Verification | None]", as_json: bool) -> None:
    """Print the report; exit with 1 when the two models disagree by more than rounding."""
    written, verification = result
    if as_json:
        values = asdict(written) | {"path": str(written.path)}
        values["verification"] = plain(verification)
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        console.out.print(_table(written, verification))
    judge(verification)


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        number = text.upper().removesuffix(unit)
        if number != text.upper() and number.strip().isdecimal() and int(number) > 0:
            return int(number) * factor
    raise ConfigError(f"--max-shard-size {text!r} is no size: write 500MB or 5GB")


def _table(written: "Conversion", verification: "Verification | None") -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("written", str(written.path))
    table.add_row("architecture", written.architecture)
    table.add_row(
        "tensors",
        f"{written.tensors} ({written.parameters:,} parameters, {written.size / 1e6:,.1f} MB "
        f"of {written.dtype} in {written.shards} file{'s' if written.shards > 1 else ''})",
    )
    table.add_row("tokenizer", written.tokenizer or "none")
    if written.architecture == "megatron":
        table.add_row("train on with", " ".join(written.arguments))
    if verification is None:
        table.add_row("verified", "no")
    else:
        add_rows(table, verification)
    return table
