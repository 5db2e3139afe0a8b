"""Auxiliary-loss-free load balancing for MoE.

After each batch, the router bias of overloaded experts is decreased, and the bias of underloaded
experts is increased. There are two update rules:

- ``sign``: fixed step size (Wang et al. 2024);
- ``rms``: deviation from the mean load, divided by the RMS of all deviations (Su 2025; see also
  section 4.1 of the paper).

Loads are counted and reduced as integers, so biases are bitwise equal in all parallel layouts.
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
"""Called with layer numbers (from 1), loads (float64) and updated biases (float32) of the local MoE
layers. Loads and biases have shape ``[num_moe_layers, num_experts]``.
"""


def compute_bias_update(loads: Tensor, update: Update) -> Tensor:
    """Compute the change of each expert's bias, before multiplying by the update rate.

    Args:
        loads (Tensor): Tokens per expert in the global batch, ``[..., num_experts]``.
        update (str): ``sign`` or ``rms``. With ``rms``, updates have mean 0 and RMS 1.

    Returns:
        Tensor: The change in float32, computed in float64.
    """
    loads = loads.double()
    mean_load = loads.mean(dim=-1, keepdim=True)
    offset = mean_load - loads
    if update == "sign":
        return offset.sign().float()
    squares = offset.square()
    mean_square = squares.mean(dim=-1, keepdim=True)
    mean_square += torch.finfo(torch.float64).tiny  # avoids 0 / 0 if all loads are equal
    normalized = offset / mean_square.sqrt()
    return normalized.float()


def balance_experts(
    models: list[torch.nn.Module],
    update: Update,
    report: Report | None = None,
) -> None:
    """Replace Megatron's update of the expert biases. Must be called on all ranks."""
    config = get_model_config(models[0])
    rate = config.moe_router_bias_update_rate

    @contextmanager
    @torch.no_grad()
    def balanced(chunks: list[Any], groups: Any) -> Iterator[None]:
        routers, reported_indices = _balanced_routers(models)
        # read the loads first, because Megatron's own update resets them
        loads = _stacked(routers, "local_tokens_per_expert")
        biases = _stacked(routers, "expert_bias")
        yield
        if groups is None:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        else:
            group = groups.tp_dp_cp
        dist.all_reduce(loads, group=group)
        change = compute_bias_update(loads, update)
        biases = biases + rate * change
        for router, bias in zip(routers, biases, strict=True):
            router.expert_bias.copy_(bias)
        if report is not None:
            layers = []
            for index in reported_indices:
                layers.append(routers[index].layer_number)
            reported_loads = loads[reported_indices].double()
            report(layers, reported_loads, biases[reported_indices])

    wrap_grad_finalization(models, balanced)


def _balanced_routers(models: list[torch.nn.Module]) -> tuple[list[Any], list[int]]:
    """Return all routers with trained biases, and the indices of those to report."""
    routers: list[Any] = []
    reported_indices: list[int] = []
    for model in models:
        for name, module in model.named_modules():
            if not _is_balanced(module):
                continue
            index = len(routers)
            routers.append(module)
            if "mtp." not in name:  # layers for multi-token prediction have no own number
                reported_indices.append(index)
    return routers, reported_indices


def _is_balanced(module: Any) -> bool:
    if getattr(module, "expert_bias", None) is None:
        return False
    is_frozen = getattr(module, "frozen_expert_bias", False)
    return module.training and not is_frozen


def violation(loads: Tensor) -> Tensor:
    """Maximal violation (MaxVio, Wang et al. 2024), i.e. ``max(loads) / mean(loads) - 1``."""
    largest_load = loads.amax(dim=-1)
    mean_load = loads.mean(dim=-1)
    return largest_load / mean_load - 1


def _stacked(routers: list[Any], buffer: str) -> Tensor:
    """Stack a buffer of all routers. Stages without MoE layers get an empty tensor."""
    if not routers:
        device = torch.cuda.current_device()
        return torch.zeros(0, 1, device=device)
    rows = []
    for router in routers:
        rows.append(getattr(router, buffer))
    return torch.stack(rows)
