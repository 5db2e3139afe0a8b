"""Collectives of unequal sizes and of several dtypes on gloo, against what NCCL would give."""

import torch
import torch.distributed as dist

SIZES = (3, 0, 5)


def _rows(rank, target):
    """What ``rank`` sends to ``target``: as many rows as the target holds."""
    return torch.arange(SIZES[target] * 2.0).view(-1, 2) + 100 * rank + 7


def gathered():
    rank = dist.get_rank()
    parts = [torch.full((size, 2), -1.0) for size in SIZES]
    dist.all_gather(parts, _rows(rank, rank))
    return [part.numpy() for part in parts]


def scattered():
    rank = dist.get_rank()
    output = torch.empty(SIZES[rank], 2)
    inputs = [_rows(rank, target) for target in range(len(SIZES))]
    dist.reduce_scatter(output, inputs)
    untouched = all(torch.equal(x, _rows(rank, target)) for target, x in enumerate(inputs))
    return output.numpy(), untouched


def test_all_gather_of_unequal_sizes(ranks):
    expected = [_rows(rank, rank).numpy() for rank in range(3)]
    for parts in ranks(gathered, 3):
        assert all((a == b).all() for a, b in zip(parts, expected, strict=True))


def test_reduce_scatter_of_unequal_sizes(ranks):
    for rank, (output, untouched) in enumerate(ranks(scattered, 3)):
        assert (output == sum(_rows(source, rank) for source in range(3)).numpy()).all()
        assert untouched


def coalesced():
    """Two gathers in one call, of bytes and of bf16, as FP8 parameters beside others make them."""
    parts = [
        torch.arange(4, dtype=torch.uint8) + 100 * dist.get_rank(),
        torch.arange(7, dtype=torch.bfloat16) - 0.5 * dist.get_rank(),
    ]
    outputs = [part.new_empty(2 * len(part)) for part in parts]
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
        for output, part in zip(outputs, parts, strict=True):
            dist.all_gather_into_tensor(output, part)
    return [output.tolist() for output in outputs]


def test_coalesced_gathers_of_several_dtypes(ranks):
    whole, halves = [*range(4), *range(100, 104)], [*range(7), *(n - 0.5 for n in range(7))]
    assert ranks(coalesced, 2) == [[whole, halves]] * 2
