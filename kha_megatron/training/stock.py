"""Functions that a patched Megatron (see ``patches/``) calls in its own scripts and reports."""

import argparse
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadSizes
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.rules import check_attention
from kha_megatron.model.run import HEAD_FIELDS
from kha_megatron.training.arguments import add_model_arguments, kha_from_args

SPEC = ["kha_megatron.training.stock", "layer_spec"]
"""``--spec`` value for :func:`layer_spec`."""

_BYTES_PER_ACTIVATION = 2
"""16-bit activations, as in Megatron's theoretical memory report."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``kha`` argument group to the parser of a stock Megatron script."""
    add_model_arguments(parser).set_defaults(kha_stock=True)
    return parser


def use_arguments(args: argparse.Namespace) -> None:
    """Set ``--spec`` if there are any ``--kha-*`` arguments.

    Raises:
        ConfigError: If they conflict with ``--spec`` or the model, or a name is unknown.
    """
    if not args.kha_stock:  # used by our own entry point, or already called
        return
    args.kha_stock = False
    has_only_defaults = all(getattr(args, field.argument) == field.default for field in HEAD_FIELDS)
    if has_only_defaults:
        for projection in PROJECTIONS:  # else a checkpoint would record the baseline preset
            delattr(args, f"kha_{projection}")
        return
    if args.spec not in (None, SPEC):
        raise ConfigError(
            f"You passed both --spec {' '.join(args.spec)} and --kha-* arguments. Both select a "
            "layer spec, so use only one of them."
        )
    if args.hybrid_layer_pattern:
        raise ConfigError(
            "--kha-* arguments are only supported for GPTModel. For a HybridModel "
            "(--hybrid-layer-pattern), use --spec."
        )
    kha = kha_from_args(args)
    check_attention(vars(args), kha)
    vars(args).update(kha.to_entries(multi_latent=args.multi_latent_attention))
    args.spec = SPEC


def recorded_kha(args: argparse.Namespace) -> HeadsConfig:
    """Get the KHA config that :func:`use_arguments` stored in ``args``."""
    kha = HeadsConfig.from_entries(vars(args))
    if kha is None:
        raise ConfigError(f"--spec {' '.join(SPEC)} requires --kha-preset.")
    return kha


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Build the layer spec that ``--spec`` selects."""
    from megatron.training import get_args

    from kha_megatron.mcore.gpt import kha_layer_spec

    args = get_args()
    kha = recorded_kha(args)
    if not vp_stage:
        announce(f"using the layer spec of the --kha-* arguments ({kha})")
    return kha_layer_spec(config, kha, vp_stage)


def forward_flops_per_token(args: argparse.Namespace) -> int:
    """Extra forward FLOPs per token for KHA in one (causal) attention layer."""
    kha, sizes = _kha_and_sizes(args)
    costs = kha.costs(sizes)
    # a token attends to half of the keys on average
    return costs.flops + args.seq_length * costs.pair_flops // 2


def parameters_per_layer(args: argparse.Namespace) -> int:
    """Number of parameters that KHA adds to an attention layer."""
    kha, sizes = _kha_and_sizes(args)
    return kha.parameters(sizes)


def activation_bytes_per_layer(args: argparse.Namespace) -> int:
    """Activation memory of KHA in bytes (per layer, rank and microbatch)."""
    kha, sizes = _kha_and_sizes(args)
    costs = kha.costs(sizes.on_rank(args.tensor_model_parallel_size))
    sharded = costs.sharded_activations
    if args.sequence_parallel:
        sharded //= args.tensor_model_parallel_size
    pairs = costs.pair_activations * args.seq_length  # each token with all keys
    tokens = args.seq_length * args.micro_batch_size
    return _BYTES_PER_ACTIVATION * tokens * (costs.activations + sharded + pairs)


def _kha_and_sizes(args: argparse.Namespace) -> tuple[HeadsConfig, HeadSizes]:
    """Get the KHA config (without the output gate, which Megatron counts itself) and head sizes."""
    kha = HeadsConfig.from_entries_or_empty(vars(args))
    model = model_from_arguments(vars(args))
    assert model is not None, "Megatron has validated its sizes"
    return kha.without_output_gate(), model.head_sizes
