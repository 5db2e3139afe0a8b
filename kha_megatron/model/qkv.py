"""Row layout of Megatron's ``linear_qkv`` weight.

Rows are grouped by KV head. Each group contains the query heads, the rows of head mechanisms with
the output gate first (see ``HeadRows``), the key and the value. In grouped-tied attention, the tied
state replaces key and value.

Tensor parallelism splits the rows evenly. If there are more ranks than groups, the ranks that share
a group all-gather its rows, and each of them uses a part of the queries. For FP8, the mechanism
rows of each group are padded with zeros to a multiple of :data:`UNIT`. Since the padding is
independent of the tensor-parallel size, checkpoints have the same tensors for every layout.
"""

from dataclasses import dataclass
from functools import cached_property

from kha_megatron.heads import HeadRows, Projection

UNIT = 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """Range of rows within a group, e.g. its query heads."""

    first: int
    heads: int
    """Number of heads per group."""
    features: int
    """Number of rows per head."""
    hf: str
    """Name of the Hugging Face module in ``self_attn``."""
    is_per_query: bool
    """Whether the heads are split between ranks that share a group, like the query heads."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.heads * self.features)


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """Row layout of one layer's full ``linear_qkv`` weight, before tensor-parallel sharding."""

    groups: int
    """Number of KV heads."""
    queries: int
    """Number of query heads per group."""
    head_dim: int
    extra: tuple[HeadRows, ...] = ()
    """Rows of head mechanisms."""
    tied: bool = False
    """Whether keys and values are tied (grouped-tied attention)."""
    omitted: tuple[Projection, ...] = ()
    """Projections without rows, because a mechanism computes them (``own_projections``)."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Parts of a group by name, in row order."""
        found: dict[str, Part] = {}
        first = 0

        def add(name: str, hf: str, features: int, per_query: bool) -> None:
            nonlocal first
            heads = self.queries if per_query else 1
            found[name] = Part(
                first=first, heads=heads, features=features, hf=hf, is_per_query=per_query
            )
            first = found[name].rows.stop

        if "query" not in self.omitted:
            add("query", "q_proj", self.head_dim, True)
        for row in self.extra:
            add(row.name, row.hf, row.features, row.heads == "query")
        first = self.padding.stop
        if not self.tied and "key" not in self.omitted:
            add("key", "k_proj", self.head_dim, False)
        add("value", "kv_proj" if self.tied else "v_proj", self.head_dim, False)
        return found

    @cached_property
    def padding(self) -> slice:
        """Padding rows of a group, which precede the key."""
        size = {r: r.features * (self.queries if r.heads == "query" else 1) for r in self.extra}
        queries = 0 if "query" in self.omitted else self.queries
        first = queries * self.head_dim + sum(size.values())
        ours = sum(rows for row, rows in size.items() if not row.is_stock)
        return slice(first, first + -ours % UNIT)

    @property
    def is_stock(self) -> bool:
        """Whether the layout is supported by Megatron itself, including its output gate."""
        return not (self.tied or self.omitted) and all(row.is_stock for row in self.extra)

    @property
    def parts_before_padding(self) -> int:
        return len(self.extra) + ("query" in self.parts)

    @property
    def stock_gate(self) -> str | None:
        """Name of the part for Megatron's output gate, if any."""
        return next((row.name for row in self.extra if row.is_stock), None)

    @property
    def group_rows(self) -> int:
        return self.parts["value"].rows.stop

    @property
    def rows(self) -> int:
        return self.groups * self.group_rows

    @property
    def heads(self) -> tuple[str, ...]:
        """Part name for each block of ``head_dim`` rows, or () if a part is not a multiple of
        ``head_dim``."""
        blocks: list[str] = []
        for name, part in self.parts.items():
            count, rest = divmod(part.heads * part.features, self.head_dim)
            if rest or part.first != len(blocks) * self.head_dim:
                return ()
            blocks += [name] * count
        return tuple(blocks) * self.groups

    def ranks_per_group(self, ranks: int) -> int:
        """Return the number of tensor-parallel ranks that share a group."""
        return max(1, ranks // self.groups)

    def group_of(self, rank: int, ranks: int) -> int:
        """Return the index of the group that a rank shares with other ranks."""
        return rank // self.ranks_per_group(ranks)

    def head_slices(self, rank: int, ranks: int) -> dict[str, slice]:
        """Return the heads of each part that ``rank`` uses."""
        sharing = self.ranks_per_group(ranks)
        found: dict[str, slice] = {}
        for name, part in self.parts.items():
            mine = part.heads // sharing if part.is_per_query else part.heads
            begin = rank % sharing * mine if part.is_per_query else 0
            found[name] = slice(begin, begin + mine)
        return found
