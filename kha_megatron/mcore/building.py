"""Build Megatron model configs from command-line arguments."""

import argparse
from functools import partial
from typing import Any

from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.gpt import kha_layer_spec
from kha_megatron.mcore.hybrid import kha_hybrid_stack_spec
from kha_megatron.mcore.patches import scale_rope


def model_config(args: argparse.Namespace, kha: HeadsConfig) -> Any:
    """Build a hybrid model config with ``--hybrid-layer-pattern``, or else a GPT config."""
    scale_rope(args)
    transformer = core_transformer_config_from_args(args)
    if args.hybrid_layer_pattern:
        config = hybrid_config_from_args(args, config=transformer)
        config.hybrid_stack_spec = kha_hybrid_stack_spec(kha)
        return config
    config = gpt_config_from_args(args, config=transformer)
    config.rope_scaling_factor = args.rope_scaling_factor  # Megatron drops it
    config.transformer_layer_spec = partial(kha_layer_spec, kha=kha)
    return config
