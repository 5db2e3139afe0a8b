"""Layouts in which Megatron tensors are split into Hugging Face tensors and joined again.

The blocks of ``join(split(x))`` concatenate to ``x`` bit for bit. Meta tensors are also supported.
In shapes, ``H`` is the number of query heads, ``D`` the head dim, ``C`` the hidden size, ``F`` the
FFN hidden size and ``V`` the vocabulary size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """Mapping between a Megatron tensor and one or more Hugging Face tensors.

    By default, the Megatron tensor is the concatenation of Hugging Face tensors of the same shape.
    For example, ``[2F, C]`` with the parts ``("gate", "up")`` contains all rows of the gate
    projection, followed by all rows of the up projection.
    """

    hf: str
    """Hugging Face name relative to ``model.layers.{i}.``, with ``{}`` in place of the part."""
    names: tuple[str, ...]
    """Megatron names relative to ``decoder.layers.{i}.``. By default, the first one is written."""
    shape: _Shape
    when: When = lambda model, layer: True
    """Whether the given layer (starting at 0) has this tensor."""
    parts: tuple[str, ...] = ("",)
    both: bool = False
    """Whether to write all names, because Megatron's two backends read different names."""
    per_expert: bool = False
    trained: bool = True
    """Whether the tensor is updated by gradients."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """Return the Hugging Face names without the layer prefix."""
        return tuple(self.hf.format(part) for part in self.parts)

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Split the Megatron tensor into the tensors of :meth:`hf_names`."""
        return list(tensor.chunk(len(self.hf_names(model))))

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Convert Hugging Face tensors to blocks that concatenate to the Megatron tensor."""
        return list(parts)


@dataclass(frozen=True, eq=False)
class VocabularyRow(Row):
    """Embedding or output layer ``[V, C]``, which only Megatron pads with zeros."""

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        missing = model.padded_vocab_size - parts[0].shape[0]
        padding = [parts[0].new_zeros(missing, *parts[0].shape[1:])] if missing else []
        return [parts[0], *padding]


@dataclass(frozen=True, eq=False)
class QKVRow(Row):
    """Fused ``linear_qkv``; see :class:`kha_megatron.model.qkv.QKVLayout` for the layout."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        return tuple(self.hf.format(part.hf) for part in model.qkv.parts.values())

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        groups = tensor.unflatten(0, (model.qkv.groups, -1))
        return [groups[:, part.rows].flatten(0, 1) for part in model.qkv.parts.values()]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        layout = model.qkv
        blocks = [part.unflatten(0, (layout.groups, -1)) for part in parts]
        if padding := layout.padding.stop - layout.padding.start:
            zeros = blocks[0].new_zeros(layout.groups, padding, *parts[0].shape[1:])
            blocks.insert(layout.parts_before_padding, zeros)
        return [torch.cat(blocks, dim=1).flatten(0, 1)]


@dataclass(frozen=True, eq=False)
class LatentRow(Row):
    """Up projection ``[H * D, latent / c]``, stored in Hugging Face as one tensor for each of the
    ``c`` latent heads. Since MLA has only one latent head, its number is omitted."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        numbers = [""] if model.latent_heads == 1 else [f".{n}" for n in range(model.latent_heads)]
        return tuple(self.hf.format(number) for number in numbers)


@dataclass(frozen=True, eq=False)
class HeadRow(Row):
    """Parameter of a head mechanism.

    Stacked matrices ``[n, D, D]``, which are multiplied from the right, become one transposed
    ``nn.Linear`` weight each. A projection ``[heads, features, C]`` becomes a single weight.
    """

    tensor: HeadTensor = field(kw_only=True)

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        return self.tensor.hf_names

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        return [tensor.flatten(0, -2) if self.tensor.reads_input else tensor]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        if self.tensor.matrices:
            return [torch.stack([part.T for part in parts])]
        return [parts[0].view(self.tensor.shape) if self.tensor.reads_input else parts[0]]


@cache
def head_row(tensor: HeadTensor) -> HeadRow:
    return HeadRow("", (tensor.key,), lambda m: tensor.shape, tensor=tensor)


class TensorSlot(NamedTuple):
    """Row of one layer and expert. Slots are converted independently of each other."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    def hf_names(self, model: Architecture) -> list[str]:
        """Return the full names of the Hugging Face tensors."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        if self.expert is not None:
            prefix += f"mlp.experts.{self.expert}."
        return [prefix + name for name in self.row.hf_names(model)]


@dataclass(frozen=True)
class FileFormat:
    """Differences between an architecture's safetensors files and the rows in ``table``."""

    renamed: tuple[str, str] | None = None
    """Substring of tensor names to replace, and its replacement."""
    gate_in_query: Literal["head", "group"] | None = None
    """Whether ``q_proj`` contains the output gate after each query head, or after each group of
    query heads."""
    norms_minus_one: bool = False
    """Whether norm weights are stored as ``w - 1``, which rounds 16-bit weights below 1/2."""

    def names(self, slot: TensorSlot, model: Architecture) -> list[str]:
        """Return the tensor names of a slot in the files."""
        names = slot.hf_names(model)
        if self.gate_in_query:
            names = [name for name in names if _GATE not in name]
        return [name.replace(*self.renamed) for name in names] if self.renamed else names

    def write(self, slot: TensorSlot, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """Convert the tensors of a slot to those stored in the files."""
        names, parts = slot.hf_names(model), list(parts)
        gate = self._gate(names)
        if gate is not None:
            rows = parts.pop(gate)
            blocks = [part.unflatten(0, (self._blocks(model), -1)) for part in (parts[0], rows)]
            parts[0] = torch.cat(blocks, dim=1).flatten(0, 1)
        return [part - 1 for part in parts] if self._is_norm(names) else parts

    def read(self, slot: TensorSlot, model: Architecture, held: Sequence[Tensor]) -> list[Tensor]:
        """Convert tensors stored in the files to those of a slot."""
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
        return next(
            (n for n, name in enumerate(names) if self.gate_in_query and _GATE in name), None
        )

    def _is_norm(self, names: Sequence[str]) -> bool:
        return self.norms_minus_one and names[0].endswith("norm.weight")

    def _blocks(self, model: Architecture) -> int:
        per_head = self.gate_in_query == "head"
        return model.num_attention_heads if per_head else model.num_query_groups


STANDARD = FileFormat()
