"""Log the load of experts per MoE layer to TensorBoard and W&B, under ``expert-load/``.

- ``violation-layer-3``: ``max / mean - 1`` of the experts' tokens (MaxVio of Wang et al. 2024);
- ``least-layer-3``: ``min / mean`` of the experts' tokens;
- ``bias-range-layer-3``: the largest bias minus the smallest;
- ``violation``: mean of the violations over layers.
"""

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

from kha_megatron.mcore.balancing import violation
from kha_megatron.training.scalars import write_scalars

_NAMES = ("violation", "least", "bias-range")


def report_expert_load(layers: list[int], loads: Tensor, biases: Tensor) -> None:
    """Write the loads of one batch at the interval of Megatron's TensorBoard log, on every rank.

    Args:
        layers: numbers of this rank's MoE layers, from 1.
        loads: ``[n, E]`` tokens of each expert in the whole batch.
        biases: ``[n, E]`` after the batch.
    """
    args = get_args()
    iteration = args.curr_iteration + 1
    if iteration % args.tensorboard_log_interval:
        return
    count = args.num_layers + (args.mtp_num_layers or 0)
    table = torch.zeros(count, len(_NAMES) + 1, device=loads.device)
    if layers:
        mean = loads.mean(dim=-1)
        spread = biases.amax(dim=-1) - biases.amin(dim=-1)
        columns = [violation(loads), loads.amin(dim=-1) / mean, spread, torch.ones_like(mean)]
        table[[number - 1 for number in layers]] = torch.stack(columns, dim=-1)
    torch.distributed.all_reduce(table, group=mpu.get_pipeline_model_parallel_group())
    rows = {number: row for number, row in enumerate(table.tolist(), 1) if row[-1]}
    values = {
        f"expert-load/{name}-layer-{number}": value
        for number, row in rows.items()
        for name, value in zip(_NAMES, row, strict=False)
    }
    values["expert-load/violation"] = sum(row[0] for row in rows.values()) / len(rows)
    write_scalars(values, iteration)
