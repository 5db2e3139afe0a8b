"""Split the output of ``linear_qkv``. QK-norm is left to the caller, because KHA comes first."""

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.model.qkv import QKVLayout


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
        self.names: list[str | None] = list(layout.parts)
        self.widths: list[int] = []
        for part in layout.parts.values():
            self.widths.append(part.heads * part.features)
        padding = layout.padding
        self.names.insert(layout.parts_before_padding, None)
        self.widths.insert(layout.parts_before_padding, padding.stop - padding.start)

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
        blocks = groups.split(self.widths, dim=-1)
        for name, heads in zip(self.names, blocks, strict=True):
            if name is None:  # padding
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
