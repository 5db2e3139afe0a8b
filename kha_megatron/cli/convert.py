"""``kha-megatron convert``: checkpoints between Megatron and Hugging Face, four ways."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kha_megatron.announcements import announce
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Preset, Workers, parse_size
from kha_megatron.cli.running import Commands
from kha_megatron.cli.verify import conclude, not_finite, report
from kha_megatron.config import KHAConfig
from kha_megatron.data.text_files import read_beginning
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.compat import check_version
from kha_megatron.model.model import Model

if TYPE_CHECKING:
    from kha_megatron.conversion.engine import Conversion, Plan
    from kha_megatron.conversion.verify import Verification

_ROWS, _LENGTH = 8, 256
"""Sequences that are read of ``--text``, and tokens of one at most."""

app = Commands(name="convert", help="Convert checkpoints.", no_args_is_help=True)

Source = Annotated[
    Path,
    typer.Argument(help="Megatron's --save folder, one iteration of it, or a Hugging Face folder."),
]
Out = Annotated[Path, typer.Argument(help="Folder to write; new or empty.")]
ShardSize = Annotated[str, typer.Option(help="Such as 500MB or 5GB.")]
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


DType = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")
]
AllowOverflow = Annotated[
    bool,
    typer.Option(
        "--allow-overflow",
        help="Let values beyond the range of --dtype become infinite. The report counts them.",
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Tokenizer directory, if not the model's own.")
]
Verify = Annotated[
    bool, typer.Option(help="Compare every tensor, and the logits of both models, afterwards.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a converted model at OUT.")]


@dataclass(frozen=True, kw_only=True)
class Output:
    """How to write and check a converted model."""

    workers: int | None = None
    verify: bool = True
    overwrite: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.verify:  # fail before the conversion, not after it
            check_version()


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
            "qwen3_moe, glm4_moe, deepseek_v3 (MLA), llama, mistral; with a gate on attention's "
            "output qwen3_next, qwen3_5_text, qwen3_5_moe_text (element-wise), lfm3 (head-wise); "
            "or auto for the one that fits."
        ),
    ] = "kha",
    max_shard_size: ShardSize = "5GB",
    dtype: DType = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, and prove that it computes the same.

    Reads torch_dist checkpoints whatever TP, PP or EP wrote them; writes safetensors, the
    configuration, the tokenizer and the generation configuration.

    Examples:
      kha-megatron convert to-hf quickstart/run/checkpoints my-model
      kha-megatron convert to-hf ckpt/iter_0001000 my-model --dtype bfloat16 --json
      kha-megatron convert to-hf baseline/checkpoints my-qwen3 --architecture auto
    """
    from kha_megatron.conversion import to_hf

    how = Output(workers=workers, verify=verify, overwrite=overwrite, as_json=as_json)
    plan = to_hf.plan(
        checkpoint,
        architecture=architecture,
        max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
        dtype=dtype,
        allow_overflow=allow_overflow,
        tokenizer=tokenizer,
    )
    _carry_out(plan, out, how)


@app.command("to-megatron")
def to_megatron(
    model: Source,
    out: Out,
    divisible_by: DivisibleBy = Model.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    dtype: DType = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Write a Hugging Face model as a Megatron checkpoint for --load, under any layout of ranks.

    Takes kha, qwen3, qwen3_moe, llama, mistral, glm4_moe and deepseek_v3, and of full attention in
    every layer qwen3_next, qwen3_5_text, qwen3_5_moe_text and lfm3. The folder holds a release,
    which starts a run at iteration 0 without optimizer state, and the tokenizer.

    Examples:
      kha-megatron convert to-megatron Qwen3-0.6B-Base ckpt/qwen3
      kha-megatron convert to-megatron my-model ckpt/my-model \\
        --tensor-model-parallel-size 4
    """
    from kha_megatron.conversion import to_megatron

    how = Output(workers=workers, verify=verify, overwrite=overwrite, as_json=as_json)
    plan = to_megatron.plan(
        model,
        divisible_by=divisible_by,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        allow_overflow=allow_overflow,
        tokenizer=tokenizer,
    )
    _carry_out(plan, out, how)


@app.command()
def fold(
    checkpoint: Source,
    out: Out,
    architecture: Annotated[
        str,
        typer.Option(help="As to-hf's without kha; auto: what fits."),
    ] = "auto",
    max_shard_size: ShardSize = "5GB",
    dtype: DType = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Fold linear knocking heads into the projections: a stock model that any server runs.

    W' = W T for each head, computed in float64 and rounded once. MLA becomes deepseek_v3; GTA and
    GLA have no stock architecture. Collaborative heads fold into ordinary ones with the same key,
    as wide as keys or values: where those differ, into an architecture that rotates a part of a
    head.

    Examples:
      kha-megatron convert fold runs/kha-linear/checkpoints my-qwen3
      kha-megatron convert fold my-kha-model my-qwen3 --dtype bfloat16
    """
    from kha_megatron.conversion import to_hf

    how = Output(workers=workers, verify=verify, overwrite=overwrite, as_json=as_json)
    plan = to_hf.plan(
        checkpoint,
        fold=True,
        architecture=architecture,
        max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
        dtype=dtype,
        allow_overflow=allow_overflow,
        tokenizer=tokenizer,
    )
    _carry_out(plan, out, how)


@app.command()
def upcycle(
    model: Source,
    out: Out,
    to: Annotated[Literal["megatron", "hf"], typer.Option(help="What OUT is for.")] = "megatron",
    kha_preset: Preset = None,
    kha_query: Annotated[
        str | None, typer.Option(help="linear, mlp, gate or none, over the preset.")
    ] = None,
    kha_key: Annotated[str | None, typer.Option(help="As --kha-query.")] = None,
    kha_value: Annotated[str | None, typer.Option(help="As --kha-query.")] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.FIELD=VALUE", help="A head mechanism's setting; repeat it."),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="--heads gate.FIELD=VALUE: output=element, output=head, value=element, ...",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Print the loss on the beginning of this text, before and after."),
    ] = None,
    divisible_by: DivisibleBy = Model.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    max_shard_size: ShardSize = "5GB",
    dtype: DType = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Give a pretrained model mechanisms of the heads: the same logits, ready to train on.

    Knocking heads begin at the identity, gates at one half behind doubled weights, both bit for
    bit; an element-wise gate on the output makes a stock gated model. Mixture-of-head
    (moh.router=query_norm moh.quantized=true) changes no tensor, but tokens lose heads: --text
    shows what that costs. Takes stock Hugging Face models and checkpoints of plain Megatron. Models
    with multi-latent attention (deepseek_v3) take linear matrices and gates on the output only.

    Examples:
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/kha --kha-preset kha_linear
      kha-megatron convert upcycle ckpt/baseline my-kha --to hf --kha-value mlp
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/gated --gate output=element
    """
    kha = KHAConfig.asked(
        {"preset": kha_preset, "query": kha_query, "key": kha_key, "value": kha_value}
        | {"heads": [*(heads or ()), *(f"gate.{word}" for word in gate or ())]}
    )
    if kha is None:
        raise ConfigError(
            "nothing to add: give --kha-preset, or --kha-query, --kha-key, --kha-value, --gate, "
            "--heads"
        )
    if text is None and any(mechanism.drops_heads for mechanism in kha.mechanisms):
        announce(f"{kha}: tokens lose heads, and the loss is another: --text FILE prints it")
    from kha_megatron.conversion import to_hf, to_megatron

    how = Output(workers=workers, verify=verify, overwrite=overwrite, as_json=as_json)
    plan: Plan
    if to == "hf":
        plan = to_hf.plan(
            model,
            upcycle=kha,
            max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
            dtype=dtype,
            allow_overflow=allow_overflow,
            tokenizer=tokenizer,
        )
    else:
        plan = to_megatron.plan(
            model,
            upcycle=kha,
            divisible_by=divisible_by,
            tensor_parallel=tensor_parallel,
            dtype=dtype,
            allow_overflow=allow_overflow,
            tokenizer=tokenizer,
        )
    _carry_out(plan, out, how, text=text)


def convert(
    checkpoint: Path, out: Path, *, overwrite: bool = False
) -> "tuple[Conversion, Verification]":
    """What ``to-hf`` does by itself, for other commands."""
    from kha_megatron.conversion import to_hf

    how, plan = Output(overwrite=overwrite), to_hf.plan(checkpoint)
    return _write(plan, out, how), report(plan.source.path, out, how.workers)


def _carry_out(plan: "Plan", out: Path, how: Output, *, text: Path | None = None) -> None:
    """Write, verify and report; exit with 1 when the two models disagree by more than rounding."""
    if text is not None:
        source, model = plan.source, plan.source.model
        length = min(_LENGTH, model.max_position_embeddings)
        words = read_beginning(text, _ROWS * _LENGTH)
        tokens = source.companions.read(words, _ROWS, length, entries=model.vocab_size)
    written = _write(plan, out, how)
    values, facts = asdict(written), _facts(written)
    verification = report(plan.source.path, out, how.workers) if how.verify else None
    if text is not None:
        from kha_megatron.conversion.verify import loss_of

        with console.log.status("running both models on the text"):
            losses = {"before": loss_of(plan.source.path, tokens), "after": loss_of(out, tokens)}
        values |= {"loss": losses | {"tokens": tokens.numel()}}
        facts |= {f"loss {when}": f"{loss:.4f} nats" for when, loss in losses.items()}
    conclude(verification, how.as_json, facts=facts, values=values)


def _write(plan: "Plan", out: Path, how: Output) -> "Conversion":
    """Write under a bar of bytes, with rate and time left."""
    plan.check_target(out, overwrite=how.overwrite)
    columns = (
        TextColumn("converting"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    log = console.log
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as progress:
        task = progress.add_task("", total=plan.size)
        advance = partial(progress.advance, task)
        written = plan.write(out, workers=how.workers, on_bytes=advance)
    companions, rows = plan.source.companions, plan.source.model.vocab_size
    if companions.origin is None:
        console.log.print("no tokenizer written: there is none of Hugging Face")
    elif companions.loaded is None or plan.source.padding_arguments:
        pass  # either nothing is known, or the padding is kept on purpose
    elif rows > (entries := len(companions.loaded)):
        console.log.print(
            f"all {rows} rows of the embedding are kept: padding does not explain that the "
            f"tokenizer has only {entries} entries"
        )
    return written


def _facts(written: "Conversion") -> dict[str, str]:
    rows = {
        "written": str(written.path),
        "architecture": written.architecture,
        "tensors": f"{written.tensors} ({written.parameters:,} parameters, "
        f"{written.size / 1e6:,.1f} MB of {written.dtype} in {written.shards} "
        f"file{'s' if written.shards > 1 else ''})",
        "tokenizer": written.tokenizer or "none",
    }
    if written.architecture == "megatron":
        rows["train on with"] = " ".join([*written.arguments, "--load RUN --save RUN"])
    return rows | not_finite(written.not_finite)
