"""How the rows of Megatron's ``linear_qkv`` lie, as data that every reader of them asks.

Group after group, each the heads that share one key/value head: its query heads, what mechanisms
have beside them (``HeadRows``: an output gate first, in Megatron's own place), its key, its value.
Grouped-tied attention has no key there: its tied state stands in the value's place. A head of
queries, keys and values is ``head_dim`` rows; one of a mechanism's may be one row only.

Tensor parallelism cuts the rows evenly. With more ranks than groups a rank's rows are a piece of a
group: the ranks that share it gather it whole, and each takes its part of the queries. So that the
pieces are equal, and rows whole in FP8, a mechanism's rows in a group are filled up to a multiple
of :data:`UNIT` with rows of zeros that nothing reads. Ranks have no part in that number: a
checkpoint is of the same tensors under every layout.
"""

from dataclasses import dataclass
from functools import cached_property

from kha_megatron.heads import HeadRows, Projection

UNIT = 16
"""What the rows of mechanisms that Megatron has not itself are filled up to, in each group."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Heads of one kind, among the rows of every group."""

    first: int
    """The row of the group at which they begin."""
    heads: int
    """How many of them a group has."""
    features: int
    """Rows of one."""
    hf: str
    """Their module below ``self_attn`` of Hugging Face's classes."""
    is_per_query: bool
    """Whether each goes with a query head, so that ranks which share a group divide them."""

    @property
    def rows(self) -> slice:
        """Their rows of a group."""
        return slice(self.first, self.first + self.heads * self.features)


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """The rows of one layer's ``linear_qkv`` over all tensor-parallel ranks."""

    groups: int
    """Key/value heads."""
    queries: int
    """Query heads of each group."""
    head_dim: int
    """Rows of a head."""
    extra: tuple[HeadRows, ...] = ()
    """What mechanisms have beside queries, keys and values, in the order of the rows."""
    tied: bool = False
    """Whether keys have no rows of their own (grouped-tied attention)."""
    elsewhere: tuple[Projection, ...] = ()
    """Of queries and keys those that a mechanism makes itself (``Mechanism.makes``)."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What the heads of a group are, by name, in the order of their rows."""
        found: dict[str, Part] = {}
        first = 0

        def add(name: str, hf: str, features: int, per_query: bool) -> None:
            nonlocal first
            heads = self.queries if per_query else 1
            found[name] = Part(
                first=first, heads=heads, features=features, hf=hf, is_per_query=per_query
            )
            first = found[name].rows.stop

        if "query" not in self.elsewhere:
            add("query", "q_proj", self.head_dim, True)
        for row in self.extra:
            add(row.name, row.hf, row.features, row.heads == "query")
        first = self.padding.stop
        if not self.tied and "key" not in self.elsewhere:
            add("key", "k_proj", self.head_dim, False)
        add("value", "kv_proj" if self.tied else "v_proj", self.head_dim, False)
        return found

    @cached_property
    def padding(self) -> slice:
        """Rows of a group that fill it up, before its key."""
        size = {r: r.features * (self.queries if r.heads == "query" else 1) for r in self.extra}
        queries = 0 if "query" in self.elsewhere else self.queries
        first = queries * self.head_dim + sum(size.values())
        ours = sum(rows for row, rows in size.items() if not row.is_stock)
        return slice(first, first + -ours % UNIT)

    @property
    def is_stock(self) -> bool:
        """Whether they are Megatron's own, with its output gate if there is one."""
        return not (self.tied or self.elsewhere) and all(row.is_stock for row in self.extra)

    @property
    def parts_before_padding(self) -> int:
        """How many parts lie before the rows that fill a group up."""
        return len(self.extra) + ("query" in self.parts)

    @property
    def stock_gate(self) -> str | None:
        """The part that is Megatron's own output gate."""
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
        """The part of every ``head_dim`` rows, in their order; nothing where parts are no multiples
        of it."""
        blocks: list[str] = []
        for name, part in self.parts.items():
            count, rest = divmod(part.heads * part.features, self.head_dim)
            if rest or part.first != len(blocks) * self.head_dim:
                return ()
            blocks += [name] * count
        return tuple(blocks) * self.groups

    def sharing(self, ranks: int) -> int:
        """How many of the tensor-parallel ranks work on the same group."""
        return max(1, ranks // self.groups)

    def group_of(self, rank: int, ranks: int) -> int:
        """The group of a rank that shares one."""
        return rank // self.sharing(ranks)

    def wanted(self, rank: int, ranks: int) -> dict[str, slice]:
        """The heads of each part of a rank's groups that are the rank's.

        All of them, except that ranks which share a group divide what goes with its queries.
        """
        sharing = self.sharing(ranks)
        found: dict[str, slice] = {}
        for name, part in self.parts.items():
            mine = part.heads // sharing if part.is_per_query else part.heads
            begin = rank % sharing * mine if part.is_per_query else 0
            found[name] = slice(begin, begin + mine)
        return found
