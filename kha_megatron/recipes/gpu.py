"""Settings of training on GPUs, which do not change what a model learns.

This is the only place for them: all recipes for GPUs use this table, and the benchmarks run the
command line of a recipe. ``docs/bridge_recipes.md`` compares it with Megatron-Bridge's recipe for
Qwen3-30B-A3B. :class:`Run` drops settings that the user's precision or layers do not support.

None of these settings has been measured on a GPU yet.
"""

import re
import subprocess
from collections.abc import Mapping
from typing import Any

from kha_megatron.model.run import Run

GPU_TRAINING: Mapping[str, Any] = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    # The native implementation. Megatron 0.19 refuses Transformer Engine's.
    "cross_entropy_loss_fusion": True,
    # all ranks collect garbage in the same step, instead of waiting for each other
    "manual_gc": True,
    "manual_gc_interval": 100,
    "num_workers": 8,
    "eval_iters": 32,
    "log_memory_to_tensorboard": True,
    "save_interval_in_mins": 30,
    "device": "cuda",
}

GPU_EXPERTS: Mapping[str, Any] = {
    "expert_model_parallel_size": 8,  # one node
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    # computes the same scores as Megatron's router in float32, and takes our expert biases
    "moe_router_fusion": True,
}

GPU_ENVIRONMENT: Mapping[str, str] = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # required by Megatron to combine expandable segments with CUDA graphs
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""``TORCH_NCCL_AVOID_RECORD_STREAMS=1`` is not in this table, because it is the default of all
versions of torch that we support, which log a deprecation warning if it is set."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL = 10
"""Major compute capability of the first GPUs that order kernels correctly without
``CUDA_DEVICE_MAX_CONNECTIONS=1``, see ``validate_args`` in Megatron 0.19."""


def gpu_environment(run: Run, compute_capability: int | None) -> dict[str, str]:
    """Return the environment variables for the ranks of a run on GPUs.

    Args:
        compute_capability: Major compute capability of the GPUs, e.g. 9 for Hopper. None if it is
            unknown, which is treated like Hopper.
    """
    return {**GPU_ENVIRONMENT, **required_connections(run, compute_capability)}


def required_connections(run: Run, compute_capability: int | None) -> dict[str, str]:
    """Return ``CUDA_DEVICE_MAX_CONNECTIONS=1`` if Megatron requires it, otherwise nothing.

    Megatron requires it for tensor or context parallelism, because kernels of a communication must
    be launched before those that it overlaps with. It does not on Blackwell and newer. With FSDP or
    overlapped expert communication, it requires more connections. Megatron also checks this on a
    CPU, which has no compute capability.
    """
    layout = run.layout(None)
    training = run.training
    has_fsdp = training.use_torch_fsdp2 or training.use_megatron_fsdp
    needs_many = has_fsdp or training.overlap_moe_expert_parallel_comm
    is_older = compute_capability is None or compute_capability < _BLACKWELL
    has_ordered_kernels = layout.tp > 1 or layout.cp > 1
    if has_ordered_kernels and is_older and not needs_many:
        return {CONNECTIONS: "1"}
    return {}


def read_compute_capability() -> int | None:
    """Return the major compute capability of this machine's first GPU, or None if it has none.

    We run ``nvidia-smi`` because torch would create a CUDA context in this process.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"(\d+)\.\d+", output.stdout)
    return int(match[1]) if match else None
