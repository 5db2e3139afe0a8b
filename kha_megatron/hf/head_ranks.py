"""What a head mechanism asks of the ranks over which transformers splits a model's heads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from kha_megatron.ops.heads.ranks import Listener, Ranks


class ModelRanks(Ranks):
    """The tensor-parallel ranks of a model (``DistributedConfig(tp_size=...)``), or one without.

    Every rank has all tokens, so a projection of them is whole on each, and so is its gradient
    where all ranks compute the same from it (``HeadTensor.gradient``).

    Args:
        split: a parameter that tensor parallelism splits with the heads, by which it is known.
        listeners: who gets what a mechanism observes (:mod:`kha_megatron.hf.instruments`).
    """

    def __init__(self, split: Any, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        mesh = split.device_mesh if isinstance(split, DTensor) else None
        named = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
        self.mesh = mesh["tp"] if mesh is not None and named else None

    def all_heads(self, x: Tensor) -> Tensor:
        """``[..., heads]`` of every rank; a rank gets back the gradient of its own heads."""
        return x if self.mesh is None else self._laid(x, Shard(-1), Replicate())

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of ``[..., heads]``; its backward pass gathers all parts."""
        return x if self.mesh is None else self._laid(x, Replicate(), Shard(-1))

    def met_by_heads(self, x: Tensor) -> Tensor:
        """``x``, the same on all ranks, whose gradient each rank has of its own heads: summed."""
        if self.mesh is None:
            return x
        placed = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return placed.to_local(grad_placements=[Partial()])

    def own_part(self, weight: Tensor) -> Tensor:
        """This rank's part of ``[heads, ...]``, a parameter that every rank has whole."""
        if self.mesh is None:
            return weight
        return weight.chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def _laid(self, x: Tensor, now: Any, then: Any) -> Tensor:
        placed = DTensor.from_local(x, self.mesh, [now], run_check=False)
        return placed.redistribute(placements=[then]).to_local()
