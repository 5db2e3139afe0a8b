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
        self.is_group_shared = layout.ranks_per_group(ranks) > 1
        self.group = layout.group_of(rank, ranks)
        self.local_heads = layout.head_slices(rank, ranks)

    def groups(self, mixed_qkv: Tensor) -> Tensor:
        """Reshape the output to ``[sequence, batch, groups, rows of a group]``.

        With fewer KV heads than TP ranks, several ranks share a group, so rows are gathered first.
        """
        if self.is_group_shared:
            every_group = all_gather_last_dim_from_tensor_parallel_region(
                mixed_qkv, group=self.tp_group
            )
            mixed_qkv = every_group.chunk(self.layout.groups, dim=-1)[self.group]
        return mixed_qkv.unflatten(-1, (-1, self.layout.group_rows))

    def __call__(self, groups: Tensor) -> dict[str, Tensor]:
        """Split the groups into named tensors ``[sequence, batch, local heads, features]``."""
        layout = self.layout
        widths = [part.heads * part.features for part in layout.parts.values()]
        padding_width = layout.padding.stop - layout.padding.start
        widths.insert(layout.parts_before_padding, padding_width)
        blocks = list(groups.split(widths, dim=3))
        del blocks[layout.parts_before_padding]
        tensors = {}
        for name, heads in zip(layout.parts, blocks, strict=True):
            part = layout.parts[name]
            if part.heads > 1:
                sequence_and_batch = heads.shape[:2]
                heads = heads.reshape(*sequence_and_batch, -1, part.features)
            if self.is_group_shared:
                local_heads = self.local_heads[name]
                heads = heads[:, :, local_heads]
            tensors[name] = heads
        return tensors
