"""Run Megatron models on CPU.

This needs a subprocess, since our CPU runtime monkey-patches both PyTorch and Megatron.
"""

import logging
import multiprocessing
import os
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kha_megatron.checkpoint.megatron import MegatronCheckpoint, other_names
from kha_megatron.checkpoint.torch_dist import Record
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import cpu
from kha_megatron.mcore.compat import check_version
from kha_megatron.model.megatron import rope_scaling_factor


class Outputs(NamedTuple):
    """Logits and hidden states in float32."""

    logits: Tensor
    """``[batch, seq, vocab]``. For Megatron models, this includes the vocab padding."""
    layers: list[Tensor]
    """Output of each decoder layer, ``[batch, seq, hidden]``."""
    decoded: Tensor | None = None
    """Logits of decoding with a KV cache. None for Megatron models."""


def run_megatron(iteration: Path, tokens: Tensor, *, rounded_to: torch.dtype) -> Outputs:
    """Run a Megatron checkpoint in a new process.

    Args:
        iteration: Checkpoint directory of a single iteration.
        tokens: Token IDs, ``[batch, seq]``.
        rounded_to: Round the weights to this dtype first. We still compute in float32.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_exit_with_parent) as pool:
        return pool.submit(_run_here, iteration, tokens, rounded_to).result()


def _exit_with_parent() -> None:
    """Exit as soon as the parent process does, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_CPU_ARGUMENTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "mtp_num_layers": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "tp_comm_overlap": False,
    "overlap_p2p_comm": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "cuda_graph_impl": "none",
    "fp8": None,
    "fp8_param_gather": False,
    "fp4": None,
    "fp4_param_gather": False,
    "bf16": False,
    "fp16": False,
    "params_dtype": torch.float32,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "spec": None,
}
"""Megatron arguments for a single CPU process without multi-token prediction. They only affect the
logits by rounding errors."""


def _run_here(iteration: Path, tokens: Tensor, rounded_to: torch.dtype) -> Outputs:
    # silence Megatron's warnings about missing CUDA kernels
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for name, value in cpu.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cpu.install(despite_cuda=True, quiet=True)
    check_version()

    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)

    checkpoint = MegatronCheckpoint.open(iteration)
    model = load_model_weights(build_model(checkpoint), checkpoint)
    for parameter in model.parameters():  # expert biases are buffers and stay float32
        parameter.data = parameter.data.to(rounded_to).float()
    model.eval()

    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
    causal_mask = is_later[None, None]  # for all sequences and heads
    layer_outputs = record_layers(model.decoder.layers)
    with torch.no_grad():
        logits = model(tokens, positions, causal_mask)
    dist.destroy_process_group()

    if checkpoint.args.get("hybrid_layer_pattern"):
        # attention and MLP alternate as separate layers, and an MLP ends a decoder layer
        layer_outputs = layer_outputs[1::2]
    hidden_states = [output.transpose(0, 1).float() for output in layer_outputs]
    return Outputs(logits.float(), hidden_states)


def record_layers(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Add forward hooks that collect all layer outputs in the returned list."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        hidden_states = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden_states.detach())

    for layer in layers:
        layer.register_forward_hook(record)
    return outputs


def build_model(checkpoint: MegatronCheckpoint, overrides: Mapping[str, Any] | None = None) -> Any:
    """Build a GPTModel (or HybridModel) from the arguments in a checkpoint.

    The model uses local modules, is not sharded, and is in float32. You can change this with
    ``overrides``, which are Megatron arguments.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import add_megatron_arguments
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    from kha_megatron.mcore.building import model_config

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    arguments = vars(parser.parse_args([]))  # defaults
    for name, value in checkpoint.args.items():
        if not isinstance(value, Record):  # object of a class that we do not import
            arguments[name] = value
    arguments |= _CPU_ARGUMENTS
    arguments |= overrides or {}
    args = Namespace(**arguments)
    if args.use_rope_scaling:
        args.rope_scaling_factor = rope_scaling_factor(checkpoint.args)
    builder_class: Any = GPTModelBuilder
    if args.hybrid_layer_pattern:
        builder_class = HybridModelBuilder
        args.hybrid_layer_pattern = _pattern_without_stages(args)
    config = model_config(args, HeadsConfig.from_entries_or_empty(checkpoint.args))
    config.parallel_output = False
    builder = builder_class(config)
    return builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


def _pattern_without_stages(args: Namespace) -> str:
    """Remove the marks of pipeline stages, and MTP layers if they are not built.

    For example, ``*-|*-/*-`` becomes ``*-*-`` without MTP layers.
    """
    pattern = args.hybrid_layer_pattern.replace("|", "")
    if args.mtp_num_layers:
        return pattern
    decoder_layers, *_ = pattern.split("/")
    return decoder_layers


def load_model_weights(model: Any, checkpoint: MegatronCheckpoint) -> Any:
    """Load the weights with ``dist_checkpointing``.

    Norms are named differently in Transformer Engine and local checkpoints, so we try all names.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stored_keys = checkpoint.keys()
    state_dict = model.sharded_state_dict()
    for entry in state_dict.values():
        if isinstance(entry, ShardedTensor):
            entry.key = _stored_key(entry.key, stored_keys)
    loaded = dist_checkpointing.load({"model": state_dict}, str(checkpoint.path))
    model.load_state_dict(loaded["model"])
    return model


def _stored_key(key: str, stored_keys: Collection[str]) -> str:
    if key in stored_keys:
        return key
    for name in other_names(key):
        if name in stored_keys:
            return name
    return key
