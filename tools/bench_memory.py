"""Measure what a transformer layer keeps for its backward pass: stock beside ours.

Counted are the bytes that a forward pass has allocated and that are still alive when it returns,
apart from its output: what autograd saved, and whatever else is held. Storages count once, however
many views there are. On a GPU the allocator is asked, also for the peak of forward and backward; on
a CPU every allocation is watched, and the core attention of all variants is torch's fused one: it
keeps what Transformer Engine's does, where Megatron's own would keep the scores of all heads.

KHA may keep its outputs, which attention needs, and nothing else: `beyond outputs` is what a layer
keeps more than stock, less the knocked queries, keys and values.

TRITON_INTERPRET=1 runs the variants with kernels on a CPU, too; choose few tokens then.
"""

import argparse
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from bench_layer import cell_options, cells, of_each
from bench_layer import refusal as refusal
from bench_layer import start as start
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import STOCK, Variant

if TYPE_CHECKING:
    from layers import Cell, Layer

EXAMPLE = """example:
  python tools/bench.py memory --json benchmarks/memory.json
  TRITON_INTERPRET=1 python tools/bench.py memory --device cpu --shapes moe dense --tokens 128
"""

PRECISIONS = {"precisions": ["bf16"]}
DEFAULTS = {
    "cuda": {"shapes": ["moe", "dense"], "tokens": [8192], "sequence": 8192} | PRECISIONS,
    "cpu": {"shapes": ["tiny"], "tokens": [64], "sequence": 32} | PRECISIONS,
}


class Allocations(TorchDispatchMode):
    """Watches every storage that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {storage.cdata for storage in _storages((args, kwargs))}
        for made in _storages(result):
            if made.cdata not in known:  # neither a view nor changed in place
                self._made.setdefault(made.cdata, made)
        return result

    def alive(self) -> int:
        """Bytes of those that something still holds."""
        held = (torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self._made)
        return sum(storage.nbytes() for storage in held if storage is not None)


class FusedAttention(torch.nn.Module):
    """Torch's attention in the place of Megatron's: keeps q, k, v and the output."""

    def forward(self, query, key, value, attention_mask=None, **_: Any) -> torch.Tensor:
        """``[s, b, heads, D]`` and twice ``[s, b, groups, D]`` to ``[s, b, heads * D]``, causal."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


def _storages(values: Any) -> list[StorageWeakRef]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def kept(layer: "Layer", device: torch.device) -> dict[str, int]:
    """Bytes after a forward pass, the output's left out; on a GPU also the peak of a whole pass."""
    if device.type == "cpu":
        for attention in (m for m in layer.model.modules() if hasattr(m, "core_attention")):
            attention.core_attention = FusedAttention()
    layer.run(1)  # what is made once is there already
    layer.hidden.grad = None
    gc.collect()
    if device.type == "cpu":
        with layer.variant.chosen(), Allocations() as allocations:
            output = layer.forward()
        gc.collect()
        return {"kept": allocations.alive() - output.untyped_storage().nbytes()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with layer.variant.chosen():
        output = layer.forward()
        gc.collect()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - output.untyped_storage().nbytes()
        output.backward(layer.upstream)
    torch.cuda.synchronize()
    return {"kept": held, "peak": torch.cuda.max_memory_allocated() - before}


def measure(cell: "Cell", given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Bytes of every variant that runs."""
    from layers import Layer, transformer_config

    def one(variant: Variant) -> dict[str, int]:
        gc.collect()
        torch.cuda.empty_cache()
        held = kept(Layer(cell, variant, moved=False), device)
        return held | {"outputs": outputs(variant, config, cell.tokens)}

    config = transformer_config(cell)
    rows, skipped, failed = of_each(cell, given, one)
    rows = rows if STOCK in rows else {}  # without it there is nothing to compare
    for row in rows.values():
        row["over_stock"] = row["kept"] - rows[STOCK]["kept"]
        row["beyond_outputs"] = row["over_stock"] - row["outputs"]
    return {
        "cell": str(cell),
        "shape": cell.shape,
        "tokens": cell.tokens,
        "precision": cell.precision,
        "qkv_bytes": cell.tokens * 2 * _width(config, ("query", "key", "value")),
        "bytes": rows,
        "skipped": skipped,
        "failed": failed,
    }


def outputs(variant: Variant, config: Any, tokens: int) -> int:
    """Bytes of the knocked queries, keys and values; none where the QKV weight knocks."""
    knocked = () if variant.folded else tuple(variant.kha().variants)
    return tokens * 2 * _width(config, knocked)


def _width(config: Any, projections: tuple[str, ...]) -> int:
    heads = {
        "query": config.num_attention_heads,
        "key": config.num_query_groups,
        "value": config.num_query_groups,
    }
    return config.kv_channels * sum(heads[projection] for projection in projections)


HEADER = ["shape", "tokens", "variant", "kept (bytes per token)", "over stock", "knocked outputs"]
HEADER += ["beyond outputs", "peak", "target: 0 beyond outputs"]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table: bytes for each token."""
    tokens = result["tokens"]

    def each(size: int | None) -> str:
        return "not measured" if size is None else f"{size / tokens:,.1f}"

    found = []
    for name, row in result["bytes"].items():
        figures = [each(row[key]) for key in ("kept", "over_stock", "outputs")]
        met = "" if name == STOCK else "met" if row["beyond_outputs"] <= 0 else "MISSED"
        beyond = [each(row["beyond_outputs"]), each(row.get("peak")), met]
        found.append([result["shape"], str(tokens), name, *figures, *beyond])
    return found


options = cell_options


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each cell."""
    return (measure(cell, given, device) for cell in cells(given))
