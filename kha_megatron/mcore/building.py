"""Megatron's own model from its arguments, with layers of ours: to train, or to compare with.

Stands on Megatron's training package, so it is imported only where a model is built.
"""

import argparse
from functools import partial
from typing import Any

from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)

from kha_megatron.config import KHAConfig
from kha_megatron.mcore.specs import kha_hybrid_stack_spec, kha_layer_spec


def model_config(args: argparse.Namespace, kha: KHAConfig) -> Any:
    """What Megatron builds a GPTModel or a HybridModel from.

    Args:
        args: Megatron's, parsed; ``hybrid_layer_pattern`` says which of the two it is.
        kha: what its layers knock; ``KHAConfig()`` for a model without KHA.
    """
    transformer = core_transformer_config_from_args(args)
    if args.hybrid_layer_pattern:
        config = hybrid_config_from_args(args, config=transformer)
        config.hybrid_stack_spec = kha_hybrid_stack_spec(kha)
        return config
    config = gpt_config_from_args(args, config=transformer)
    config.rope_scaling_factor = args.rope_scaling_factor  # 0.19 forgets it: always 8
    config.transformer_layer_spec = partial(kha_layer_spec, kha=kha)
    return config
