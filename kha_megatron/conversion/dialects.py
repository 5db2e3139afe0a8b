"""How the files of one architecture hold the tensors that ``table`` names.

The table's names and shapes are those that most architectures share, and the ``kha`` class has all
of. Where one differs by a name, by a gate whose rows stand among the queries', or by norms that are
stored minus one, this says how, both ways; it works on meta tensors too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.table import Place

_QUERIES, _GATE = "self_attn.q_proj.", "self_attn.gate_output."


@dataclass(frozen=True)
class Dialect:
    """Differences of one architecture; none of them by default."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its modules by ours, each a part of a name that ends with a dot."""
    gate_beside: Literal["head", "group"] | None = None
    """Whether ``q_proj`` holds the output gate as well: behind the rows of every query head, or
    behind those of every group of them that shares a key/value head."""
    norms_minus_one: bool = False
    """Whether a norm's weight is stored as its distance from one."""

    def names(self, place: Place, model: Architecture) -> list[str]:
        """Full names of a place's tensors in the files."""
        names = place.hf_names(model)
        if self._gate(names) is not None:
            names = [name for name in names if _GATE not in name]
        return [self._name(name) for name in names]

    def written(self, place: Place, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of :meth:`names` from those of ``place.hf_names``."""
        names, parts = place.hf_names(model), list(parts)
        if (gate := self._gate(names)) is not None:
            rows = parts.pop(gate)
            at = _queries(names)
            parts[at] = self._interleaved(model, parts[at], rows)
        if self._is_norm(names):
            parts = [part - 1 for part in parts]
        return parts

    def read(self, place: Place, model: Architecture, held: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of ``place.hf_names`` from those of :meth:`names`."""
        names, parts = place.hf_names(model), list(held)
        if (gate := self._gate(names)) is not None:
            at = _queries(names)
            parts[at], rows = self._parted(model, parts[at])
            parts.insert(gate, rows)
        if self._is_norm(names):
            parts = [part + 1 for part in parts]
        return parts

    def lost_in_files(self, place: Place, model: Architecture, parts: Sequence[Tensor]) -> int:
        """How many numbers of a place's tensors will be others when its files are read again.

        No weight of a norm from 1/2 up, in any dtype: ``w - 1`` is exact there.
        """
        return self._changed(place, model, parts, -1)

    def lost_in_reading(self, place: Place, model: Architecture, held: Sequence[Tensor]) -> int:
        """How many numbers of what the files hold are others when they are written again."""
        return self._changed(place, model, held, 1)

    def _changed(
        self, place: Place, model: Architecture, parts: Sequence[Tensor], shift: int
    ) -> int:
        if not self._is_norm(place.hf_names(model)):
            return 0
        return sum(int((part + shift - shift != part).sum()) for part in parts)

    def _name(self, name: str) -> str:
        for ours, theirs in self.renamed.items():
            name = name.replace(ours, theirs)
        return name

    def _gate(self, names: Sequence[str]) -> int | None:
        """Which of a place's tensors ``q_proj`` holds as well."""
        found = [n for n, name in enumerate(names) if _GATE in name]
        return found[0] if self.gate_beside and found else None

    def _is_norm(self, names: Sequence[str]) -> bool:
        return self.norms_minus_one and names[0].endswith("norm.weight")

    def _blocks(self, model: Architecture) -> int:
        heads, groups = model.num_attention_heads, model.num_query_groups
        return heads if self.gate_beside == "head" else groups

    def _interleaved(self, model: Architecture, queries: Tensor, gate: Tensor) -> Tensor:
        blocks, rest = self._blocks(model), queries.shape[1:]
        both = [part.unflatten(0, (blocks, -1)) for part in (queries, gate)]
        return torch.cat(both, dim=1).reshape(-1, *rest)

    def _parted(self, model: Architecture, rows: Tensor) -> list[Tensor]:
        blocks = rows.unflatten(0, (self._blocks(model), -1))
        queries = model.num_attention_heads * model.kv_channels // blocks.shape[0]
        parts = blocks.split([queries, blocks.shape[1] - queries], dim=1)
        return [part.flatten(0, 1) for part in parts]


def _queries(names: Sequence[str]) -> int:
    return next(n for n, name in enumerate(names) if _QUERIES in name)
