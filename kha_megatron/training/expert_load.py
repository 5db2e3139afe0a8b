"""Log MoE load balance to TensorBoard and W&B.

For each MoE layer (e.g. the third), we log:

- ``expert-load/violation-layer-3``: ``max / mean - 1`` over tokens per expert, also known as MaxVio
  (Wang et al. 2024)
- ``expert-load/least-layer-3``: ``min / mean`` over tokens per expert
- ``expert-load/bias-range-layer-3``: largest minus smallest expert bias

``expert-load/violation`` is the mean violation over layers.
"""

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

from kha_megatron.mcore.balancing import violation
from kha_megatron.training.scalars import write_scalars

_NAMES = ("violation", "least", "bias-range")


def report_expert_load(layers: list[int], loads: Tensor, biases: Tensor) -> None:
    """Log one batch. Must be called on all ranks.

    Only logs every ``--log-interval`` iterations, because this synchronizes with the device.

    Args:
        layers (list[int]): Numbers of the MoE layers on this rank, starting at 1.
        loads (Tensor): Tokens per expert in the global batch, in float64, of shape
            ``[num_layers, num_experts]``.
        biases (Tensor): Updated expert biases, in the same shape.
    """
    args = get_args()
    iteration = args.curr_iteration + 1
    if iteration % args.log_interval:
        return
    num_columns = len(_NAMES) + 1
    table = torch.zeros(args.num_layers, num_columns, dtype=loads.dtype, device=loads.device)
    if layers:
        mean = loads.mean(dim=-1)
        columns = [
            violation(loads),
            loads.amin(dim=-1) / mean,
            biases.amax(dim=-1) - biases.amin(dim=-1),
            torch.ones_like(mean),  # marks the layers that have experts
        ]
        indices = [number - 1 for number in layers]
        table[indices] = torch.stack(columns, dim=-1)
    torch.distributed.all_reduce(table, group=mpu.get_pipeline_model_parallel_group())
    values = {}
    violations = []
    # only layers with experts are numbered, because a HybridModel also counts attention layers
    for *metrics, has_experts in table.tolist():
        if not has_experts:
            continue
        violations.append(metrics[0])
        moe_layer = len(violations)
        for name, value in zip(_NAMES, metrics, strict=True):
            values[f"expert-load/{name}-layer-{moe_layer}"] = value
    if violations:  # multi-token prediction may be the only part with experts
        values["expert-load/violation"] = sum(violations) / len(violations)
    write_scalars(values, iteration)
