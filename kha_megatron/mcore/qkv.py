"""Split the output of ``linear_qkv``. QK-norm is left to the caller, because KHA comes first."""

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.utils import get_pg_rank
from torch import Tensor

from kha_megatron.model.qkv import QKVLayout


class QKVSplit:
    """Splits the local output of ``linear_qkv`` according to a :class:`QKVLayout`."""

    def __init__(self, layout: QKVLayout, tp_group: torch.distributed.ProcessGroup) -> None:
        self.layout, self.tp_group = layout, tp_group
        ranks, rank = tp_group.size(), get_pg_rank(tp_group)
        self.is_shared = layout.ranks_per_group(ranks) > 1
        self.group = layout.group_of(rank, ranks)
        self.wanted = layout.head_slices(rank, ranks)

    def groups(self, mixed: Tensor) -> Tensor:
        """Reshape the output to ``[sequence, batch, groups, rows of a group]``.

        With fewer KV heads than TP ranks, several ranks share a group, so rows are gathered first.
        """
        if self.is_shared:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
            mixed = mixed.chunk(self.layout.groups, dim=-1)[self.group]
        return mixed.unflatten(-1, (-1, self.layout.group_rows))

    def __call__(self, groups: Tensor) -> dict[str, Tensor]:
        """Split the groups into named tensors ``[sequence, batch, local heads, features]``."""
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
