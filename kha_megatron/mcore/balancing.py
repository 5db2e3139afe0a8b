"""Auxiliary-loss-free load balancing of MoE experts.

After every batch, the router's bias for each expert moves against the expert's deviation from the
mean load. The step is either the sign of the deviation (Wang et al. 2024), or the deviation divided
by the RMS of all deviations (Su 2025; see also section 4.1 of the paper). Below 2^24 tokens, loads
are exact in float32, so that biases are bitwise equal in all parallel layouts.
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
"""Callback that receives the numbers of the local MoE layers (counted from 1), and their loads and
updated biases, both ``[layers, experts]``."""


def compute_bias_update(loads: Tensor, update: Update) -> Tensor:
    """Compute bias updates, without the update rate, from the loads ``[..., experts]``.

    Loads are numbers of tokens in the global batch. With ``rms``, updates have mean 0 and RMS 1.
    """
    offset = loads.mean(dim=-1, keepdim=True) - loads
    if update == "sign":
        return torch.sign(offset)
    tiny = torch.finfo(offset.dtype).tiny  # avoids 0 / 0 if all loads are equal
    return offset / (offset.square().mean(dim=-1, keepdim=True) + tiny).sqrt()


def balance_experts(
    models: list[torch.nn.Module], update: Update, report: Report | None = None
) -> None:
    """Replace Megatron's updates of the expert biases in ``models`` (virtual pipeline stages).

    This function must be called on all ranks. Each step all-reduces the loads.
    """
    rate = get_model_config(models[0]).moe_router_bias_update_rate

    @contextmanager
    @torch.no_grad()
    def balanced(chunks: list[Any], groups: Any) -> Iterator[None]:
        routers: list[Any] = [
            module
            for model in models
            for module in model.modules()
            if getattr(module, "expert_bias", None) is not None
            and module.training
            and not getattr(module, "frozen_expert_bias", False)
        ]
        # read the loads before Megatron updates the biases and resets the counts
        loads = _stacked([router.local_tokens_per_expert for router in routers])
        biases = _stacked([router.expert_bias for router in routers])
        yield
        group = (
            parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            if groups is None
            else groups.tp_dp_cp
        )
        dist.all_reduce(loads, group=group)
        biases = biases + rate * compute_bias_update(loads, update)
        for router, bias in zip(routers, biases, strict=True):
            router.expert_bias.copy_(bias)
        if report is not None:
            report([router.layer_number for router in routers], loads, biases)

    wrap_grad_finalization(models, balanced)


def violation(loads: Tensor) -> Tensor:
    """Compute MaxVio (Wang et al. 2024): the maximum load divided by the mean load, minus 1."""
    return loads.amax(dim=-1) / loads.mean(dim=-1) - 1


def _stacked(rows: list[Tensor]) -> Tensor:
    if rows:
        return torch.stack(rows)
    return torch.zeros(0, 1, device=torch.cuda.current_device())  # stage without MoE layers
