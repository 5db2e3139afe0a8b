"""Split Megatron tensors into Hugging Face tensors and join them again.

Concatenating ``join(split(x))`` gives ``x`` bit for bit. All functions also accept meta tensors.

Shapes: ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``C`` hidden size, ``F`` features
inside an MLP, ``V`` vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.heads import HeadTensor

_GATE = "self_attn.gate_output."
_Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


@dataclass(frozen=True, eq=False)
class Row:
    """One Megatron tensor of a layer, of an expert or of the whole model.

    It is the concatenation of Hugging Face tensors of the same shape: ``[2F, C]`` with ``("gate",
    "up")`` is all rows of the gate projection, then all rows of the up projection.
    """

    hf: str
    """Hugging Face name, below ``model.layers.{i}.`` in a layer. ``{}`` stands for each part."""
    names: tuple[str, ...]
    """Megatron names, below ``decoder.layers.{i}.`` in a layer. The first one is written."""
    shape: _Shape
    """_Shape of the Megatron tensor."""
    when: When = lambda model, layer: True
    """Whether the layer (counted from 0) has this tensor."""
    parts: tuple[str, ...] = ("",)
    both: bool = False
    """Write the tensor under all names, because Megatron's two backends read different ones."""
    per_expert: bool = False
    trained: bool = True
    """Whether it is updated by gradients."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return the names of the Hugging Face tensors, without the prefix of a layer."""
        return tuple(self.hf.format(part) for part in self.parts)

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return the tensors of :meth:`hf_names` from the Megatron tensor."""
        return list(tensor.chunk(len(self.hf_names(model))))

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return blocks whose concatenation is the Megatron tensor."""
        return list(parts)


@dataclass(frozen=True, eq=False)
class VocabularyRow(Row):
    """``[V padded, C]``. Hugging Face has no padding. Megatron's padding is written as zeros."""

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return the rows without padding."""
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return the rows and the padding."""
        missing = model.padded_vocab_size - parts[0].shape[0]
        padding = [parts[0].new_zeros(missing, *parts[0].shape[1:])] if missing else []
        return [parts[0], *padding]


@dataclass(frozen=True, eq=False)
class QKVRow(Row):
    """``linear_qkv``, laid out as :class:`kha_megatron.model.qkv.QKVLayout` describes."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each part of a group."""
        return tuple(self.hf.format(part.hf) for part in model.qkv.parts.values())

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return ``[heads * rows of one head, ...]`` for each part, without the group padding."""
        groups = tensor.unflatten(0, (model.qkv.groups, -1))
        return [groups[:, part.rows].flatten(0, 1) for part in model.qkv.parts.values()]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return one block of groups, padded with zeros."""
        layout = model.qkv
        blocks = [part.unflatten(0, (layout.groups, -1)) for part in parts]
        if padding := layout.padding.stop - layout.padding.start:
            zeros = blocks[0].new_zeros(layout.groups, padding, *parts[0].shape[1:])
            blocks.insert(layout.parts_before_padding, zeros)
        return [torch.cat(blocks, dim=1).flatten(0, 1)]


@dataclass(frozen=True, eq=False)
class LatentRow(Row):
    """``[H * rows, latent / c]``: up projections from ``c`` latent heads, one tensor for each.

    The tensor of MLA, which has one latent head, has no number in its name.
    """

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each latent head."""
        numbers = [""] if model.latent_heads == 1 else [f".{n}" for n in range(model.latent_heads)]
        return tuple(self.hf.format(number) for number in numbers)


@dataclass(frozen=True, eq=False)
class HeadRow(Row):
    """A parameter of a head mechanism.

    In Hugging Face, each of the stacked matrices ``[n, D, D]`` (``x @ W``) is the transposed weight
    of an ``nn.Linear``. A projection ``[heads, features, C]`` is the weight of one ``nn.Linear``.
    """

    tensor: HeadTensor | None = None

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return one name for each matrix, or one."""
        assert self.tensor is not None
        return self.tensor.hf_names

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Return each matrix transposed, or the projection with its heads flattened."""
        assert self.tensor is not None
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        return [tensor.flatten(0, -2) if self.tensor.reads_input else tensor]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Return one block with the shape of the Megatron parameter."""
        assert self.tensor is not None
        if self.tensor.matrices:
            return [torch.stack([part.T for part in parts])]
        return [parts[0].view(self.tensor.shape) if self.tensor.reads_input else parts[0]]


@cache
def head_row(tensor: HeadTensor) -> HeadRow:
    """Return the row of a head mechanism's parameter."""
    return HeadRow("", (tensor.key,), lambda m: tensor.shape, tensor=tensor)


class TensorSlot(NamedTuple):
    """A row in one layer and expert: the unit of a conversion."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    def hf_names(self, model: Architecture) -> list[str]:
        """Return the full names of the slot's Hugging Face tensors."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        if self.expert is not None:
            prefix += f"mlp.experts.{self.expert}."
        return [prefix + name for name in self.row.hf_names(model)]


@dataclass(frozen=True)
class FileFormat:
    """How the files of an architecture differ from the Hugging Face tensors in ``table``."""

    renamed: tuple[str, str] | None = None
    """Part of our tensor names, and its replacement."""
    gate_in_query: Literal["head", "group"] | None = None
    """Whether ``q_proj`` also has the rows of the output gate: after each query head, or after each
    group of query heads."""
    norms_minus_one: bool = False
    """Whether norm weights are stored minus one, which rounds 16-bit weights below 1/2."""

    def names(self, slot: TensorSlot, model: Architecture) -> list[str]:
        """Return the full names of a slot's tensors in the files."""
        names = slot.hf_names(model)
        if self.gate_in_query:
            names = [name for name in names if _GATE not in name]
        return [name.replace(*self.renamed) for name in names] if self.renamed else names

    def write(self, slot: TensorSlot, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of :meth:`names` from those of ``slot.hf_names``."""
        names, parts = slot.hf_names(model), list(parts)
        gate = self._gate(names)
        if gate is not None:
            rows = parts.pop(gate)
            blocks = [part.unflatten(0, (self._blocks(model), -1)) for part in (parts[0], rows)]
            parts[0] = torch.cat(blocks, dim=1).flatten(0, 1)
        return [part - 1 for part in parts] if self._is_norm(names) else parts

    def read(self, slot: TensorSlot, model: Architecture, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of ``slot.hf_names`` from those of :meth:`names`."""
        names, parts = slot.hf_names(model), list(held)
        gate = self._gate(names)
        if gate is not None:
            blocks = parts[0].unflatten(0, (self._blocks(model), -1))
            queries = model.num_attention_heads * model.kv_channels // len(blocks)
            both = blocks.split([queries, blocks.shape[1] - queries], dim=1)
            parts[0], rows = (part.flatten(0, 1) for part in both)
            parts.insert(gate, rows)
        return [part + 1 for part in parts] if self._is_norm(names) else parts

    def _gate(self, names: Sequence[str]) -> int | None:
        """Return the index of the gate that ``q_proj``, the first tensor, also holds."""
        return next(
            (n for n, name in enumerate(names) if self.gate_in_query and _GATE in name), None
        )

    def _is_norm(self, names: Sequence[str]) -> bool:
        return self.norms_minus_one and names[0].endswith("norm.weight")

    def _blocks(self, model: Architecture) -> int:
        per_head = self.gate_in_query == "head"
        return model.num_attention_heads if per_head else model.num_query_groups


STANDARD = FileFormat()
