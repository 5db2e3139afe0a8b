"""Arguments that ``kha_megatron.training`` adds to Megatron's parser, and their checks."""

import argparse
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.config import ATTENTIONS, CONFIG_VARIABLE, PRESETS, KHAConfig, mechanism_types
from kha_megatron.data import check_data
from kha_megatron.errors import ConfigError, KHAError
from kha_megatron.heads import Knock
from kha_megatron.heads.gate import ALIASES
from kha_megatron.heads.knock import FOLDS, INITS, MATRICES, PROJECTIONS
from kha_megatron.mcore import cpu
from kha_megatron.mcore.compat import lacks_te_extension
from kha_megatron.model.fields import rows
from kha_megatron.model.model import Model
from kha_megatron.model.rules import check_arguments
from kha_megatron.model.run import Heads, kha_asked

DEVICES = ("cuda", "cpu")

_UNSUPPORTED = (
    "spec",
    "sft",
    "fim_data",
    "dataloader_inter_document_masking",
    "hybrid_context_parallel",
    "inprocess_restart",
    "logits_load_dir",
    "rampup_batch_size",
    "yaml_cfg",
)
"""Arguments that this entry point, or Megatron, would ignore."""

_UNFUSED = "--no-gradient-accumulation-fusion"
_CHOICES = {"kha_attention": ATTENTIONS, "kha_init": INITS, "kha_fold": FOLDS}
_HELP = {
    "kha_preset": f"One of {', '.join(PRESETS)}.",
    **{
        f"kha_{p}": f"{', '.join(MATRICES)} or none on the {p} heads; overrides the preset."
        for p in PROJECTIONS
    },
    "kha_heads": "Settings of head mechanisms as NAME.FIELD=VALUE, such as knock.value=mlp. NAME "
    "alone takes the mechanism's defaults, NAME=none none of it. There are "
    f"{', '.join((Knock.name, *mechanism_types()))}. Positions of gates are words, because "
    "notes on the paper number them in two ways; the numbers of its text are taken too: "
    f"{', '.join(f'{number} for {word}' for number, word in ALIASES.items())}.",
    "kha_attention": "gta: grouped-tied attention, with --rotary-percent 0.5; --kha-value then "
    "knocks the tied state. gla: grouped latent attention, with --multi-latent-attention. Without "
    "it, what Megatron's own arguments ask for.",
    "kha_latent_heads": "Heads of the latent in gla.",
    "kha_init": "random is the paper's ablation and trains to a higher loss.",
    "kha_init_seed": "Seed of --kha-init random.",
    "kha_fold": "Fold linear matrices into the QKV weight while training, instead of applying them "
    "to queries, keys and values: auto where a microbatch has tokens enough for that to be faster. "
    "The trained model is the same.",
}


def add_kha_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of this entry point to Megatron's parser (``extra_args_provider``)."""
    group = parser.add_argument_group("kha training")
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="cuda",
        help="Device to train on. cpu runs Megatron on the CPU with gloo, which is slow.",
    )
    group.add_argument(
        "--kha-upcycle",
        action="store_true",
        help="Start a new run from a checkpoint without KHA in --pretrained-checkpoint; the shared "
        "matrices start at the identity. Once --load holds a checkpoint of the run, it goes on "
        "from there.",
    )
    group.add_argument(
        "--kha-log-interval",
        type=int,
        metavar="N",
        help="Every N iterations, write for each layer to TensorBoard and W&B how far the shared "
        "matrices have come, their gradient norms, how open the gates are, the mean cosine "
        "between heads' values before and after the knock, what share of each head's attention the "
        "first token gets, the largest value that the layer hands on, and the load of heads (all "
        "as kha-*). Off by default.",
    )
    group.add_argument(
        "--kha-perturb-embedding",
        type=float,
        default=0.0,
        metavar="SIZE",
        help="Multiply every weight of the token embedding by 1 + SIZE x N(0, 1) at the start: a "
        "null run, which shows how far rounding alone moves a loss. 1e-6 in float32, 4e-3 in "
        "bfloat16. A checkpoint that is loaded stays as it is.",
    )
    parser.set_defaults(verify_integrity=True, eval_interval=1000)  # Megatron divides by its None
    group.add_argument(
        "--no-verify-integrity",
        dest="verify_integrity",
        action="store_false",
        help="Do not hash torch_dist checkpoints when saving, nor check the hashes when loading.",
    )
    if "--moe-router-bias-update-rms" not in parser._option_string_actions:  # a patch brings it too
        group.add_argument(
            "--moe-router-bias-update-rms",
            action="store_true",
            help="Move expert biases by (mean load - load) / RMS(mean load - load), as the paper "
            "does, instead of by its sign.",
        )
    if parser.get_default("kha_stock"):  # a patched Megatron has added the group already
        parser.set_defaults(kha_stock=False)
        return parser
    return add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``kha`` group with the arguments of the head mechanisms."""
    group = parser.add_argument_group(
        "kha",
        "Knocking-Heads Attention. Example: torchrun --nproc-per-node 8 -m kha_megatron.training "
        "--kha-preset kha_mlp --num-layers 24 ... (Megatron's own arguments)",
    )
    for row in (*rows(Heads), *(row for row in rows(Model) if row.argument in _HELP)):
        several: dict[str, Any] = {"action": "extend", "nargs": "+"}
        group.add_argument(
            row.flag,
            dest=row.argument,
            default=row.default,
            choices=_CHOICES.get(row.argument),
            help=_HELP[row.argument],
            **(several if row.many else {"type": row.kind}),
        )
    return parser


def choose_device(argv: list[str]) -> None:
    """Apply ``--device``: for ``cpu``, install the CPU runtime and disable what needs CUDA.

    Call before importing Megatron. Appends flags that the CPU or a missing apex requires to
    ``argv`` and logs them on rank 0.

    Raises:
        ConfigError: there is no CUDA device, or a flag needs CUDA on ``--device cpu``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    asked = parser.parse_known_args(argv[1:])[0]
    help_only = {"-h", "--help"} & set(argv)
    layers = _value(argv, "--transformer-impl")
    if asked.device == "cuda" and not help_only:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("no CUDA device found: add --device cpu to train on the CPU")
        if layers in (None, "transformer_engine") and lacks_te_extension():
            raise ConfigError(
                "Transformer Engine is installed without its compiled extension: run `pip install "
                "--no-build-isolation 'kha-megatron[te]'`, or add --transformer-impl local"
            )
        if _UNFUSED not in argv and find_spec("fused_weight_gradient_mlp_cuda") is None:
            argv.append(_UNFUSED)  # Megatron's output layer needs apex for this fusion
            announce(f"NVIDIA's apex is not installed: adding {_UNFUSED}")
        return
    given = {word.split("=", 1)[0] for word in argv}
    for name, variable in cpu.ENVIRONMENT.items():
        os.environ.setdefault(name, variable)
    if given & {"--use-torch-fsdp2", "--use-megatron-fsdp"}:  # Megatron's check of them refuses 1
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    cpu.install(despite_cuda=True, quiet=bool(help_only))
    flags = cpu.MEGATRON_FLAGS
    if "--fp8-format" in given and flags["--transformer-impl"] == "local":  # Megatron ignores it
        raise ConfigError(
            "--fp8-format needs Transformer Engine, and --device cpu uses Megatron's local layers: "
            "remove --fp8-format"
        )
    for name, needed in flags.items():
        if needed is not None and name in given and (other := _value(argv, name)) != needed:
            raise ConfigError(f"--device cpu needs {name} {needed}, not {other}: remove {name}")
    added = {name: value for name, value in flags.items() if name not in given}
    argv += [word for item in added.items() for word in item if word is not None]
    if added and not help_only:
        words = " ".join(" ".join(filter(None, item)) for item in added.items())
        announce(f"--device cpu adds {words}")


def _value(argv: list[str], name: str) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value", nargs="?")
    return parser.parse_known_args(argv[1:])[0].value


def kha_from_args(args: argparse.Namespace) -> KHAConfig:
    """Return the KHA configuration of the command line.

    Raises:
        ConfigError: there is none, a name is unknown, or ``KHA_CONFIG`` is set.
    """
    if os.environ.get(CONFIG_VARIABLE):
        raise ConfigError(
            f"{CONFIG_VARIABLE} is for --spec in stock scripts: unset it, and give --kha-* "
            "arguments"
        )
    if (kha := kha_asked(vars(args))) is None:
        raise ConfigError(
            "no KHA configuration: give --kha-preset (one of "
            f"{', '.join(PRESETS)}), --kha-query, --kha-key, --kha-value or --heads"
        )
    return kha


def check_args(args: argparse.Namespace) -> None:
    """Check the arguments before Megatron starts: layout, data and options without effect.

    Raises:
        ConfigError: the model or the batch cannot be divided as requested, or an option would be
            ignored or would give wrong numbers.
        DataError: the dataset is missing or cannot be split.
    """
    interval, writer = args.kha_log_interval, args.tensorboard_dir or args.wandb_project
    size = args.kha_perturb_embedding
    flags = [f"--{name.replace('_', '-')}" for name in _UNSUPPORTED if getattr(args, name)]
    mistakes = [
        (
            flags,
            f"{' '.join(flags)} has no effect in this entry point: remove {' '.join(flags)}, or "
            "run Megatron's pretrain_gpt.py with --spec kha_megatron.mcore.specs NAME",
        ),
        (
            args.ckpt_format == "torch",
            "--ckpt-format torch loads a checkpoint of another KHA configuration without an "
            "error: use torch_dist",
        ),
        (
            args.moe_router_bias_update_rms and not args.moe_router_enable_expert_bias,
            "--moe-router-bias-update-rms needs a bias: add --moe-router-enable-expert-bias",
        ),
        (
            args.init_model_with_meta_device and not args.use_megatron_fsdp,
            "--init-model-with-meta-device leaves weights uninitialised without "
            "--use-megatron-fsdp: remove it",
        ),
        (
            args.reset_attention_mask and args.transformer_impl == "transformer_engine",
            "--reset-attention-mask has no effect with Transformer Engine, whose causal attention "
            "reads no mask: use --transformer-impl local, or remove it",
        ),
        (
            interval is not None and (interval < 1 or not writer),
            f"--kha-log-interval {interval}: expected 1 or more, and --tensorboard-dir or "
            "--wandb-project to write to",
        ),
        (
            not 0 <= size < 1 or (size and args.pretrained_checkpoint),  # NaN is refused too
            f"--kha-perturb-embedding {size:g}: expected a share from 0 to 1, such as 1e-6, and no "
            "--pretrained-checkpoint, whose weights it does not change",
        ),
    ]
    for holds, message in mistakes:
        if holds:
            raise ConfigError(message)
    check_arguments(vars(args), args.world_size, kha_asked(vars(args)))
    check_data(vars(args))


@contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Convert assertions of Megatron's argument checks to ``ConfigError``.

    The message is the source line if an assertion has no message.
    """
    try:
        yield
    except KHAError:
        raise
    except (AssertionError, ValueError) as error:
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
        raise ConfigError(f"Megatron refuses these arguments: {' '.join(why.split())}") from error
