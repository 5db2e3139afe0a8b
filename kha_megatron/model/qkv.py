"""Row layout of Megatron's ``linear_qkv`` weight.

There is one group of rows per KV head. Each group contains, in this order:

- query heads
- rows for head mechanisms, with the output gate first (see ``HeadRows``)
- zero padding, such that the mechanism rows are a multiple of :data:`UNIT` (needed for FP8)
- key and value, or the tied state in grouped-tied attention (GTA)

With tensor parallelism, rows are split evenly. If there are more ranks than groups, several ranks
share a group: they all-gather its rows, and each of them uses some of the query heads. The padding
does not depend on the TP size, so checkpoints are the same for every layout.
"""

from dataclasses import dataclass
from functools import cached_property

from kha_megatron.heads import HeadRows, Projection

UNIT = 16
"""FP8 matrix multiplications require a multiple of this number of rows."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of rows in each group, e.g. the query heads."""

    first: int
    heads: int
    features: int  # rows per head
    is_per_query: bool  # split between the ranks that share a group, as query heads are

    @property
    def num_rows(self) -> int:
        return self.heads * self.features

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.num_rows)


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """Layout of the full ``linear_qkv`` weight of one layer (i.e. before TP sharding)."""

    groups: int
    """Number of KV heads."""
    queries: int
    head_dim: int
    value_rows: int = 0
    """Rows per value head, if not ``head_dim``."""
    mechanism_rows: tuple[HeadRows, ...] = ()
    """Rows for head mechanisms."""
    tied: bool = False
    """True for grouped-tied attention (GTA)."""
    omitted: tuple[Projection, ...] = ()
    """Projections that a mechanism computes on its own (``own_projections``)."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts of a group by name, in the order of their rows."""
        return self._parts_before_padding | self._parts_after_padding

    @cached_property
    def _parts_before_padding(self) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        next_row = 0
        if "query" not in self.omitted:
            query = self._part(next_row, self.head_dim, is_per_query=True)
            parts["query"] = query
            next_row = query.rows.stop
        for rows in self.mechanism_rows:
            part = self._part(next_row, rows.features, is_per_query=rows.heads == "query")
            parts[rows.name] = part
            next_row = part.rows.stop
        return parts

    @cached_property
    def _parts_after_padding(self) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        next_row = self.padding.stop
        if not self.tied and "key" not in self.omitted:
            key = self._part(next_row, self.head_dim)
            parts["key"] = key
            next_row = key.rows.stop
        parts["value"] = self._part(next_row, self.value_rows or self.head_dim)
        return parts

    def _part(self, first: int, features: int, *, is_per_query: bool = False) -> Part:
        heads = self.queries if is_per_query else 1
        return Part(first=first, heads=heads, features=features, is_per_query=is_per_query)

    @cached_property
    def padding(self) -> slice:
        """Padding rows in a group (right before the key)."""
        first = 0
        for part in self._parts_before_padding.values():
            first = part.rows.stop
        padded_rows = 0  # Megatron's own gate is not padded
        for rows in self.mechanism_rows:
            if not rows.is_stock:
                padded_rows += self._parts_before_padding[rows.name].num_rows
        padding_rows = -padded_rows % UNIT
        return slice(first, first + padding_rows)

    @property
    def is_stock(self) -> bool:
        """True if Megatron itself supports this layout (this includes its output gate)."""
        if self.tied or self.omitted:
            return False
        return all(rows.is_stock for rows in self.mechanism_rows)

    @property
    def parts_before_padding(self) -> int:
        return len(self._parts_before_padding)

    @property
    def stock_gate(self) -> str | None:
        """Name of the part with Megatron's own output gate."""
        for rows in self.mechanism_rows:
            if rows.is_stock:
                return rows.name
        return None

    @property
    def group_rows(self) -> int:
        return self.parts["value"].rows.stop

    @property
    def rows(self) -> int:
        return self.groups * self.group_rows

    def ranks_per_group(self, ranks: int) -> int:
        """How many TP ranks share a group."""
        return max(1, ranks // self.groups)

    def group_of(self, rank: int, ranks: int) -> int:
        """Index of the group that a rank shares with other ranks."""
        return rank // self.ranks_per_group(ranks)

    def head_slices(self, rank: int, ranks: int) -> dict[str, slice]:
        """Return which heads of each part of its group are used by ``rank``."""
        ranks_per_group = self.ranks_per_group(ranks)
        slices: dict[str, slice] = {}
        for name, part in self.parts.items():
            if not part.is_per_query:
                slices[name] = slice(0, part.heads)
                continue
            heads_per_rank = part.heads // ranks_per_group
            rank_in_group = rank % ranks_per_group
            first_head = rank_in_group * heads_per_rank
            slices[name] = slice(first_head, first_head + heads_per_rank)
        return slices
