"""Split the output of ``linear_qkv`` (MHA, MQA, GQA, GTA).

Megatron splits and normalises in one method, but KHA knocks between the two. The row layout is
:class:`kha_megatron.model.qkv.QKVLayout`.

Legend: ``s`` sequence, ``b`` microbatch, ``g`` KV heads of this rank, ``n`` rows of a group, ``D``
features of a head of a part.
"""

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.model.qkv import QKVLayout


class QKVSplit:
    """Split the output of ``linear_qkv`` on a rank of ``tp_group``; ``layout`` is for all."""

    def __init__(self, layout: QKVLayout, tp_group: torch.distributed.ProcessGroup) -> None:
        self.layout, self.tp_group = layout, tp_group
        ranks, rank = tp_group.size(), get_pg_rank(tp_group)
        self.is_shared = layout.ranks_per_group(ranks) > 1
        self.group = layout.group_of(rank, ranks)
        self.wanted = layout.head_slices(rank, ranks)

    def groups(self, mixed: Tensor) -> Tensor:
        """Return whole groups ``[s, b, g, n]`` from this rank's rows ``[s, b, rows / ranks]``.

        Ranks that share a group gather all rows first; backward sums their gradients.
        """
        if self.is_shared:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
            mixed = mixed.chunk(self.layout.groups, dim=-1)[self.group]
        return mixed.unflatten(-1, (-1, self.layout.group_rows))

    def __call__(self, groups: Tensor) -> dict[str, Tensor]:
        """Split groups into parts by the names of ``layout.parts``.

        Parts of query heads are ``[s, b, heads of this rank, D]``. The others are ``[s, b, g, D]``,
        which ranks that share a group all have.
        """
        layout = self.layout
        widths = [part.heads * part.features for part in layout.parts.values()]
        widths.insert(layout.parts_before_padding, layout.padding.stop - layout.padding.start)
        slices = list(groups.split(widths, dim=3))
        del slices[layout.parts_before_padding]
        result = {}
        for (name, part), x in zip(layout.parts.items(), slices, strict=True):
            if part.heads > 1:
                x = x.reshape(*x.shape[:2], -1, part.features)
            result[name] = x[:, :, self.wanted[name]] if self.is_shared else x
        return result
