"""Balance experts by a bias, without an auxiliary loss.

Each expert's bias is added to its score when experts are chosen. After every batch it moves against
the expert's offset from the mean load: by the sign of the offset (Wang et al. 2024), or by the
offset divided by the root mean square of all offsets (Su 2025; the paper, section 4.1). A load
counts the tokens of the whole batch over TP, DP and CP ranks. It is exact in float32 below 2^24, so
every rank and layout moves the bias by the same bits.

Shapes: ``E`` experts, ``n`` MoE layers of this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from kha_megatron.mcore.gradients import wrap_grad_finalization

Update = Literal["sign", "rms"]

Report = Callable[[list[int], Tensor, Tensor], None]
"""Called after each batch with the numbers of this rank's MoE layers (from 1), their loads and
their new biases, ``[n, E]``."""


def compute_bias_update(loads: Tensor, update: Update) -> Tensor:
    """Return the step of each bias, before the update rate. Zero if all loads are equal.

    Args:
        loads: ``[..., E]`` tokens of each expert in the whole batch.
        update: ``sign`` or ``rms``. Steps of ``rms`` sum to zero and have an RMS of one.
    """
    offset = loads.mean(dim=-1, keepdim=True) - loads
    if update == "sign":
        return torch.sign(offset)
    # avoids 0 / 0 if all loads are equal
    tiny = torch.finfo(offset.dtype).tiny
    return offset / (offset.square().mean(dim=-1, keepdim=True) + tiny).sqrt()


def balance_experts(
    models: list[torch.nn.Module], update: Update, report: Report | None = None
) -> None:
    """Move the expert biases by ``update`` and report the loads. Call it on every rank.

    Megatron has the sign form. Costs one all-reduce of ``[n, E]`` numbers per step. ``models`` are
    the virtual pipeline stages of this rank.
    """
    rate = get_model_config(models[0]).moe_router_bias_update_rate

    @contextmanager
    @torch.no_grad()
    def balanced(chunks: list[Any], groups: Any) -> Iterator[None]:
        routers: list[Any] = [  # with a trained bias, in Megatron's order
            module
            for model in models
            for module in model.modules()
            if getattr(module, "expert_bias", None) is not None
            and module.training
            and not getattr(module, "frozen_expert_bias", False)
        ]
        # read before Megatron takes its own step and resets the counts
        loads = _stacked([router.local_tokens_per_expert for router in routers])
        biases = _stacked([router.expert_bias for router in routers])
        yield
        group = (
            parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            if groups is None
            else groups.tp_dp_cp
        )
        dist.all_reduce(loads, group=group)  # all copies of a bias
        biases = biases + rate * compute_bias_update(loads, update)
        for router, bias in zip(routers, biases, strict=True):
            router.expert_bias.copy_(bias)
        if report is not None:
            report([router.layer_number for router in routers], loads, biases)

    wrap_grad_finalization(models, balanced)


def violation(loads: Tensor) -> Tensor:
    """Return MaxVio of Wang et al. 2024, ``[..., E] -> [...]``: maximal over mean load, minus 1."""
    return loads.amax(dim=-1) / loads.mean(dim=-1) - 1


def _stacked(rows: list[Tensor]) -> Tensor:
    """Return ``[n, E]``; ``[0, 1]`` for a pipeline stage without MoE layers."""
    if rows:
        return torch.stack(rows)
    return torch.zeros(0, 1, device=torch.cuda.current_device())
