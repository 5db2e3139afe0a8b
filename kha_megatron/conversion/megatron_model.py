"""Run Megatron models on CPU.

This needs a subprocess, since our CPU runtime monkey-patches both PyTorch and Megatron.
"""

import logging
import multiprocessing
import os
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
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
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_UNSHARDED: dict[str, Any] = {
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
"""Overrides for a single CPU process without multi-token prediction. They only affect the logits by
rounding errors."""


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
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    layers = record_layers(model.decoder.layers)
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask)
    dist.destroy_process_group()
    step = 2 if checkpoint.args.get("hybrid_layer_pattern") else 1
    outputs = [hidden.transpose(0, 1).float() for hidden in layers[step - 1 :: step]]
    return Outputs(logits.float(), outputs)


def record_layers(layers: Iterable[nn.Module]) -> list[Tensor]:
    """Add forward hooks that collect all layer outputs in the returned list."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())

    for layer in layers:
        layer.register_forward_hook(record)
    return outputs


def build_model(checkpoint: MegatronCheckpoint, overrides: Mapping[str, Any] | None = None) -> Any:
    """Build a GPTModel (or HybridModel) from the arguments in a checkpoint.

    The model uses local modules, is not sharded, and is in float32. You can change this with
    ``overrides``.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import add_megatron_arguments
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    from kha_megatron.mcore.building import model_config

    defaults = vars(add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([]))
    saved = {k: v for k, v in checkpoint.args.items() if not isinstance(v, Record)}
    args = Namespace(**defaults | saved | _UNSHARDED | dict(overrides or {}))
    if args.use_rope_scaling:
        args.rope_scaling_factor = rope_scaling_factor(checkpoint.args)
    if args.hybrid_layer_pattern:
        args.hybrid_layer_pattern = args.hybrid_layer_pattern.replace("|", "")
        if not args.mtp_num_layers:
            args.hybrid_layer_pattern = args.hybrid_layer_pattern.partition("/")[0]
    config = model_config(args, HeadsConfig.from_entries(checkpoint.args) or HeadsConfig())
    builder = (HybridModelBuilder if args.hybrid_layer_pattern else GPTModelBuilder)(config)
    config.parallel_output = False
    return builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


def load_model_weights(model: Any, checkpoint: MegatronCheckpoint) -> Any:
    """Load the weights with ``dist_checkpointing``.

    Norms are named differently in Transformer Engine and local checkpoints, so we try all names.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    stored, sharded = checkpoint.keys(), model.sharded_state_dict()
    for entry in sharded.values():
        if isinstance(entry, ShardedTensor) and entry.key not in stored:
            entry.key = next((name for name in other_names(entry.key) if name in stored), entry.key)
    loaded = dist_checkpointing.load({"model": sharded}, str(checkpoint.path))
    model.load_state_dict(loaded["model"])
    return model
