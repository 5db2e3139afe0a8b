"""Layout of the rows of Megatron's ``linear_qkv``.

The rows are ordered by group (key/value head): query heads, rows of mechanisms (``HeadRows``, the
output gate first), key, value. In grouped-tied attention the tied state replaces key and value.

Tensor parallelism divides the rows evenly. With more ranks than groups, the ranks that share a
group gather it, and each takes its part of the queries. Rows of mechanisms are padded with zeros to
a multiple of :data:`UNIT` per group for FP8. The padding does not depend on the number of ranks, so
a checkpoint has the same tensors in every layout.
"""

from dataclasses import dataclass
from functools import cached_property

from kha_megatron.heads import HeadRows, Projection

UNIT = 16
"""Multiple to which the rows of mechanisms that Megatron does not have are padded per group."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Heads of one kind within a group."""

    first: int
    """First row within the group."""
    heads: int
    """Number of heads in a group."""
    features: int
    """Rows of one head."""
    hf: str
    """Module below ``self_attn`` in Hugging Face's classes."""
    is_per_query: bool
    """True if ranks that share a group divide the heads, as they do queries."""

    @property
    def rows(self) -> slice:
        """Rows within the group."""
        return slice(self.first, self.first + self.heads * self.features)


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """Rows of one layer's ``linear_qkv``, over all tensor-parallel ranks."""

    groups: int
    """Key/value heads."""
    queries: int
    """Query heads per group."""
    head_dim: int
    """Rows of a head."""
    extra: tuple[HeadRows, ...] = ()
    """Rows of mechanisms, in order."""
    tied: bool = False
    """True if keys have no rows (grouped-tied attention)."""
    omitted: tuple[Projection, ...] = ()
    """Queries or keys that a mechanism makes itself (``Mechanism.own_projections``)."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Parts of a group by name, in the order of their rows."""
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
        """Padding rows of a group, before its key."""
        size = {r: r.features * (self.queries if r.heads == "query" else 1) for r in self.extra}
        queries = 0 if "query" in self.omitted else self.queries
        first = queries * self.head_dim + sum(size.values())
        ours = sum(rows for row, rows in size.items() if not row.is_stock)
        return slice(first, first + -ours % UNIT)

    @property
    def is_stock(self) -> bool:
        """True if Megatron has the same rows, including its output gate."""
        return not (self.tied or self.omitted) and all(row.is_stock for row in self.extra)

    @property
    def parts_before_padding(self) -> int:
        """Number of parts before the padding."""
        return len(self.extra) + ("query" in self.parts)

    @property
    def stock_gate(self) -> str | None:
        """Name of the part that is Megatron's output gate."""
        return next((row.name for row in self.extra if row.is_stock), None)

    @property
    def group_rows(self) -> int:
        """Rows of one group."""
        return self.parts["value"].rows.stop

    @property
    def rows(self) -> int:
        """Output features of the projection."""
        return self.groups * self.group_rows

    @property
    def heads(self) -> tuple[str, ...]:
        """Part of every ``head_dim`` rows, in order; empty if a part is no multiple of it."""
        blocks: list[str] = []
        for name, part in self.parts.items():
            count, rest = divmod(part.heads * part.features, self.head_dim)
            if rest or part.first != len(blocks) * self.head_dim:
                return ()
            blocks += [name] * count
        return tuple(blocks) * self.groups

    def ranks_per_group(self, ranks: int) -> int:
        """Return how many tensor-parallel ranks share a group."""
        return max(1, ranks // self.groups)

    def group_of(self, rank: int, ranks: int) -> int:
        """Return the group of a rank that shares one."""
        return rank // self.ranks_per_group(ranks)

    def head_slices(self, rank: int, ranks: int) -> dict[str, slice]:
        """Return the heads of each part that belong to a rank."""
        sharing = self.ranks_per_group(ranks)
        found: dict[str, slice] = {}
        for name, part in self.parts.items():
            mine = part.heads // sharing if part.is_per_query else part.heads
            begin = rank % sharing * mine if part.is_per_query else 0
            found[name] = slice(begin, begin + mine)
        return found
