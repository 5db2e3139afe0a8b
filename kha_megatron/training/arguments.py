"""The arguments that ``kha_megatron.training`` adds to Megatron's, and the checks on all."""

import argparse
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.config import ATTENTIONS, CONFIG_VARIABLE, PRESETS, KHAConfig, mechanism_types
from kha_megatron.data.paths import check_data
from kha_megatron.errors import ConfigError, KHAError
from kha_megatron.heads import Knock
from kha_megatron.heads.gate import ALIASES
from kha_megatron.heads.knock import FOLDS, INITS, MATRICES, PROJECTIONS
from kha_megatron.mcore import cpu
from kha_megatron.mcore.compat import lacks_te_extension
from kha_megatron.model.fields import rows
from kha_megatron.model.model import Model
from kha_megatron.model.rules import check_arguments
from kha_megatron.model.run import kha_asked
from kha_megatron.model.training import Heads

DEVICES = ("cuda", "cpu")

_NOT_HERE = {
    "spec": "the KHA arguments choose the layer spec: remove --spec, or run Megatron's "
    "pretrain_gpt.py with --spec kha_megatron.mcore.specs NAME",
    "sft": "this entry point pre-trains on plain sequences: run Megatron's pretrain_gpt.py with "
    "--spec kha_megatron.mcore.specs NAME for --sft",
    "fim_data": "this entry point pre-trains on plain sequences: run Megatron's pretrain_gpt.py "
    "with --spec kha_megatron.mcore.specs NAME for --fim-data",
    "flash_decode": "this entry point trains, and flash decode is for inference: remove "
    "--flash-decode",
    "dataloader_inter_document_masking": "this entry point does not pack documents: remove "
    "--dataloader-inter-document-masking, or use --reset-attention-mask with --transformer-impl "
    "local",
    "hybrid_context_parallel": "hybrid context parallelism needs packed sequences, which this "
    "entry point does not make: remove --hybrid-context-parallel",
    "inprocess_restart": "this entry point does not restart in process: remove "
    "--inprocess-restart, and let the launcher restart the job",
    "logits_load_dir": "this entry point does not distil: remove --logits-load-dir",
    "rampup_batch_size": "Megatron ignores --rampup-batch-size: use --step-batch-size-schedule "
    "'0:16 300K:32', and no --global-batch-size",
    "yaml_cfg": "this entry point does not read Megatron's YAML file: give all arguments in full",
}

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
    """Add what this entry point takes to Megatron's parser (its ``extra_args_provider``)."""
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
    """Add the ``kha`` group, which says what is knocked."""
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
    """Act on ``--device``: for ``cpu`` install the CPU runtime and turn off what needs CUDA.

    Runs before Megatron is imported. Flags that the CPU or a missing apex needs are appended
    to ``argv`` in place, and named on rank 0, unless the command line has them already.

    Raises:
        ConfigError: there is no CUDA device and ``--device cpu`` was not given, or it was given
            with a backend that only CUDA has.
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
        _go_without_apex(argv)
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


def _go_without_apex(argv: list[str]) -> None:
    """Turn off the fusion that Megatron's output layer has from apex, under either backend."""
    if _UNFUSED in argv:
        return
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401  (as Megatron asks)
    except ImportError:
        argv.append(_UNFUSED)
        announce(f"without NVIDIA's apex and its fused weight gradients: adds {_UNFUSED}")


def _value(argv: list[str], name: str) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value", nargs="?")
    return parser.parse_known_args(argv[1:])[0].value


def kha_from_args(args: argparse.Namespace) -> KHAConfig:
    """The KHA configuration that the command line asks for.

    Raises:
        ConfigError: nothing was asked for, a name is unknown, or ``KHA_CONFIG`` is set, which only
            stock scripts need.
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
    """Refuse what cannot train, before Megatron starts: layout, data and unsupported options.

    Raises:
        ConfigError: the model or the batch cannot be divided as asked, or an option is not for
            here.
        DataError: the dataset or the tokenizer is missing. What lies in an object store
            (``s3://``, ``msc://``) is not looked at.
    """
    for name, why in _NOT_HERE.items():
        if getattr(args, name, None):
            raise ConfigError(why)
    if args.moe_router_bias_update_rms and not args.moe_router_enable_expert_bias:
        raise ConfigError(
            "--moe-router-bias-update-rms without a bias to update: add "
            "--moe-router-enable-expert-bias"
        )
    if args.init_model_with_meta_device and not args.use_megatron_fsdp:
        raise ConfigError(
            "--init-model-with-meta-device: outside of Megatron-FSDP nothing gives these weights "
            "their first values: remove it"
        )
    if args.reset_attention_mask and args.transformer_impl == "transformer_engine":
        raise ConfigError(
            "--reset-attention-mask does nothing with Transformer Engine, whose causal attention "
            "reads no mask: use --transformer-impl local, or remove it"
        )
    in_mxfp8 = args.fp8_param_gather and args.fp8_recipe == "mxfp8"
    if in_mxfp8 and not (args.reuse_grad_buf_for_mxfp8_param_ag or args.use_megatron_fsdp):
        raise ConfigError(
            "--fp8-param-gather with --fp8-recipe mxfp8: Transformer Engine lays no such weights "
            "into Megatron's buffers: add --reuse-grad-buf-for-mxfp8-param-ag, which gathers bf16"
        )
    _check_log_interval(args)
    if not 0 <= args.kha_perturb_embedding < 1:  # not a number neither
        raise ConfigError(
            f"--kha-perturb-embedding {args.kha_perturb_embedding:g}: give a share from 0 to 1, "
            "such as 1e-6"
        )
    if args.kha_perturb_embedding and args.pretrained_checkpoint:
        raise ConfigError(
            "--kha-perturb-embedding changes the weights that a run draws, and not those of "
            f"--pretrained-checkpoint {args.pretrained_checkpoint}: remove one of them"
        )
    check_arguments(vars(args), args.world_size, kha_asked(vars(args)))
    check_data(vars(args))


@contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Around Megatron's own checks of the arguments, of which many assert and few say why.

    Raises:
        ConfigError: for what they raise; with the source line of one that says nothing.
    """
    try:
        yield
    except KHAError:
        raise
    except (AssertionError, ValueError) as error:
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
        raise ConfigError(f"Megatron refuses these arguments: {' '.join(why.split())}") from error


def _check_log_interval(args: argparse.Namespace) -> None:
    if args.kha_log_interval is None:
        return
    if args.kha_log_interval < 1:
        raise ConfigError(
            f"--kha-log-interval {args.kha_log_interval}: it must be 1 or more; leave it out to "
            "write nothing"
        )
    if not (args.tensorboard_dir or args.wandb_project):
        raise ConfigError(
            f"--kha-log-interval {args.kha_log_interval} has nowhere to write: add "
            "--tensorboard-dir, or --wandb-project with --wandb-exp-name"
        )
