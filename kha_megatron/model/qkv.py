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
    def rows(self) -> slice:
        return slice(self.first, self.first + self.heads * self.features)


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
        parts: dict[str, Part] = {}
        next_row = 0

        def append(name: str, features: int, *, is_per_query: bool = False) -> None:
            nonlocal next_row
            parts[name] = Part(
                first=next_row,
                heads=self.queries if is_per_query else 1,
                features=features,
                is_per_query=is_per_query,
            )
            next_row = parts[name].rows.stop

        if "query" not in self.omitted:
            append("query", self.head_dim, is_per_query=True)
        for rows in self.mechanism_rows:
            append(rows.name, rows.features, is_per_query=rows.heads == "query")
        next_row = self.padding.stop
        if not self.tied and "key" not in self.omitted:
            append("key", self.head_dim)
        append("value", self.value_rows or self.head_dim)
        return parts

    @cached_property
    def padding(self) -> slice:
        """Padding rows in a group (right before the key)."""
        first = 0 if "query" in self.omitted else self.queries * self.head_dim
        padded_rows = 0  # Megatron's own gate is not padded
        for rows in self.mechanism_rows:
            count = rows.features
            if rows.heads == "query":
                count *= self.queries
            first += count
            if not rows.is_stock:
                padded_rows += count
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
        query_parts = 1 if "query" in self.parts else 0
        return query_parts + len(self.mechanism_rows)

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
