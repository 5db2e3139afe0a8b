"""Make collectives work with gloo where Megatron relies on NCCL-only features."""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def patch() -> None:
    dist.all_to_all_single = dist.distributed_c10d.all_to_all_single = _with_listed_sizes(
        dist.all_to_all_single
    )
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)
    dist.all_gather_into_tensor = dist.distributed_c10d.all_gather_into_tensor = _of_bytes(
        dist.all_gather_into_tensor
    )
    dist._coalescing_manager = _without_a_device(dist._coalescing_manager)


def _without_a_device(coalescing: Callable[..., Any]) -> Callable[..., Any]:
    """Disable coalescing by device, which gloo doesn't support."""

    @contextmanager
    def manager(group=None, device=None, async_ops=False):
        if device is not None:
            yield SimpleNamespace(wait=lambda: None)
            return
        with coalescing(group, async_ops=async_ops) as work:
            yield work

    return manager


def _with_listed_sizes(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Convert split sizes to lists. Megatron itself only does this for CUDA tensors."""

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, Tensor) else sizes

    @functools.wraps(all_to_all)
    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        return all_to_all(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op
        )

    return all_to_all_single


# Ranks have different numbers of tokens with expert tensor parallelism, but gloo only supports
# equal sizes here. We use one broadcast or reduce per rank instead.


def _uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_gather)
    def wrapper(tensor_list, tensor, group=None, async_op=False):
        if _even(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return wrapper


def _uneven_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_scatter)
    def wrapper(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _even(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            total = part.clone()  # reduce also overwrites the inputs of other ranks
            dist.reduce(total, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    return wrapper


def _of_bytes(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """All-gather coalesced tensors as bytes. With mixed dtypes, gloo would corrupt them."""
    coalescing = dist.distributed_c10d._world.pg_coalesce_state

    def as_bytes(tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).view(torch.uint8)

    @functools.wraps(all_gather)
    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        if (group or dist.group.WORLD) in coalescing:
            output_tensor, input_tensor = as_bytes(output_tensor), as_bytes(input_tensor)
        return all_gather(output_tensor, input_tensor, group, async_op)

    return all_gather_into_tensor


def _even(tensors: list[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
