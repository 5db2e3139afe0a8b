"""What a patched Megatron calls (``patches/``): the KHA arguments of its own scripts, and reports.

Each function takes Megatron's arguments. The reports follow Megatron's own conventions: numbers of
the whole model unless said otherwise, and nothing for sequences split by context parallelism.
"""

import argparse
from dataclasses import replace
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadSizes
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.model import Model
from kha_megatron.model.rules import check_attention
from kha_megatron.model.run import OF_HEADS
from kha_megatron.training.arguments import (
    add_model_arguments,
    kha_from_args,
)

SPEC = ["kha_megatron.training.stock", "layer_spec"]
"""What ``--spec`` would say to choose :func:`layer_spec`."""

_BYTES = 2  # of an activation, as Megatron's theoretical memory report assumes


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``kha`` group to Megatron's parser, for scripts that know nothing of KHA."""
    add_model_arguments(parser).set_defaults(kha_stock=True)
    return parser


def use_arguments(args: argparse.Namespace) -> None:
    """Let ``--kha-*`` choose the layer spec. Without them the run is what it is without KHA.

    Raises:
        ConfigError: ``--spec`` chooses another, the model has none, or a name is unknown.
    """
    if not args.kha_stock:  # our own entry point, or done before
        return
    args.kha_stock = False
    if all(getattr(args, row.argument) == row.default for row in OF_HEADS):
        for projection in PROJECTIONS:  # else a checkpoint would record the baseline preset
            delattr(args, f"kha_{projection}")
        return
    if args.spec not in (None, SPEC):
        raise ConfigError(
            f"--spec {' '.join(args.spec)} and --kha-* both choose the layer spec: remove one"
        )
    if args.hybrid_layer_pattern:
        raise ConfigError(
            "--kha-* choose the layer spec of a GPTModel, and --hybrid-layer-pattern asks for a "
            "HybridModel: remove one, or name a hybrid stack with --spec"
        )
    kha = kha_from_args(args)
    check_attention(vars(args), kha)
    for name, value in kha.recording(multi_latent=args.multi_latent_attention).items():
        setattr(args, name, value)
    args.spec = SPEC


def resolved(args: argparse.Namespace) -> KHAConfig:
    """The configuration that :func:`use_arguments` has stored.

    Raises:
        ConfigError: there is none, as when a checkpoint names :data:`SPEC` and nothing else does.
    """
    kha = KHAConfig.recorded(vars(args))
    if kha is None:
        raise ConfigError(f"--spec {' '.join(SPEC)} without --kha-*: give --kha-preset NAME")
    return replace(kha, fold=args.kha_fold)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The layer spec that the arguments of this run ask for."""
    from megatron.training import get_args

    from kha_megatron.mcore.specs import kha_layer_spec

    args = get_args()
    kha = resolved(args)
    if not vp_stage:
        announce(f"the --kha-* arguments knock {kha}")
    return kha_layer_spec(config, kha, vp_stage)


def forward_flops_per_token(args: argparse.Namespace) -> int:
    """FLOPs that KHA adds to one attention layer; of pairs the causal half, as Megatron counts."""
    kha, sizes = _kha(args), _sizes(args)
    return kha.flops(sizes) + args.seq_length * kha.pair_flops(sizes) // 2


def parameters_per_layer(args: argparse.Namespace) -> int:
    """Parameters that KHA adds to one attention layer, replicated on tensor-parallel ranks."""
    return _kha(args).parameters(_sizes(args))


def activation_bytes_per_layer(args: argparse.Namespace) -> int:
    """Activations that KHA keeps in one layer of one rank for one microbatch, in 16-bit numbers."""
    kha, sizes = _kha(args), _sizes(args).on_rank(args.tensor_model_parallel_size)
    between = kha.saved_between(sizes)
    if args.sequence_parallel:
        between //= args.tensor_model_parallel_size
    elements = kha.saved(sizes) + between + args.seq_length * kha.pair_saved(sizes)
    return _BYTES * elements * args.seq_length * args.micro_batch_size


def _kha(args: argparse.Namespace) -> KHAConfig:
    """Without the output gate, which Megatron's own reports count."""
    return (KHAConfig.recorded(vars(args)) or KHAConfig()).without_output_gate()


def _sizes(args: argparse.Namespace) -> HeadSizes:
    model = Model.of(vars(args))
    assert model is not None, "Megatron has validated its sizes"
    return model.head_sizes
