"""Does the converted model compute what Megatron computes? Both run, on the same tokens.

Megatron's own model is built on the CPU runtime in a process of its own and loads the checkpoint
with Megatron's own loader, so that nothing of the conversion is trusted.
"""

import logging
import multiprocessing
import os
import warnings
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from kha_megatron import cpu
from kha_megatron.config import KHAConfig
from kha_megatron.conversion import table
from kha_megatron.errors import CheckpointError
from kha_megatron.hf import KHAForCausalLM
from kha_megatron.mcore.checkpoint import MegatronCheckpoint
from kha_megatron.mcore.compat import check_training_package
from kha_megatron.mcore.torch_dist import Record

BATCH, LENGTH = 2, 64
TOLERANCE = 1e-4
"""Largest difference of a logit in float32 that rounding explains."""


@dataclass(frozen=True)
class Agreement:
    """Logits of the two models, in float32, over all positions of the batch."""

    max_difference: float
    mean_difference: float
    kl: float
    """Mean Kullback-Leibler divergence of the Hugging Face model from Megatron's, in nats."""
    argmax: float
    """Share of positions where both prefer the same token."""
    tokens: int


def needed_bytes(checkpoint: MegatronCheckpoint) -> int:
    """Memory of both models in float32, with some room to work."""
    parameters = sum(torch.Size(info.shape).numel() for info in checkpoint.keys().values())
    return int(parameters * 4 * 2.5)


def fits_in_memory(checkpoint: MegatronCheckpoint) -> bool:
    """Whether :func:`verify` can run on this machine now."""
    return needed_bytes(checkpoint) < psutil.virtual_memory().available


def verify(checkpoint: MegatronCheckpoint, folder: Path, dtype: torch.dtype | None) -> Agreement:
    """Compare the logits of a checkpoint and of the folder made from it.

    Args:
        checkpoint: the source.
        folder: the converted model.
        dtype: the dtype it was cast to, to which Megatron's weights are rounded as well.

    Raises:
        CheckpointError: the folder lacks or has too many tensors, or Megatron cannot load its own.
    """
    disable_progress_bar()
    model, report = KHAForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
        local_files_only=True,
    )
    if wrong := {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}:
        raise CheckpointError(f"{folder} does not load completely: {wrong}")
    tokens = torch.randint(
        0,
        model.config.vocab_size,
        (BATCH, min(LENGTH, model.config.max_position_embeddings)),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        ours = model.eval()(tokens).logits
    theirs = megatron_logits(checkpoint.path, tokens, dtype)[..., : ours.shape[-1]]
    return compare(ours, theirs)


def compare(ours: Tensor, theirs: Tensor) -> Agreement:
    """Agreement of two ``[B, S, V]`` logits."""
    difference = (ours - theirs).abs()
    log_ours, log_theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    return Agreement(
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        kl=(log_theirs.exp() * (log_theirs - log_ours)).sum(-1).mean().item(),
        argmax=(ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        tokens=ours[..., 0].numel(),
    )


def megatron_logits(iteration: Path, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Logits ``[B, S, padded vocabulary]`` of Megatron's model, in float32 on the CPU.

    Runs in a new process, because the CPU runtime changes the one that it is installed in.

    Args:
        iteration: the folder of one iteration.
        tokens: ``[B, S]``.
        dtype: round the weights to it first, as the conversion did.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_logits_here, iteration, tokens, dtype).result()


_UNSHARDED: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
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
"""The layout and the numerics of one CPU process, which change no logit but by rounding."""


def _logits_here(iteration: Path, tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
    # what Megatron says about kernels that it misses is no news in a process that computes once
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for name, value in cpu.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cpu.install(despite_cuda=True, quiet=True)
    check_training_package()

    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    checkpoint = MegatronCheckpoint.open(iteration)
    model = _build(checkpoint)
    sharded = _as_stored(model.sharded_state_dict(), checkpoint)
    model.load_state_dict(dist_checkpointing.load({"model": sharded}, str(iteration))["model"])
    if dtype is not None:
        _round_to(model, dtype)
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask)
    dist.destroy_process_group()
    return logits.float()


def _build(checkpoint: MegatronCheckpoint) -> torch.nn.Module:
    """Megatron's GPTModel from the arguments that it saved."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        gpt_config_from_args,
    )
    from megatron.training.arguments import add_megatron_arguments
    from megatron.training.models.gpt import GPTModelBuilder

    from kha_megatron.mcore.specs import kha_layer_spec

    defaults = vars(add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([]))
    saved = {k: v for k, v in checkpoint.args.items() if not isinstance(v, Record)}
    args = Namespace(**defaults | saved | _UNSHARDED)
    config = gpt_config_from_args(args, config=core_transformer_config_from_args(args))
    config.parallel_output = False
    kha = checkpoint.kha or KHAConfig()
    config.transformer_layer_spec = lambda model_config: kha_layer_spec(model_config, kha)
    builder = GPTModelBuilder(config)
    return builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


def _as_stored(sharded: dict[str, Any], checkpoint: MegatronCheckpoint) -> dict[str, Any]:
    """Ask for each tensor by the name that the checkpoint has it under.

    Transformer Engine and local modules name some norms differently; the table knows which.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    held = checkpoint.keys()
    for entry in sharded.values():
        key = getattr(entry, "key", None)
        if not isinstance(entry, ShardedTensor) or key in held:
            continue
        for row in table.LAYER:
            for name in (n for n in row.names if key.endswith(f".{n}")):
                others = (key.removesuffix(name) + other for other in row.names)
                entry.key = next((other for other in others if other in held), key)
    return sharded


@torch.no_grad()
def _round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():  # not the buffers: expert biases stay float32
        parameter.copy_(parameter.to(dtype))
