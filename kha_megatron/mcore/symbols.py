"""What this package passes to Megatron and reads of it by name, and a look at whether it is there.

A plain import that fails speaks for itself (``compat.megatron_imports``); a parameter or an
attribute that has gone would be noticed in the middle of a run. ``compat`` decides when to look.
"""

import functools
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Symbols = Mapping[str, str]
"""By ``module:name`` its parameters that are used, separated by spaces; empty for an attribute."""

PLUG_IN: Symbols = MappingProxyType(
    {
        "megatron.core.distributed:finalize_model_grads": "model num_tokens",
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec": (
            "config use_transformer_engine normalization qk_l2_norm vp_stage pp_rank"
        ),
        "megatron.core:mpu.get_pipeline_model_parallel_group": "",
        "megatron.core:parallel_state.get_context_parallel_group": "",
        "megatron.core.tensor_parallel.mappings:all_gather_last_dim_from_tensor_parallel_region": (
            "group"
        ),
        "megatron.core.tensor_parallel:ColumnParallelLinear": (
            "input_size output_size init_method tp_group"
        ),
        "megatron.core.tensor_parallel:all_to_all_hp2sp": "group",
        "megatron.core.tensor_parallel:all_to_all_sp2hp": "group",
        "megatron.core.tensor_parallel:copy_to_tensor_model_parallel_region": "group",
        "megatron.core.tensor_parallel:get_cuda_rng_tracker": "",
        "megatron.core.tensor_parallel:gather_from_sequence_parallel_region": (
            "group tensor_parallel_output_grad"
        ),
        "megatron.core.tensor_parallel:gather_from_tensor_model_parallel_region": "group",
        "megatron.core.tensor_parallel:scatter_to_sequence_parallel_region": "group",
        "megatron.core.tensor_parallel:scatter_to_tensor_model_parallel_region": "group",
        "megatron.core.tensor_parallel:set_tensor_model_parallel_attributes": (
            "is_parallel dim stride"
        ),
        "megatron.core.transformer:transformer_block.LayerNormImpl": "",
        "megatron.core.transformer.attention:SelfAttention": "config submodules layer_number",
        "megatron.core.transformer.attention:SelfAttention.flash_decode_and_prefill": "",
        "megatron.core.transformer.attention:SelfAttention.forward": (
            "hidden_states attention_mask key_value_states inference_context "
            "rotary_pos_emb packed_seq_params inference_params"
        ),
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": (
            "hidden_states key_value_states output_gate split_qkv"
        ),
        "megatron.core.transformer.dot_product_attention:DotProductAttention": (
            "config softmax_scale pg_collection"
        ),
        "megatron.core.transformer.module:MegatronModule": "config",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention": (
            "config submodules layer_number"
        ),
        "megatron.core.transformer.spec_utils:ModuleSpec": "module params submodules",
        "megatron.core.transformer.spec_utils:build_module": "spec_or_module",
        "megatron.core.transformer.torch_norm:WrappedTorchNorm": "config hidden_size eps",
        "megatron.core.transformer.transformer_block:TransformerBlockSubmodules": "layer_specs",
        "megatron.core.transformer.transformer_config:TransformerConfig": (
            "fused_single_qkv_rope gradient_accumulation_fusion init_method_std "
            "init_model_with_meta_device mtp_num_layers multi_latent_attention "
            "normalization num_attention_heads num_query_groups params_dtype "
            "perform_initialization qk_l2_norm sequence_parallel "
            "tensor_model_parallel_size transformer_impl use_cpu_initialization"
        ),
        "megatron.core.transformer.transformer_layer:TransformerLayer": (
            "config submodules layer_number pg_collection vp_stage"
        ),
        "megatron.core.utils:get_model_config": "model",
        "megatron.core.utils:get_pg_rank": "group",
        "megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint": (
            "tp_group dp_cp_group"
        ),
    }
)
"""Of ``mcore`` without ``hybrid``."""

TRAINING_PACKAGE: Symbols = MappingProxyType(
    {
        "megatron.core.utils:get_batch_on_this_cp_rank": "is_hybrid_cp cp_group",
        "megatron.core.utils:get_batch_on_this_tp_rank": "has_cu_seqlens broadcast_group",
        "megatron.training:pretrain": (
            "cfg_container train_valid_test_dataset_provider model_type forward_step_func"
        ),
        "megatron.training.argument_utils:core_transformer_config_from_args": "args",
        "megatron.training.argument_utils:gpt_config_from_args": "args config",
        "megatron.training.arguments:add_megatron_arguments": "parser",
        "megatron.training.arguments:parse_and_validate_args": "extra_args_provider args_defaults",
    }
)
"""Of the entry point and verification."""


def missing_symbols(symbols: Symbols) -> list[str]:
    """Those that Megatron lacks, as ``module:name`` or ``module:name(parameter)``."""
    missing = []
    for symbol, parameters in symbols.items():
        module, _, path = symbol.partition(":")
        try:
            found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            missing.append(symbol)
            continue
        known = inspect.signature(found).parameters if parameters else ()
        missing += [f"{symbol}({name})" for name in parameters.split() if name not in known]
    return missing
