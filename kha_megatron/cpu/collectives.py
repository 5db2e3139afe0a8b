"""Collectives that gloo lacks or that Megatron calls in a form only NCCL takes."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def patch() -> None:
    """Replace the three collectives of ``torch.distributed`` for this process."""
    dist.all_to_all_single = dist.distributed_c10d.all_to_all_single = _listed(
        dist.all_to_all_single
    )
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _listed(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron turns split sizes into lists only for tensors that say they are on CUDA."""

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


# Expert tensor parallelism gathers a different number of tokens from each rank. NCCL takes tensors
# of unequal sizes in these two, gloo only of equal ones: one broadcast or reduction for each rank.


def _uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_gather)
    def wrapper(tensor_list, tensor, group=None, async_op=False):
        if _even(tensor_list, async_op):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return wrapper


def _uneven_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_scatter)
    def wrapper(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _even(input_list, async_op):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            total = part.clone()  # a reduction may leave anything in the other ranks' tensors
            dist.reduce(total, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    return wrapper


def _even(tensors: list[Tensor], async_op: bool) -> bool:
    if len({tensor.shape for tensor in tensors}) == 1:
        return True
    if async_op:
        raise NotImplementedError(
            "kha_megatron.cpu gathers tensors of unequal sizes synchronously only: "
            f"{[tuple(tensor.shape) for tensor in tensors]}"
        )
    return False
