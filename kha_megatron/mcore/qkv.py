"""Split the output of ``linear_qkv`` without applying QK-norm, which must come after KHA."""

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.model.qkv import QKVLayout


class QKVSplit:
    """Callable that splits the local output of ``linear_qkv`` according to ``layout``."""

    def __init__(self, layout: QKVLayout, tp_group: torch.distributed.ProcessGroup) -> None:
        self.layout, self.tp_group = layout, tp_group
        ranks, rank = tp_group.size(), get_pg_rank(tp_group)
        self.is_shared = layout.ranks_per_group(ranks) > 1
        self.group = layout.group_of(rank, ranks)
        self.wanted = layout.head_slices(rank, ranks)

    def groups(self, mixed: Tensor) -> Tensor:
        """Reshape ``[s, b, rows / tp]`` to ``[s, b, groups, rows of a group]``.

        If several ranks share a group, the rows of all ranks are gathered.
        """
        if self.is_shared:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
            mixed = mixed.chunk(self.layout.groups, dim=-1)[self.group]
        return mixed.unflatten(-1, (-1, self.layout.group_rows))

    def __call__(self, groups: Tensor) -> dict[str, Tensor]:
        """Split the groups into the parts ``[s, b, local heads or groups, D]`` of the layout."""
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
