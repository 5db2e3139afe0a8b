"""``kha-megatron convert``: convert checkpoints between Megatron and Hugging Face."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import progress

from kha_megatron.announcements import announce
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, Preset, Workers, parse_size
from kha_megatron.cli.running import Commands
from kha_megatron.cli.verify import conclude, not_finite, run_verification
from kha_megatron.config import KHAConfig
from kha_megatron.documents import read_beginning
from kha_megatron.mcore.compat import check_version
from kha_megatron.model.model_config import ModelConfig

if TYPE_CHECKING:
    from kha_megatron.conversion.engine import Conversion, Plan
    from kha_megatron.conversion.verify import Verification

_ROWS, _LENGTH = 8, 256
"""Largest number and length of the sequences read from ``--text``."""

app = Commands(name="convert", help="Convert checkpoints.", no_args_is_help=True)

ModelPath = Annotated[
    Path,
    typer.Argument(help="Megatron --save directory, one iteration in it, or Hugging Face model."),
]
Out = Annotated[Path, typer.Argument(help="Output directory. Must be new or empty.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")
]
AllowOverflow = Annotated[
    bool,
    typer.Option(
        "--allow-overflow", help="Convert values beyond the range of --dtype to infinity."
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Tokenizer directory. Default: the model's tokenizer.")
]
Verify = Annotated[bool, typer.Option(help="Compare every tensor and the logits afterwards.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a converted model at OUT.")]
ArchitectureName = Annotated[
    str | None,
    typer.Option(
        help="kha supports every attention and mechanism. Without KHA: qwen3, qwen3_moe, glm4_moe, "
        "deepseek_v3 (MLA), llama, mistral; with Megatron's output gate: qwen3_next, "
        "qwen3_5_text. auto chooses a stock architecture that fits. Default: kha; for fold: auto."
    ),
]
ShardSize = Annotated[str, typer.Option(help="Maximum file size, such as 500MB or 5GB.")]
DivisibleBy = Annotated[
    int,
    typer.Option(
        "--make-vocab-size-divisible-by",
        min=1,
        help="Value of the training run that will load OUT.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-model-parallel-size",
        min=1,
        help="Pad the vocabulary for this TP size. Other TP sizes can load OUT as well.",
    ),
]
VariantName = Annotated[
    str | None, typer.Option(help="linear, mlp, gate or none. Overrides the preset.")
]
_FOLD_HELP = """Fold linear knocking heads into the projections to get a stock model.

W' = W T for each head, computed in float64 and rounded once. MLA becomes deepseek_v3. GTA and GLA
have no stock architecture. Collaborative heads become ordinary heads with the same key.

Examples:
  kha-megatron convert fold runs/kha-linear/checkpoints my-qwen3
  kha-megatron convert fold my-kha-model my-qwen3 --dtype bfloat16
"""


@app.callback()
def _commands() -> None:
    """Convert checkpoints between Megatron and Hugging Face."""


@app.command("fold", help=_FOLD_HELP)
@app.command("to-hf")
def to_hf(
    context: typer.Context,
    checkpoint: ModelPath,
    out: Out,
    architecture: ArchitectureName = None,
    max_shard_size: ShardSize = "5GB",
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Convert a checkpoint to a Hugging Face directory and verify it.

    Reads torch_dist checkpoints of any TP, PP or EP layout. Writes safetensors, the configuration,
    the tokenizer and the generation configuration.

    Examples:
      kha-megatron convert to-hf quickstart/run/checkpoints my-model
      kha-megatron convert to-hf ckpt/iter_0001000 my-model --dtype bfloat16 --json
      kha-megatron convert to-hf baseline/checkpoints my-qwen3 --architecture auto
    """
    from kha_megatron.conversion import to_hf

    plan = to_hf.plan_export(
        checkpoint,
        fold=context.info_name == "fold",
        architecture=architecture,
        dtype=dtype,
        allow_overflow=allow_overflow,
        tokenizer=tokenizer,
        max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
    )
    written = _write(plan, out, workers, overwrite, verify)
    _finish(plan, written, workers, verify, as_json)


@app.command("to-megatron")
def to_megatron(
    model: ModelPath,
    out: Out,
    divisible_by: DivisibleBy = ModelConfig.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint that any layout of ranks loads.

    Takes kha, qwen3, qwen3_moe, llama, mistral, glm4_moe, deepseek_v3, and qwen3_next and
    qwen3_5_text with full attention in every layer. The checkpoint is a release: a run starts from
    it at iteration 0 without optimizer state.

    Examples:
      kha-megatron convert to-megatron Qwen3-0.6B-Base ckpt/qwen3
      kha-megatron convert to-megatron my-model ckpt/my-model \\
        --tensor-model-parallel-size 4
    """
    from kha_megatron.conversion import to_megatron

    plan = to_megatron.plan_import(
        model,
        dtype=dtype,
        allow_overflow=allow_overflow,
        tokenizer=tokenizer,
        divisible_by=divisible_by,
        tensor_parallel=tensor_parallel,
    )
    written = _write(plan, out, workers, overwrite, verify)
    _finish(plan, written, workers, verify, as_json)


@app.command()
def upcycle(
    model: ModelPath,
    out: Out,
    to: Annotated[
        Literal["megatron", "hf"], typer.Option(help="Format to write OUT in.")
    ] = "megatron",
    kha_preset: Preset = None,
    kha_query: VariantName = None,
    kha_key: VariantName = None,
    kha_value: VariantName = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.FIELD=VALUE", help="Setting of a head mechanism; repeatable."),
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
    divisible_by: DivisibleBy = ModelConfig.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    max_shard_size: ShardSize = "5GB",
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: AsJSON = False,
) -> None:
    """Add KHA, gates or MoH to a pretrained model without changing its outputs.

    Knocking heads start at the identity. Gates start at one half, behind doubled weights. Both keep
    every bit of the logits. Mixture-of-head (moh.router=query_norm moh.quantized=true) changes no
    tensor, but tokens lose heads; --text prints the effect on the loss. Models with multi-latent
    attention (deepseek_v3) take linear matrices and gates on the output only.

    Examples:
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/kha --kha-preset kha_linear
      kha-megatron convert upcycle ckpt/baseline my-kha --to hf --kha-value mlp
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/gated --gate output=element
    """
    kha = KHAConfig.from_options(
        {"preset": kha_preset, "query": kha_query, "key": kha_key, "value": kha_value}
        | {"heads": [*(heads or ()), *(f"gate.{word}" for word in gate or ())]}
    )
    kha = kha or KHAConfig()  # refused below, like a preset without mechanisms
    if text is None and any(mechanism.is_sparse for mechanism in kha.mechanisms):
        announce(f"With {kha}, tokens lose heads and the loss changes. Pass --text to print it.")
    from kha_megatron.conversion import to_hf, to_megatron

    options: dict[str, Any] = {"dtype": dtype, "allow_overflow": allow_overflow}
    options |= {"tokenizer": tokenizer, "upcycle": kha}
    plan: Plan
    if to == "hf":
        size = parse_size("--max-shard-size", max_shard_size)
        plan = to_hf.plan_export(model, max_shard_bytes=size, **options)
    else:
        plan = to_megatron.plan_import(
            model, divisible_by=divisible_by, tensor_parallel=tensor_parallel, **options
        )
    tokens = None
    if text is not None:
        source = plan.source
        length = min(_LENGTH, source.model.max_position_embeddings)
        tokens = source.tokenizer.tokenize(
            read_beginning(text, _ROWS * _LENGTH), _ROWS, length, entries=source.model.vocab_size
        )
    written = _write(plan, out, workers, overwrite, verify or text is not None)
    losses: dict[str, float] = {}
    if tokens is not None:
        from kha_megatron.conversion.verify import loss_of

        with console.log.status("Running both models on the text"):
            losses = {"before": loss_of(plan.source.path, tokens), "after": loss_of(out, tokens)}
            losses["tokens"] = tokens.numel()
    _finish(plan, written, workers, verify, as_json, losses)


def convert(
    checkpoint: Path, out: Path, *, overwrite: bool = False
) -> "tuple[Conversion, Verification]":
    """Convert a checkpoint as ``to-hf`` does by default, for other commands."""
    from kha_megatron.conversion import to_hf

    plan = to_hf.plan_export(checkpoint)
    return _write(plan, out, None, overwrite, True), run_verification(plan.source.path, out, None)


def _write(
    plan: "Plan", out: Path, workers: int | None, overwrite: bool, verify: bool
) -> "Conversion":
    """Write the output with a progress bar in bytes."""
    if verify:
        check_version()
    plan.check_target(out, overwrite=overwrite)
    log = console.log
    with progress.Progress(
        progress.TextColumn("converting"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=log,
        transient=True,
        disable=not log.is_terminal,
    ) as bar:
        task = bar.add_task("", total=plan.size)
        written = plan.write(out, workers=workers, on_bytes=partial(bar.advance, task))
    tokenizer, rows = plan.source.tokenizer, plan.source.model.vocab_size
    entries = len(tokenizer.loaded) if tokenizer.loaded is not None else rows
    if tokenizer.origin is None:
        log.print("No tokenizer was written: the source has no Hugging Face tokenizer.")
    elif rows > entries and not plan.source.padding_arguments:
        log.print(
            f"Kept all {rows} rows of the embedding, because Megatron's padding does not explain "
            f"that the tokenizer has only {entries} entries."
        )
    return written


def _finish(
    plan: "Plan",
    written: "Conversion",
    workers: int | None,
    verify: bool,
    as_json: bool,
    losses: dict[str, float] | None = None,
) -> None:
    """Verify and run_verification. Exit with 1 if the two models differ by more than rounding."""
    files = f"{written.shards} file{'s' if written.shards > 1 else ''}"
    values = asdict(written)
    facts = {
        "written": str(written.path),
        "architecture": written.architecture,
        "tensors": f"{written.tensors} ({written.parameters:,} parameters, "
        f"{written.size / 1e6:,.1f} MB of {written.dtype} in {files})",
        "tokenizer": written.tokenizer or "none",
    }
    if written.arguments:
        facts["train on with"] = " ".join([*written.arguments, "--load RUN --save RUN"])
    facts |= not_finite(written.not_finite)
    if losses:
        values["loss"] = losses
        facts |= {f"loss {when}": f"{losses[when]:.4f} nats" for when in ("before", "after")}
    verification = run_verification(plan.source.path, written.path, workers) if verify else None
    conclude(verification, as_json, facts=facts, values=values)
