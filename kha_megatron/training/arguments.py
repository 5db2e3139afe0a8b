"""Arguments that ``kha_megatron.training`` adds to Megatron's parser, and their checks."""

import argparse
import os
from importlib.util import find_spec
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.config import ATTENTIONS, CONFIG_VARIABLE, PRESETS, KHAConfig, mechanism_types
from kha_megatron.data import check_data
from kha_megatron.errors import ConfigError, raise_first
from kha_megatron.heads import Knock
from kha_megatron.heads.gate import ALIASES
from kha_megatron.heads.knock import FOLDS, INITS, MATRICES, PROJECTIONS
from kha_megatron.mcore import cpu
from kha_megatron.mcore.compat import lacks_te_extension
from kha_megatron.model.fields import rows
from kha_megatron.model.model_config import ModelConfig
from kha_megatron.model.rules import check_arguments
from kha_megatron.model.run import Heads, parse_kha_config

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
"""Arguments that this entry point or Megatron would ignore."""

_UNFUSED = "--no-gradient-accumulation-fusion"
_CHOICES = {"kha_attention": ATTENTIONS, "kha_init": INITS, "kha_fold": FOLDS}
_HELP = {
    "kha_preset": f"One of {', '.join(PRESETS)}.",
    **{
        f"kha_{p}": f"Variant on {p} heads: {', '.join(MATRICES)} or none. Overrides the preset."
        for p in PROJECTIONS
    },
    "kha_heads": "Settings of head mechanisms as NAME.FIELD=VALUE, such as knock.value=mlp. NAME "
    "alone selects the mechanism with its defaults, and NAME=none removes it. Mechanisms: "
    f"{', '.join((Knock.name, *mechanism_types()))}. Gate positions may be given by their number "
    f"in the paper: {', '.join(f'{number} is {word}' for number, word in ALIASES.items())}.",
    "kha_attention": "gta: grouped-tied attention, with --rotary-percent 0.5; --kha-value then "
    "applies to the tied state. gla: grouped latent attention, with --multi-latent-attention. "
    "Default: the attention that Megatron's own arguments select.",
    "kha_latent_heads": "Number of latent heads of gla.",
    "kha_init": "random is the paper's ablation and trains to a higher loss.",
    "kha_init_seed": "Seed of --kha-init random.",
    "kha_fold": "Fold linear matrices into the QKV weight during training instead of applying them "
    "to queries, keys and values. auto: fold if the microbatch has enough tokens for this to be "
    "faster. The trained model is the same.",
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
        help="Start a new run from a checkpoint without KHA in --pretrained-checkpoint. The shared "
        "matrices start at the identity. If --load holds a checkpoint of the run, resume from it.",
    )
    group.add_argument(
        "--kha-log-interval",
        type=int,
        metavar="N",
        help="Every N iterations, log for each layer to TensorBoard and W&B (as kha-*) the "
        "distance of the shared matrices from the identity, their gradient norms, mean gates, the "
        "mean cosine between heads' values before and after the knock, each head's attention to "
        "the first token, the largest output of the layer, and the load of heads. Off by default.",
    )
    group.add_argument(
        "--kha-perturb-embedding",
        type=float,
        default=0.0,
        metavar="SIZE",
        help="Multiply every weight of the token embedding by 1 + SIZE x N(0, 1) at the start, for "
        "null runs, which show how far rounding alone moves a loss. Use 1e-6 in float32 and 4e-3 "
        "in bfloat16. A loaded checkpoint is not changed.",
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
            help="Update expert biases by (mean load - load) / RMS(mean load - load), as the paper "
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
    for row in (*rows(Heads), *(row for row in rows(ModelConfig) if row.argument in _HELP)):
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
        ConfigError: there is no CUDA device, or ``--fp8-format`` would be ignored.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    asked = parser.parse_known_args(argv[1:])[0]
    given = {word.split("=", 1)[0] for word in argv}
    trains = not {"-h", "--help"} & given
    if asked.device != "cpu":
        if trains:
            _prepare_for_cuda(argv, asked.transformer_impl)
        return
    for name, variable in cpu.ENVIRONMENT.items():
        os.environ.setdefault(name, variable)
    if given & {"--use-torch-fsdp2", "--use-megatron-fsdp"}:  # Megatron's check of them refuses 1
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    cpu.install(despite_cuda=True, quiet=not trains)
    flags = cpu.MEGATRON_FLAGS
    if "--fp8-format" in given and flags["--transformer-impl"] == "local":
        raise ConfigError("Megatron's local layers of --device cpu ignore --fp8-format. Remove it.")
    added = {name: value for name, value in flags.items() if name not in given}
    words = [word for item in added.items() for word in item if word is not None]
    argv += words
    if words and trains:
        announce(f"--device cpu adds {' '.join(words)}")


def _prepare_for_cuda(argv: list[str], layers: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("No CUDA device found. Add --device cpu to train on the CPU.")
    if layers == "transformer_engine" and lacks_te_extension():
        raise ConfigError(
            "Transformer Engine is installed without its compiled extension. Run `pip install "
            "--no-build-isolation 'kha-megatron[te]'`, or add --transformer-impl local."
        )
    if _UNFUSED not in argv and find_spec("fused_weight_gradient_mlp_cuda") is None:
        argv.append(_UNFUSED)  # Megatron's output layer needs apex for this fusion
        announce(f"NVIDIA's apex is not installed. Adding {_UNFUSED}.")


def kha_from_args(args: argparse.Namespace) -> KHAConfig:
    """Return the KHA configuration of the command line.

    Raises:
        ConfigError: there is none, a name is unknown, or ``KHA_CONFIG`` is set.
    """
    if os.environ.get(CONFIG_VARIABLE):
        raise ConfigError(f"{CONFIG_VARIABLE} is for --spec. Unset it and use --kha-* arguments.")
    if (kha := parse_kha_config(vars(args))) is None:
        raise ConfigError("Expected --kha-preset, --kha-query, --kha-key, --kha-value or --heads.")
    return kha


def check_args(args: argparse.Namespace) -> None:
    """Check the arguments before Megatron starts: layout, data and options without effect.

    Raises:
        ConfigError: the model or the batch cannot be divided as requested, or an option would be
            ignored or would give wrong numbers.
        DataError: the dataset is missing or cannot be split.
    """
    for name in _UNSUPPORTED:
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise ConfigError(f"Remove --{flag}: only pretrain_gpt.py with --spec supports it.")
    mistakes = {
        f"This job was requeued, and --ckpt-step {args.ckpt_step} would load that iteration again "
        "instead of the last checkpoint. Submit a new job without --ckpt-step.": (
            args.ckpt_step and int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        ),
        "--ckpt-format torch loads a checkpoint of another KHA configuration without an error. Use "
        "torch_dist.": args.ckpt_format == "torch",
        "--moe-router-bias-update-rms needs --moe-router-enable-expert-bias.": (
            args.moe_router_bias_update_rms and not args.moe_router_enable_expert_bias
        ),
        "--init-model-with-meta-device needs --use-megatron-fsdp.": (
            args.init_model_with_meta_device and not args.use_megatron_fsdp
        ),
        "--reset-attention-mask needs --transformer-impl local.": args.reset_attention_mask
        and args.transformer_impl == "transformer_engine",
        "--kha-log-interval needs --tensorboard-dir or --wandb-project.": args.kha_log_interval
        and not (args.tensorboard_dir or args.wandb_project),
        "--kha-perturb-embedding has no effect with --pretrained-checkpoint.": (
            args.kha_perturb_embedding and args.pretrained_checkpoint
        ),
    }
    raise_first(mistakes)
    check_arguments(vars(args), args.world_size, parse_kha_config(vars(args)))
    check_data(vars(args))
