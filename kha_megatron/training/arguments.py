"""Command-line arguments for training with KHA."""

import argparse
import math
import os
from importlib.util import find_spec
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.data import check_data
from kha_megatron.errors import ConfigError, install_command
from kha_megatron.heads import Knock
from kha_megatron.heads.config import ATTENTIONS, CONFIG_VARIABLE, PRESETS, HeadsConfig
from kha_megatron.heads.knock import INITS, MATRICES, PROJECTIONS
from kha_megatron.heads.registry import mechanism_types, use_files
from kha_megatron.mcore import cpu
from kha_megatron.mcore.compat import cuda_versions, lacks_te_extension
from kha_megatron.mcore.patches import LLAMA3_ROPE
from kha_megatron.model.fields import as_flag, declared_fields
from kha_megatron.model.pattern import LayerPattern
from kha_megatron.model.rules import check_arguments, check_optimizer_package
from kha_megatron.model.run import HeadOptions, as_hybrid, parse_kha_config

DEVICES = ("cuda", "cpu")

_UNSUPPORTED = (
    "sft",
    "fim_data",
    "dataloader_inter_document_masking",
    "freeze_all_layers",
    "hybrid_context_parallel",
    "inprocess_restart",
    "logits_load_dir",
    "logits_save_dir",
    "rampup_batch_size",
    "yaml_cfg",
)
"""Arguments that this entry point or Megatron would ignore."""

_NO_FUSION = "--no-gradient-accumulation-fusion"


def _describe_head_options() -> dict[str, str]:
    """Return the help texts of :class:`HeadOptions` by argument."""
    mechanisms = ", ".join((Knock.name, *mechanism_types()))
    texts = {
        "kha_heads_from": "Python files with head mechanisms of your own, see "
        "`docs/own_mechanism.md`.",
        "kha_preset": "Named KHA configuration, or several joined with +, e.g. "
        f"kha_mlp+gate_output. Available presets: {', '.join(PRESETS)}. With Muon, KHA matrices "
        "are updated by Adam.",
        "kha_heads": "Configure other head mechanisms as NAME.FIELD=VALUE, e.g. "
        "gate.output=element. NAME enables a mechanism with its default settings and NAME=none "
        f"disables it. Available mechanisms: {mechanisms}.",
        "kha_attention": "Attention type that Megatron does not provide. gta: grouped-tied "
        "attention, requires --rotary-percent 0.5, and --kha-value applies to the tied state. gla: "
        "grouped latent attention, requires --multi-latent-attention.",
        "kha_latent_heads": "Number of latent heads if --kha-attention is gla.",
        "kha_init": "Initialization of the shared matrices. random is an ablation of the paper, "
        "with which a model does not start with the outputs of the model without KHA.",
        "kha_init_seed": "Random seed for --kha-init random.",
    }
    for projection in PROJECTIONS:
        texts[f"kha_{projection}"] = (
            f"KHA variant to apply to {projection} heads: {', '.join(MATRICES)}, or none to "
            "disable it. Overrides the preset."
        )
    return texts


_HELP = _describe_head_options()
_CHOICES = {"kha_attention": ATTENTIONS, "kha_init": INITS}
_SWITCH = {"action": "store_true"}
_TRAINING_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"choices": DEVICES, "default": "cuda"},
    "gpt_model": _SWITCH,
    "kha_upcycle": _SWITCH,
    "kha_fold_linear": _SWITCH,
    "kha_log_interval": {"type": int, "metavar": "N"},
    "kha_perturb_embedding": {"type": float, "default": 0.0, "metavar": "SIZE"},
    "save_interval_in_mins": {"type": float, "metavar": "N"},
    "no_verify_integrity": {"dest": "verify_integrity", "action": "store_false"},
    "moe_router_bias_update_rms": _SWITCH,
    **{f"rope_{name}": {"type": type(value)} for name, value in LLAMA3_ROPE.items()},
}
_TRAINING_HELP = {
    "device": "Device to train on. With cpu, Megatron runs on the CPU with the gloo backend, which "
    "is meant for testing.",
    "gpt_model": "Build a GPTModel (deprecated in Megatron) instead of a HybridModel. By default, "
    "--num-layers is converted to --hybrid-layer-pattern, e.g. 2 layers become *-*- (or *E*E with "
    "experts).",
    "kha_upcycle": "Initialize the model from --pretrained-checkpoint, which was trained without "
    "KHA. The shared matrices are initialized to the identity, which preserves outputs bit for bit "
    "(up to rounding if heads mix their logits). If --load contains a checkpoint, training resumes "
    "from it instead.",
    "kha_fold_linear": "Fold KHA-Linear into the QKV weight once per training step. Microbatches "
    "then run the operations of a model without KHA. Gradients are the same up to rounding, and "
    "checkpoints do not change. Not supported with FSDP.",
    "kha_log_interval": "Number of iterations between logging KHA metrics to TensorBoard and W&B. "
    "The metrics (kha-*) include the distance of each shared matrix from the identity, mean gate "
    "values, attention to the first token and head load. Disabled by default.",
    "kha_perturb_embedding": "Multiply each weight of the token embedding by 1 + SIZE * N(0, 1) "
    "after initialization. Used by null runs, which measure how much the final loss changes "
    "because of rounding alone. Recommended: 1e-6 for float32 and 4e-3 for bfloat16.",
    "save_interval_in_mins": "Also save a checkpoint when the last one is N minutes old. With "
    "--save-retain-interval, only the newest of these checkpoints is kept.",
    "no_verify_integrity": "Do not write hashes of torch_dist checkpoints, and do not verify them "
    "when loading.",
    "moe_router_bias_update_rms": "Update expert biases by (mean load - load) / RMS(mean load - "
    "load) as in the paper, instead of by the sign of (mean load - load).",
    **{
        f"rope_{name}": f"Same as {name} in Hugging Face (default: {value}). Requires "
        "--use-rope-scaling."
        for name, value in LLAMA3_ROPE.items()
    },
}


def add_kha_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all of our arguments to Megatron's parser (as its ``extra_args_provider``)."""
    group = parser.add_argument_group("kha training")
    for name, options in _TRAINING_OPTIONS.items():
        flag = as_flag(name)
        if flag not in parser._option_string_actions:  # a patch adds --moe-router-bias-update-rms
            group.add_argument(flag, help=_TRAINING_HELP[name], **options)
    parser.set_defaults(verify_integrity=True)
    parser.set_defaults(eval_interval=1000)  # Megatron divides by it, but its default is None
    is_patched_megatron = parser.get_default("kha_stock")
    if is_patched_megatron:  # it has added the group already
        parser.set_defaults(kha_stock=False)
        return parser
    return add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``kha`` group, i.e. arguments that configure head mechanisms."""
    group = parser.add_argument_group(
        "kha",
        "Knocking-Heads Attention. Example: torchrun --nproc-per-node 8 -m kha_megatron.training "
        "--kha-preset kha_mlp --num-layers 24 ... (Megatron's own arguments)",
    )
    for field in declared_fields(HeadOptions):
        options: dict[str, Any] = {"type": field.value_type}
        if field.is_list:
            options = {"action": "extend", "nargs": "+"}
        group.add_argument(
            field.flag,
            dest=field.argument,
            default=field.default,
            choices=_CHOICES.get(field.argument),
            help=_HELP[field.argument],
            **options,
        )
    return parser


def choose_device(argv: list[str]) -> None:
    """Apply ``--device`` and ``--heads-from``. Must be called before Megatron is imported.

    With ``--device cpu``, this installs the CPU runtime and appends the Megatron flags needed for
    it to ``argv``. On CUDA without apex, it disables gradient accumulation fusion in local layers.

    Raises:
        ConfigError: If there is no CUDA device, or if ``--fp8-format`` would be ignored.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--heads-from", nargs="+", action="extend", default=[])
    options, _ = parser.parse_known_args(argv[1:])
    use_files(options.heads_from)
    passed_flags = {word.split("=", 1)[0] for word in argv}
    is_training = passed_flags.isdisjoint(("-h", "--help"))
    if options.device == "cpu":
        _prepare_for_cpu(argv, passed_flags, is_training=is_training)
    elif is_training:
        _prepare_for_cuda(argv, options.transformer_impl)


def _prepare_for_cpu(argv: list[str], passed_flags: set[str], *, is_training: bool) -> None:
    for name, variable in cpu.ENVIRONMENT.items():
        os.environ.setdefault(name, variable)
    if passed_flags & {"--use-torch-fsdp2", "--use-megatron-fsdp"}:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]  # Megatron does not allow 1 with FSDP
    cpu.install(despite_cuda=True, quiet=not is_training)
    flags = cpu.MEGATRON_FLAGS
    if "--fp8-format" in passed_flags and flags["--transformer-impl"] == "local":
        raise ConfigError(
            "--fp8-format is not supported with --device cpu, because Megatron's local layers "
            "ignore it."
        )
    added_words = []
    for flag, value in flags.items():
        if flag in passed_flags:
            continue
        added_words.append(flag)
        if value is not None:
            added_words.append(value)
    argv += added_words
    if added_words and is_training:
        announce(f"Adding arguments for --device cpu: {' '.join(added_words)}")


def _prepare_for_cuda(argv: list[str], transformer_impl: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"No CUDA device found ({cuda_versions()}). To train on the CPU, add --device cpu."
        )
    if transformer_impl == "transformer_engine" and lacks_te_extension():
        raise ConfigError(
            "Transformer Engine is installed without its compiled extension. Run "
            f"{install_command('te', '--no-build-isolation ')}, or add --transformer-impl local."
        )
    # Transformer Engine's layers do not need apex, see mcore.patches
    needs_apex = transformer_impl == "local" or "--use-torch-fsdp2" in argv
    has_apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    if needs_apex and not has_apex and _NO_FUSION not in argv:
        argv.append(_NO_FUSION)
        announce(f"Adding {_NO_FUSION}, because NVIDIA's apex is not installed.")


def kha_from_args(args: argparse.Namespace) -> HeadsConfig:
    """Build the KHA config from parsed arguments.

    Raises:
        ConfigError: If there is no KHA argument, a name is unknown, or ``KHA_CONFIG`` is set.
    """
    if os.environ.get(CONFIG_VARIABLE):
        raise ConfigError(
            f"{CONFIG_VARIABLE} only applies to layer specs (--spec). Unset it and use --kha-* "
            "arguments."
        )
    kha = parse_kha_config(vars(args))
    if kha is None:
        raise ConfigError(
            "No head mechanism given. Pass --kha-preset, --kha-query, --kha-key, --kha-value or "
            "--heads."
        )
    return kha


def set_layer_pattern(args: argparse.Namespace, *, pattern_is_saved: bool = False) -> None:
    """Replace ``--num-layers`` by ``--hybrid-layer-pattern``, unless ``--gpt-model`` is set.

    ``pattern_is_saved`` means that a pattern comes from a checkpoint. If its pipeline stages do not
    fit the current layout, we split it again.
    """
    saved_pattern = None
    if pattern_is_saved:
        saved_pattern = LayerPattern.parse(args.hybrid_layer_pattern or "")
    if saved_pattern and not _fits_pipeline(saved_pattern, args.pipeline_model_parallel_size):
        args.hybrid_layer_pattern = None
        args.num_layers = len(saved_pattern.moe)
        args.moe_layer_freq = list(saved_pattern.moe)
        args.mtp_num_layers = saved_pattern.predictions or None
    vars(args).update(as_hybrid(vars(args)))


def _fits_pipeline(pattern: LayerPattern, num_ranks: int) -> bool:
    """Whether each pipeline rank gets the same number of stages of the pattern."""
    num_stages = len(pattern.stages)
    if num_ranks == 1:  # Megatron has no virtual stages without pipeline parallelism
        return num_stages == 1
    return num_stages % num_ranks == 0


def check_args(args: argparse.Namespace) -> None:
    """Check arguments, parallel layout and dataset, so that errors show up before Megatron starts.

    Raises:
        ConfigError: See :func:`check_options`.
        DataError: If the dataset is missing, cannot be split, or was made with another tokenizer.
    """
    check_options(args)
    check_data(vars(args))


def check_options(args: argparse.Namespace) -> None:
    """Check arguments and parallel layout.

    Raises:
        ConfigError: If sizes are not divisible, or if an option would be ignored or give wrong
            results.
    """
    if args.spec:
        raise ConfigError("--spec is not supported by this entry point. Use --kha-preset.")
    for name in _UNSUPPORTED:
        if getattr(args, name):
            flag = as_flag(name)
            raise ConfigError(
                f"{flag} is not supported by this entry point. Use pretrain_gpt.py with --spec."
            )
    if args.ckpt_step and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        raise ConfigError(
            f"This job was requeued, and --ckpt-step {args.ckpt_step} would load that iteration "
            "again instead of the last checkpoint. Submit a new job without --ckpt-step."
        )
    if args.ckpt_format == "torch":
        raise ConfigError(
            "--ckpt-format torch is not supported, because it loads checkpoints with a different "
            "KHA configuration without an error. Use torch_dist."
        )
    if args.ckpt_format == "torch_dcp":
        raise ConfigError(
            "--ckpt-format torch_dcp is not supported, because Megatron cannot load its own "
            "checkpoints in this format. Use torch_dist."
        )
    if args.save and (args.save_interval or 0) <= 0:
        raise ConfigError(
            "--save requires a positive --save-interval, i.e. the number of iterations between "
            "checkpoints."
        )
    if not math.isfinite(args.kha_perturb_embedding):
        raise ConfigError(
            f"--kha-perturb-embedding must be finite, got {args.kha_perturb_embedding}. Use 1e-6 "
            "for float32 and 4e-3 for bfloat16."
        )
    for name in ("save_interval_in_mins", "kha_log_interval"):
        value = getattr(args, name)
        if value is not None and value < 0:
            flag = as_flag(name)
            raise ConfigError(f"{flag} must not be negative, got {value}. Use 0 to disable it.")
    if args.moe_router_bias_update_rms and not args.moe_router_enable_expert_bias:
        raise ConfigError("--moe-router-bias-update-rms requires --moe-router-enable-expert-bias.")
    for name in LLAMA3_ROPE:
        if getattr(args, f"rope_{name}") is not None and not args.use_rope_scaling:
            flag = as_flag(f"rope_{name}")
            raise ConfigError(f"{flag} requires --use-rope-scaling. Add it, or remove {flag}.")
    if args.kha_fold_linear and (args.use_torch_fsdp2 or args.use_megatron_fsdp):
        raise ConfigError("--kha-fold-linear does not support FSDP. Remove one of them.")
    if args.init_model_with_meta_device and not args.use_megatron_fsdp:
        raise ConfigError("--init-model-with-meta-device requires --use-megatron-fsdp.")
    _check_attention_mask(args)
    check_optimizer_package(args.optimizer)
    _check_optimizer(args)
    check_arguments(vars(args), args.world_size, parse_kha_config(vars(args)))


def _check_attention_mask(args: argparse.Namespace) -> None:
    if not args.reset_attention_mask:
        return
    if args.transformer_impl == "transformer_engine":
        raise ConfigError("--reset-attention-mask requires --transformer-impl local.")
    if not args.create_attention_mask_in_dataloader:
        raise ConfigError(
            "--reset-attention-mask has no effect with "
            "--no-create-attention-mask-in-dataloader. Remove one of them."
        )


def _check_optimizer(args: argparse.Namespace) -> None:
    """Refuse optimizers with which Megatron ends in a traceback."""
    if args.optimizer == "adaptive_muon":
        raise ConfigError(
            "--optimizer adaptive_muon is not supported, because Megatron does not pass its scale "
            "mode to emerging-optimizers. Use --optimizer muon."
        )
    if args.optimizer == "soap" and args.save and not args.no_save_optim:
        raise ConfigError(
            "Megatron cannot save the state of --optimizer soap. Add --no-save-optim, or use "
            "another optimizer."
        )
    is_distributed = args.use_distributed_optimizer and not args.optimizer_cpu_offload
    if args.optimizer == "sgd" and is_distributed:
        raise ConfigError(
            "--use-distributed-optimizer does not support --optimizer sgd. Remove one of them."
        )


def check_middle_stages(args: argparse.Namespace) -> None:
    """Check that no option needs data on pipeline stages that are neither first nor last.

    Args:
        args: Megatron's validated arguments.

    Raises:
        ConfigError: If documents could attend to each other, or Megatron would end in a traceback.
    """
    virtual_stages = args.virtual_pipeline_model_parallel_size or 1
    num_stages = args.pipeline_model_parallel_size * virtual_stages
    if num_stages <= 2:
        return
    for name in ("reset_attention_mask", "iterations_to_skip"):
        if getattr(args, name):
            raise ConfigError(
                f"{as_flag(name)} supports at most 2 pipeline stages, got {num_stages}, because "
                "only the first and the last one read data. Remove it, or use fewer stages."
            )


def check_restored_sizes(args: argparse.Namespace, kha: HeadsConfig) -> None:
    """Check the parallel layout with the sizes that ``--use-checkpoint-args`` has restored.

    Raises:
        ConfigError: See :func:`kha_megatron.model.rules.check_arguments`.
    """
    if not args.use_checkpoint_args:
        return
    # with this argument, check_arguments would assume that the sizes are not known yet
    restored_arguments = vars(args) | {"use_checkpoint_args": False}
    try:
        check_arguments(restored_arguments, args.world_size, kha)
    except ConfigError as error:
        raise ConfigError(
            f"{error} --use-checkpoint-args has read sizes from the checkpoint. Choose a parallel "
            "layout that fits them."
        ) from error
