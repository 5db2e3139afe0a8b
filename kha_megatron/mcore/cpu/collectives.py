"""Make collectives work with gloo where Megatron relies on NCCL-only features."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from kha_megatron.mcore.patching import patch


def install() -> None:
    """Patch the collectives of ``torch.distributed`` in this process."""
    for module in (dist, distributed_c10d):
        patch(module, "all_to_all_single")(_all_to_all_single)
        patch(module, "all_gather_into_tensor")(_all_gather_into_tensor)
    patch(dist, "all_gather")(_all_gather)
    patch(dist, "reduce_scatter")(_reduce_scatter)
    patch(dist, "_coalescing_manager")(_coalescing_manager)


@contextmanager
def _coalescing_manager(coalescing: Any, group=None, device=None, async_ops=False):
    """Disable coalescing by device, which gloo does not support."""
    if device is not None:
        yield SimpleNamespace(wait=lambda: None)
        return
    with coalescing(group, async_ops=async_ops) as work:
        yield work


def _all_to_all_single(
    all_to_all: Any, output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs
):
    """Convert split sizes to lists. Megatron itself only does this for CUDA tensors."""
    if isinstance(output_split_sizes, Tensor):
        output_split_sizes = output_split_sizes.tolist()
    if isinstance(input_split_sizes, Tensor):
        input_split_sizes = input_split_sizes.tolist()
    return all_to_all(output, input, output_split_sizes, input_split_sizes, *args, **kwargs)


# Ranks have different numbers of tokens with expert tensor parallelism, but gloo only supports
# equal sizes here. We use one broadcast or reduce per rank instead.


def _all_gather(all_gather: Any, tensor_list, tensor, group=None, async_op=False):
    if _have_equal_shapes(tensor_list):
        return all_gather(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, tensor_of_rank in enumerate(tensor_list):
        dist.broadcast(tensor_of_rank, group=group, group_src=rank)
    return None


def _reduce_scatter(
    reduce_scatter: Any, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False
):
    if _have_equal_shapes(input_list):
        return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    for rank, input_for_rank in enumerate(input_list):
        total = input_for_rank.clone()  # reduce also overwrites the inputs of other ranks
        dist.reduce(total, op=op, group=group, group_dst=rank)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


def _all_gather_into_tensor(
    all_gather: Any, output_tensor, input_tensor, group=None, async_op=False
):
    """All-gather coalesced tensors as bytes. With mixed dtypes, gloo would corrupt them."""

    def as_bytes(tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).view(torch.uint8)

    coalescing_groups = distributed_c10d._world.pg_coalesce_state
    is_coalesced = (group or dist.group.WORLD) in coalescing_groups
    if is_coalesced:
        output_tensor = as_bytes(output_tensor)
        input_tensor = as_bytes(input_tensor)
    return all_gather(output_tensor, input_tensor, group, async_op)


def _have_equal_shapes(tensors: list[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
