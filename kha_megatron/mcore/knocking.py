"""Modules that own the parameters of head mechanisms.

Matrices shared by all heads are replicated on every TP rank, but the gradient on a rank only covers
its local heads. ``copy_to_tensor_model_parallel_region`` all-reduces it inside autograd.

Note: Megatron must not reduce the gradient again. It would do so if the parameter had a
``sequence_parallel`` attribute, or ``q_layernorm`` or ``k_layernorm`` in its name.
"""

import math
import zlib
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from kha_megatron.heads import HeadTensor
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.kernels.fused import fused_knock
from kha_megatron.heads.knock import Variant


class MechanismWeight(MegatronModule):
    """Owns one parameter of a head mechanism.

    Do not read ``module.weight`` directly. Call the module instead, since ``forward`` sets up the
    gradient reduction and runs the hooks that wait for parameter all-gathers.

    Args:
        tensor (HeadTensor): Describes the parameter. Sharded over ``tp_group`` if it is per head.
        layer_number (int): Global layer number, starting at 1.
        init_seed (int): Mixed with the layer number and tensor name to get the random seed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tensor: HeadTensor,
        *,
        layer_number: int,
        init_seed: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(config)
        self.tensor = tensor
        self.tp_group = tp_group
        self._keep_at_next_load = False
        name = tensor.name.removeprefix("knock_")
        self.seed = zlib.crc32(f"{init_seed}/{layer_number}/{name}".encode())
        ranks = tensor.ranks(tp_group.size())
        # tells Megatron-FSDP whether the module is sharded or replicated
        self.tensor_model_parallel = ranks > 1
        rows, *other_dims = tensor.shape
        weight = torch.empty(
            (rows // ranks, *other_dims),
            dtype=config.params_dtype,
            device=parameter_device(config),
        )
        self.weight = torch.nn.Parameter(weight)
        if self.tensor_model_parallel:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight, independently of the RNG state and parallel layout."""
        if not self.tensor_model_parallel:
            self._initialize(self.weight)
            return
        unsharded = torch.empty(
            self.tensor.shape,
            dtype=self.weight.dtype,
            device=self.weight.device,
        )
        self._initialize(unsharded)
        shards = unsharded.chunk(self.tp_group.size())
        with torch.no_grad():
            self.weight.copy_(shards[get_pg_rank(self.tp_group)])

    def _initialize(self, unsharded: Tensor) -> None:
        matrices = unsharded if self.tensor.matrices else unsharded[None]
        initial_weight(
            matrices,
            self.tensor.initial,
            std=self.config.init_method_std,
            seed=self.seed,
        )

    def forward(self) -> Tensor:
        """Return the weight for the local heads, or the whole weight if all heads share it."""
        if self.tensor_model_parallel:
            return self.weight
        weight: Tensor = self.weight
        rule = self.tensor.gradient
        covers_some_heads = rule == "heads"
        covers_some_tokens = rule == "tokens" and self.config.sequence_parallel
        if covers_some_heads or covers_some_tokens:  # this rank's gradient is a partial sum
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        if self.tensor.per_head:
            return self._local_heads(weight)
        return weight

    def _local_heads(self, weight: Tensor) -> Tensor:
        """Slice the heads of this rank from a replicated weight.

        Ranks can share a head. For example, with two heads on four ranks, the first two ranks get
        the first head.
        """
        heads = len(weight)
        ranks = self.tp_group.size()
        rank = get_pg_rank(self.tp_group)
        first_head = rank * heads // ranks
        local_heads = max(1, heads // ranks)
        return weight[first_head : first_head + local_heads]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        if self._keep_at_next_load:
            self._keep_at_next_load = False
            weight = self.weight.detach()
            return {f"{prefix}weight": LocalNonpersistentObject(weight)}
        if isinstance(self.weight, DTensor):
            key = f"{prefix}weight"
            return {key: self._fsdp2_entry(key, sharded_offsets)}
        if not self.tensor_model_parallel:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _fsdp2_entry(
        self,
        key: str,
        sharded_offsets: tuple[tuple[int, int, int], ...],
    ) -> ShardedTensorFactory:
        """Build the checkpoint entry of an FSDP2 parameter."""
        weight: Any = self.weight
        # Megatron finds the optimizer's parameter by this object
        local_tensor = weight._local_tensor
        shards = self._fsdp2_shards(sharded_offsets)
        tp_replica = 0 if self.tensor_model_parallel else get_pg_rank(self.tp_group)
        dp_replica = 1 if shards.is_empty else 0
        replica_id = (0, tp_replica, dp_replica)  # the first is for pipeline parallelism
        return ShardedTensorFactory(key, local_tensor, shards.build, shards.join, replica_id)

    def _fsdp2_shards(
        self,
        sharded_offsets: tuple[tuple[int, int, int], ...],
    ) -> "_FSDP2Shards":
        weight: Any = self.weight
        mesh = weight.device_mesh
        # position among the FSDP2 ranks, which share the rows of a TP rank
        rows = len(weight)
        rows_per_rank = math.ceil(rows / mesh.size())
        is_even = rows % mesh.size() == 0
        last_row = rows - 1
        first_row = min(mesh.get_local_rank() * rows_per_rank, last_row)
        # position in the whole parameter
        global_rows = rows
        global_first_row = first_row
        if self.tensor_model_parallel:
            global_rows = rows * self.tp_group.size()
            global_first_row = first_row + rows * get_pg_rank(self.tp_group)
        rows_per_shard = rows_per_rank if is_even else 1
        return _FSDP2Shards(
            local_rows=len(weight._local_tensor),
            rows_per_shard=rows_per_shard,
            first_shard=global_first_row // rows_per_shard,
            shard_count=global_rows // rows_per_shard,
            sharded_offsets=sharded_offsets,
            group=mesh.get_group(),
            last_rank_with_rows=last_row // rows_per_rank,
        )

    def keep_at_next_load(self) -> None:
        """Do not overwrite this weight in the next load (e.g. from a checkpoint without KHA)."""
        self._keep_at_next_load = True

    def extra_repr(self) -> str:
        return f"{self.tensor.name}, weight={tuple(self.weight.shape)}"


@dataclass(frozen=True, kw_only=True)
class _FSDP2Shards:
    """The checkpoint shards of an FSDP2 parameter on this rank.

    Megatron only supports shards of equal size. If the ranks have different numbers of rows, each
    row is a shard, and ranks without rows save a copy of the last row.
    """

    local_rows: int
    rows_per_shard: int
    first_shard: int  # index of this rank's first shard
    shard_count: int  # on all ranks
    sharded_offsets: tuple[tuple[int, int, int], ...]  # of the dimensions in front of the rows
    group: torch.distributed.ProcessGroup  # FSDP2 ranks
    last_rank_with_rows: int

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no rows."""
        return self.local_rows == 0

    def build(
        self,
        key: str,
        local_tensor: Tensor,
        replica_id: Any,
        flattened_range: None,
    ) -> list[ShardedTensor]:
        """Split a tensor of this rank, which can also be a state of the optimizer."""
        some_ranks_are_empty = self.last_rank_with_rows + 1 < self.group.size()
        if some_ranks_are_empty:
            local_tensor = self._fill_empty(local_tensor)
        axis = len(self.sharded_offsets)
        shards = []
        local_shards = local_tensor.split(self.rows_per_shard)
        for index, shard in enumerate(local_shards, start=self.first_shard):
            entry = ShardedTensor.from_rank_offsets(
                key,
                shard,
                *self.sharded_offsets,
                (axis, index, self.shard_count),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            shards.append(entry)
        return shards

    def join(self, shards: list[Tensor]) -> Tensor:
        """Concatenate loaded shards, without the copy of the last row."""
        return torch.cat(shards)[: self.local_rows]

    def _fill_empty(self, local_tensor: Tensor) -> Tensor:
        """Return the last row of the parameter on ranks without rows, and else ``local_tensor``.

        Must be called on all ranks of the group.
        """
        last_row = local_tensor.new_empty(1, *local_tensor.shape[1:])
        if not self.is_empty:
            last_row.copy_(local_tensor[-1:])
        torch.distributed.broadcast(
            last_row,
            group=self.group,
            group_src=self.last_rank_with_rows,
        )
        return last_row if self.is_empty else local_tensor


class MechanismWeights(UserDict[str, Any]):
    """Maps names to weights. Calls the :class:`MechanismWeight` when a weight is read."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name)()


class KnockingHeads(MechanismWeight):
    """The shared matrices for a layer's query, key or value heads (section 3.2 of the paper).

    ``weight`` stacks all matrices of ``variant`` into ``[num_matrices, head_dim, head_dim]``, so we
    only need one all-reduce for the gradients. See ``heads.knock.MATRICES`` for their names.
    """

    def __init__(self, *args: Any, variant: Variant, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variant: Variant = variant

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Apply the matrices to every head in ``x``. If it is None, return the matrices."""
        matrices = super().forward()
        if x is None:
            return matrices
        return fused_knock(x, matrices, self.variant)


def parameter_device(config: TransformerConfig) -> torch.device | int | str:
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
