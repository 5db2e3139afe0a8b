"""``kha-megatron convert``: convert checkpoints between Megatron and Hugging Face."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import progress

from kha_megatron.announcements import announce
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, HeadsFrom, Preset, Workers, parse_size
from kha_megatron.cli.running import Commands
from kha_megatron.cli.verify import conclude, not_finite
from kha_megatron.documents.reader import read_beginning
from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.compat import check_version
from kha_megatron.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from kha_megatron.conversion.engine import Conversion, Plan
    from kha_megatron.conversion.verify import Verification

_TEXT_SEQUENCES = 8
_TEXT_LENGTH = 256
"""The loss of ``--text`` is computed on this many sequences with at most this many tokens each."""

convert_app = Commands(
    name="convert",
    help="Convert checkpoints between Megatron and Hugging Face.",
    no_args_is_help=True,
)

ModelPath = Annotated[
    Path,
    typer.Argument(help="Hugging Face model or Megatron checkpoint (--save or iter_* directory)."),
]
Out = Annotated[Path, typer.Argument(help="Output directory.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Dtype of the output (default: same as the input)."),
]
AllowOverflow = Annotated[
    bool, typer.Option("--allow-overflow", help="Store values that overflow --dtype as inf.")
]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer directory (default: the model's).")]
Verify = Annotated[bool, typer.Option(help="Compare tensors and logits after the conversion.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a converted model in OUT.")]
ArchitectureName = Annotated[
    str | None,
    typer.Option(
        help="Architecture of the exported model. Use kha for models with KHA or other head "
        "mechanisms, or the name of a transformers architecture (e.g. qwen3 or deepseek_v3) for "
        "models without them. auto selects an architecture that fits the model. By default, "
        "`convert fold` uses auto, and all other commands use kha."
    ),
]
ShardSize = Annotated[str, typer.Option(help="Maximum size of each safetensors file, e.g. 500MB.")]
DivisibleBy = Annotated[
    int,
    typer.Option(
        "--make-vocab-size-divisible-by",
        min=1,
        help="Pad the vocabulary to a multiple of this value, as in Megatron.",
    ),
]
GPTModel = Annotated[
    bool,
    typer.Option(
        "--gpt-model",
        help="Write a checkpoint for Megatron's GPTModel (pretrain_gpt.py), which is deprecated, "
        "instead of HybridModel (pretrain_hybrid.py).",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-model-parallel-size",
        min=1,
        help="Pad the vocabulary for this TP size. You can still load with other TP sizes.",
    ),
]
VariantName = Annotated[
    str | None, typer.Option(help="KHA variant: linear, mlp, gate or none. Overrides --kha-preset.")
]
_FOLD_HELP = """Fold KHA into the projection weights and export a Hugging Face model for inference.

Each head's projection matrix is multiplied by its KHA matrix in float64, then rounded once.

KHA-Linear leaves a stock model. Models with MLA become deepseek_v3. GTA and GLA are not supported,
since no stock architecture implements them. Collaborative heads are folded as well: they become
ordinary heads with identical keys.

KHA-MLP and KHA-Gate on the values leave a GLU, i.e. a kha model that decodes about as fast as a
stock model. It cannot be converted to Megatron anymore, so keep the original model for training. On
queries and keys, they are not folded.

Examples:
  kha-megatron convert fold quickstart/run/checkpoints my-folded-model
  kha-megatron convert fold runs/kha-linear/checkpoints my-qwen3
  kha-megatron convert fold my-kha-model my-qwen3 --dtype bfloat16
"""


@convert_app.command("fold", help=_FOLD_HELP)
@convert_app.command("to-hf")
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
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Convert a checkpoint to Hugging Face format and verify the result.

    Reads torch_dist checkpoints saved with any TP, PP and EP size. Writes safetensors files, the
    config, the generation config and the tokenizer.

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


@convert_app.command("to-megatron")
def to_megatron(
    model: ModelPath,
    out: Out,
    divisible_by: DivisibleBy = ModelConfig.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    gpt_model: GPTModel = False,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint.

    You can load the checkpoint with any parallel layout. It is a "release" checkpoint, i.e.
    training starts at iteration 0 with a fresh optimizer state.

    Supported architectures: kha, qwen2, qwen3, qwen3_moe, llama, mistral, glm4_moe and deepseek_v3.
    qwen3_next and qwen3_5_text only work if all layers use full attention.

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
        gpt_model=gpt_model,
    )
    written = _write(plan, out, workers, overwrite, verify)
    _finish(plan, written, workers, verify, as_json)


@convert_app.command()
def upcycle(
    model: ModelPath,
    out: Out,
    to: Annotated[
        Literal["megatron", "hf"], typer.Option(help="Format of the output.")
    ] = "megatron",
    kha_preset: Preset = None,
    kha_query: VariantName = None,
    kha_key: VariantName = None,
    kha_value: VariantName = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME.FIELD=VALUE", help="Head mechanism setting. Repeatable."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file. If set, print the loss before and after on its beginning."),
    ] = None,
    divisible_by: DivisibleBy = ModelConfig.make_vocab_size_divisible_by,
    tensor_parallel: TensorParallel = 1,
    gpt_model: GPTModel = False,
    max_shard_size: ShardSize = "5GB",
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    tokenizer: Tokenizer = None,
    workers: Workers = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Add KHA, gates or MoH to a pretrained model without changing its outputs.

    KHA matrices start as the identity. Gates start at 1/2, so we double the preceding weights to
    compensate. Either way, the logits are bit-exact, except for rounding in the gates of Qwen3-Next
    and Qwen3.5 in bfloat16, with talking heads, and with gates in float16 where half an activation
    is subnormal.

    Mixture-of-head (--heads moh.router=query_norm --heads moh.quantized=true) does not change any
    tensor either, but it drops heads, so the loss does change. Use --text to see by how much. For
    multi-latent attention (deepseek_v3), only linear KHA and output gates are supported.

    Examples:
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/kha --kha-preset kha_linear
      kha-megatron convert upcycle ckpt/baseline my-kha --to hf --kha-value mlp
      kha-megatron convert upcycle Qwen3-0.6B-Base ckpt/gated \\
        --heads gate.output=element
    """
    kha = HeadsConfig.from_options(
        {
            "preset": kha_preset,
            "query": kha_query,
            "key": kha_key,
            "value": kha_value,
            "heads": heads,
        }
    )
    if kha is None:
        kha = HeadsConfig()  # planning the conversion raises an error
    drops_heads = any(mechanism.is_sparse for mechanism in kha.mechanisms)
    if drops_heads and text is None:
        announce(f"{kha} drops heads, so that the loss changes. Use --text to print the new loss.")
    from kha_megatron.conversion import to_hf, to_megatron

    plan: Plan
    if to == "hf":
        plan = to_hf.plan_export(
            model,
            max_shard_bytes=parse_size("--max-shard-size", max_shard_size),
            dtype=dtype,
            allow_overflow=allow_overflow,
            tokenizer=tokenizer,
            upcycle=kha,
        )
    else:
        plan = to_megatron.plan_import(
            model,
            gpt_model=gpt_model,
            dtype=dtype,
            allow_overflow=allow_overflow,
            tokenizer=tokenizer,
            upcycle=kha,
            divisible_by=divisible_by,
            tensor_parallel=tensor_parallel,
        )
    tokens = None if text is None else _tokenize(text, plan)
    runs_models = verify or tokens is not None
    written = _write(plan, out, workers, overwrite, runs_models)
    losses = None if tokens is None else _compare_losses(plan.source.path, out, tokens)
    _finish(plan, written, workers, verify, as_json, losses)


def _compare_losses(before: Path, after: Path, tokens: "Tensor") -> dict[str, float]:
    """Return the losses of two models, and the number of tokens, with the keys of ``--json``."""
    from kha_megatron.conversion.verify import loss_of

    with console.log.status("Running both models on the text"):
        return {
            "before": loss_of(before, tokens),
            "after": loss_of(after, tokens),
            "tokens": tokens.numel(),
        }


def _tokenize(text: Path, plan: "Plan") -> "Tensor":
    """Tokenize the beginning of a text file with the tokenizer of the source model."""
    source = plan.source
    length = min(_TEXT_LENGTH, source.model.max_length)
    content = read_beginning(text, _TEXT_SEQUENCES * _TEXT_LENGTH)
    tokens = source.tokenizer.tokenize(content, _TEXT_SEQUENCES, length)
    largest_id = int(tokens.max())
    if largest_id >= source.model.vocabulary:
        raise ConfigError(
            f"Token ID {largest_id} from the tokenizer is out of range for the vocabulary size "
            f"{source.model.vocabulary}. Pass the model's tokenizer with --tokenizer."
        )
    return tokens


@convert_app.command("update-code")
def update_code(
    model: Annotated[Path, typer.Argument(help="Directory of an exported kha model.")],
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Replace the modeling code in an exported kha model by the code of this version.

    Only the Python files and auto_map in config.json change. Run this command for every kha model
    that was exported without the classes for classification (see auto_map in its config.json). The
    code of these models generates wrong text with transformers 5.24 and newer.

    Examples:
      kha-megatron convert update-code my-model
    """
    from kha_megatron.conversion import code_files

    update = code_files.update_code(model)
    if as_json:
        console.print_json(asdict(update))
        return
    console.print_facts(
        {
            "updated": str(update.path),
            "code of version": update.version,
            "added": ", ".join(update.added) or "none",
            "replaced": ", ".join(update.replaced) or "none",
            "unchanged": ", ".join(update.unchanged) or "none",
        }
    )


def convert(
    checkpoint: Path,
    out: Path,
    *,
    overwrite: bool = False,
) -> "tuple[Conversion, Verification]":
    """Run ``convert to-hf`` with default options. Used by the quickstart."""
    from kha_megatron.conversion import to_hf

    plan = to_hf.plan_export(checkpoint)
    conversion = _write(plan, out, workers=None, overwrite=overwrite, runs_models=True)
    return conversion, _verify(plan, out)


def _verify(plan: "Plan", out: Path, workers: int | None = None) -> "Verification":
    from kha_megatron.conversion.verify import Pair

    with console.log.status("Comparing tensors and logits"):
        return Pair.open(plan.source.path, out).compare(workers=workers)


def _write(
    plan: "Plan",
    out: Path,
    workers: int | None,
    overwrite: bool,
    runs_models: bool,
) -> "Conversion":
    """Write the converted checkpoint with a progress bar.

    Args:
        runs_models: Whether the models will be run later. This requires a supported version of
            Megatron-Core, so we check the version before the conversion.
    """
    if runs_models:
        check_version()
    plan.check_target(out, overwrite=overwrite)
    with progress.Progress(
        progress.TextColumn("converting"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console.log,
        transient=True,
        disable=not console.log.is_terminal,
    ) as bar:
        task = bar.add_task("", total=plan.size)
        written = plan.write(out, workers=workers, on_bytes=partial(bar.advance, task))
    _report_tokenizer(plan)
    return written


def _report_tokenizer(plan: "Plan") -> None:
    """Print a note if no tokenizer was saved, or if the model has more rows than tokens."""
    tokenizer = plan.source.tokenizer
    if tokenizer.path is None:
        console.log.print(
            "No tokenizer was saved, because the source has no Hugging Face tokenizer."
        )
        return
    if tokenizer.vocab_size is None or plan.source.padding_arguments:
        return
    embedding_rows = plan.source.model.vocabulary
    vocab_size = tokenizer.vocab_size
    if embedding_rows > vocab_size:
        console.log.print(
            f"All {embedding_rows} embedding rows were kept, although the tokenizer has a "
            f"vocabulary size of {vocab_size}, because the other rows are not Megatron's padding."
        )


def _finish(
    plan: "Plan",
    written: "Conversion",
    workers: int | None,
    verify: bool,
    as_json: bool,
    losses: dict[str, float] | None = None,
) -> None:
    """Verify the converted checkpoint, and print the result of the command."""
    verification = _verify(plan, written.path, workers) if verify else None
    if verification is not None:
        _warn_about_folding(plan, written, verification)
    parameters = f"{written.parameters:,} parameters"
    size = f"{written.size / 1e6:,.1f} MB of {written.dtype}"
    files = "1 file" if written.shards == 1 else f"{written.shards} files"
    values = asdict(written)
    facts = {
        "written": str(written.path),
        "architecture": written.architecture,
        "tensors": f"{written.tensors} ({parameters}, {size} in {files})",
        "tokenizer": written.tokenizer or "none",
    }
    if written.arguments:
        facts["train on with"] = " ".join([*written.arguments, "--load RUN --save RUN"])
    facts |= not_finite(written.not_finite)
    if losses:
        values["loss"] = losses
        facts["loss before"] = f"{losses['before']:.4f} nats"
        facts["loss after"] = f"{losses['after']:.4f} nats"
    conclude(verification, as_json, facts=facts, values=values)


def _warn_about_folding(
    plan: "Plan",
    written: "Conversion",
    verification: "Verification",
) -> None:
    """Log a warning if rounding the folded weights changed which heads are selected."""
    from kha_megatron.conversion.verify import LOGIT_TOLERANCE

    logits = verification.logits
    if logits is None or not verification.tensors.remark.is_folded:
        return
    has_verdict = logits.limit is not None
    if has_verdict or logits.max_difference < LOGIT_TOLERANCE:
        return
    for mechanism in plan.source.model.kha.mechanisms:
        if mechanism.is_sparse:
            announce(
                f"Folding rounded the weights to {written.dtype}, so that {mechanism} can select "
                f"other heads. Logits differ by up to {logits.max_difference:.2g}."
            )
            return
