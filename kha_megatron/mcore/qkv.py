"""Split the output of ``linear_qkv``. QK-norm is left to the caller, because KHA comes first."""

from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.model.qkv import QKVLayout


class _Block(NamedTuple):
    """Consecutive rows of a group."""

    part: str | None  # None for padding
    rows: int


class QKVSplit:
    """Splits the local output of ``linear_qkv`` according to a :class:`QKVLayout`."""

    def __init__(self, layout: QKVLayout, tp_group: torch.distributed.ProcessGroup) -> None:
        self.layout = layout
        self.tp_group = tp_group
        ranks = tp_group.size()
        rank = get_pg_rank(tp_group)
        ranks_per_group = layout.ranks_per_group(ranks)
        self.is_group_shared = ranks_per_group > 1
        self.group = layout.group_of(rank, ranks)
        self.local_heads = layout.head_slices(rank, ranks)
        self.blocks: list[_Block] = []
        for name, part in layout.parts.items():
            self.blocks.append(_Block(name, part.num_rows))
        padding = layout.padding
        padding_block = _Block(None, padding.stop - padding.start)
        self.blocks.insert(layout.parts_before_padding, padding_block)

    def groups(self, mixed_qkv: Tensor) -> Tensor:
        """Reshape the output to ``[sequence, batch, groups, rows of a group]``.

        With fewer KV heads than TP ranks, several ranks share a group, so rows are gathered first.
        """
        if self.is_group_shared:
            gathered = all_gather_last_dim_from_tensor_parallel_region(
                mixed_qkv,
                group=self.tp_group,
            )
            all_groups = gathered.chunk(self.layout.groups, dim=-1)
            mixed_qkv = all_groups[self.group]
        shape = (-1, self.layout.group_rows)
        return mixed_qkv.unflatten(-1, shape)

    def __call__(self, groups: Tensor) -> dict[str, Tensor]:
        """Split the groups into named tensors ``[sequence, batch, local heads, features]``."""
        tensors = {}
        features_of_blocks = groups.split([block.rows for block in self.blocks], dim=-1)
        for block, heads in zip(self.blocks, features_of_blocks, strict=True):
            name = block.part
            if name is None:
                continue
            part = self.layout.parts[name]
            if part.heads > 1:
                sequence, batch = heads.shape[:2]
                heads = heads.reshape(sequence, batch, -1, part.features)
            if self.is_group_shared:
                local_heads = self.local_heads[name]
                heads = heads[:, :, local_heads]
            tensors[name] = heads
        return tensors
