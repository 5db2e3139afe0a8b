"""Balancing experts by a bias, without an auxiliary loss.

Each expert's bias is added to its score when a token's experts are chosen, and to nothing else.
After every batch it moves against the expert's offset from the mean load: by the sign of the offset
(Wang et al. 2024), or by the offset divided by the root mean square of all (Su 2025), which the
paper uses (section 4.1). A load is the number of tokens that chose the expert in the whole batch:
over microbatches, and over tensor-, data- and context-parallel ranks. These are counts, exact in
float32 below 2^24, so that every rank, whatever the layout, moves its copy of the bias by the same
bits.

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

from kha_megatron.mcore.gradients import around_finalization

Update = Literal["sign", "rms"]

Report = Callable[[list[int], Tensor, Tensor], None]
"""Called after each batch with the numbers of this rank's MoE layers (counted from 1), their loads
and their new biases, ``[n, E]``."""


def step_of_bias(loads: Tensor, update: Update) -> Tensor:
    """How each bias moves, before the update rate.

    Zero where the loads of a layer are all equal: a perfect balance is the fixed point of both. The
    sum over experts of the RMS form is zero, and its root mean square one.

    Args:
        loads: ``[..., E]`` tokens of each expert, of the whole batch.
        update: ``sign``, or ``rms``.
    """
    offset = loads.mean(dim=-1, keepdim=True) - loads
    if update == "sign":
        return torch.sign(offset)
    # the smallest number, for a perfect balance, where it would be 0 / 0
    tiny = torch.finfo(offset.dtype).tiny
    return offset / (offset.square().mean(dim=-1, keepdim=True) + tiny).sqrt()


def balance_experts(
    models: list[torch.nn.Module], update: Update, report: Report | None = None
) -> None:
    """Move the expert biases by ``update``, and report the loads. Call it on every rank.

    Megatron has the sign form. Costs one all-reduce of ``[n, E]`` numbers a step.

    Args:
        models: the virtual pipeline stages of this rank.
        report: what to do with the loads.
    """
    rate = get_model_config(models[0]).moe_router_bias_update_rate

    @contextmanager
    @torch.no_grad()
    def balanced(chunks: list[Any], groups: Any) -> Iterator[None]:
        routers = _routers(models)
        # before Megatron takes its own step, and counts from zero again
        loads = _stacked([router.local_tokens_per_expert for router in routers])
        biases = _stacked([router.expert_bias for router in routers])
        yield
        dist.all_reduce(loads, group=_sharing(groups))
        biases = biases + rate * step_of_bias(loads, update)
        for router, bias in zip(routers, biases, strict=True):
            router.expert_bias.copy_(bias)
        if report is not None:
            report([router.layer_number for router in routers], loads, biases)

    around_finalization(models, balanced)


def violation(loads: Tensor) -> Tensor:
    """How much more than the mean the busiest expert of each layer has, ``[..., E] -> [...]``.

    MaxVio of Wang et al. 2024: 0 in perfect balance, ``E - 1`` where one expert has all tokens of
    top-1 routing.
    """
    return loads.amax(dim=-1) / loads.mean(dim=-1) - 1


def _routers(models: list[torch.nn.Module]) -> list[Any]:
    """Those whose bias is trained, in the order in which Megatron looks at them."""
    return [
        module
        for model in models
        for module in model.modules()
        if getattr(module, "expert_bias", None) is not None
        and module.training
        and not getattr(module, "frozen_expert_bias", False)
    ]


def _stacked(rows: list[Tensor]) -> Tensor:
    """``[n, E]``; ``[0, 1]`` for a pipeline stage without MoE layers."""
    if rows:
        return torch.stack(rows)
    return torch.zeros(0, 1, device=torch.cuda.current_device())


def _sharing(groups: Any) -> dist.ProcessGroup:
    """The ranks that hold a copy of the same bias."""
    if groups is not None:
        return groups.tp_dp_cp
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
