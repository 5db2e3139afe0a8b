"""How the rows of Megatron's ``linear_qkv`` lie, as data that every reader of them asks.

Group after group, each the heads that share one key/value head: its query heads, as many heads of
an output gate where there is one, its key, its value. Grouped-tied attention has no key there: its
tied state stands in the value's place. A head is ``head_dim`` rows.

Tensor parallelism cuts the rows evenly. With more ranks than groups a rank's rows are a piece of a
group: the ranks that share it gather it whole, and each takes its part of the queries.
"""

from dataclasses import dataclass
from typing import Literal

Part = Literal["query", "gate", "key", "value"]


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """The rows of one layer's ``linear_qkv`` over all tensor-parallel ranks."""

    groups: int
    """Key/value heads."""
    queries: int
    """Query heads of each group."""
    head_dim: int
    """Rows of a head."""
    gated: bool = False
    """Whether there is an output gate, of as many heads as queries."""
    tied: bool = False
    """Whether keys have no rows of their own (grouped-tied attention)."""

    @property
    def parts(self) -> dict[Part, int]:
        """What the heads of a group are, in the order of their rows, and how many of each."""
        counts: dict[Part, int] = {"query": self.queries}
        if self.gated:
            counts["gate"] = self.queries
        if not self.tied:
            counts["key"] = 1
        return counts | {"value": 1}

    @property
    def hf_modules(self) -> tuple[str, ...]:
        """For each part the module below ``self_attn`` of our transformers class."""
        value = "kv_proj" if self.tied else "v_proj"
        modules = {"query": "q_proj", "gate": "gate_output", "key": "k_proj", "value": value}
        return tuple(modules[part] for part in self.parts)

    @property
    def group_heads(self) -> int:
        """Heads of one group, of all parts."""
        return sum(self.parts.values())

    @property
    def heads(self) -> tuple[Part, ...]:
        """The part of every head, in the order of the rows."""
        group = (part for part, count in self.parts.items() for _ in range(count))
        return tuple(group) * self.groups

    @property
    def rows(self) -> int:
        """Output features of the projection."""
        return self.groups * self.group_heads * self.head_dim

    def sharing(self, ranks: int) -> int:
        """How many of the tensor-parallel ranks work on the same group."""
        return max(1, ranks // self.groups)

    def group_of(self, rank: int, ranks: int) -> int:
        """The group of a rank that shares one."""
        return rank // self.sharing(ranks)

    def wanted(self, rank: int, ranks: int) -> dict[Part, slice]:
        """The heads of each of a rank's groups that are the rank's, by part.

        All of them, except that ranks which share a group divide its queries and gates.
        """
        sharing, first = self.sharing(ranks), 0
        found: dict[Part, slice] = {}
        for part, count in self.parts.items():
            mine, begin = count, first
            if part in ("query", "gate"):
                mine = count // sharing
                begin += rank % sharing * mine
            found[part] = slice(begin, begin + mine)
            first += count
        return found
