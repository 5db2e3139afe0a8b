"""Split Megatron tensors into Hugging Face tensors and join them again.

Splitting and joining are exact: if you concatenate ``row.join(row.split(x, model), model)``, you
get ``x`` back bit for bit. This also works with meta tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.heads import HeadTensor

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_GATE = "self_attn.gate_output."
_Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


@dataclass(frozen=True, eq=False)
class Row:
    """Maps a Megatron tensor to one or more Hugging Face tensors.

    By default, the tensor is split into equal chunks along the first dimension. For example,
    ``linear_fc1`` has the parts ``("gate", "up")``, i.e. it is ``gate_proj`` stacked on
    ``up_proj``.
    """

    hf: str
    """HF name without ``model.layers.{i}.`` (``{}`` is replaced by the part)."""
    names: tuple[str, ...]
    """Megatron names without ``decoder.layers.{i}.``. We write the first one."""
    shape: _Shape
    when: When = lambda model, layer: True
    """Whether a layer (0-based) has this tensor."""
    parts: tuple[str, ...] = ("",)
    both: bool = False
    """Write all names, not just the first, because Megatron's two backends read different ones."""
    per_expert: bool = False
    trained: bool = True
    """False if the tensor is not updated by gradients."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        """HF names without the layer prefix."""
        return tuple(self.hf.format(part) for part in self.parts)

    @property
    def is_norm(self) -> bool:
        return self.hf.endswith("norm.weight")

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Split a Megatron tensor into HF tensors (same order as :meth:`hf_names`)."""
        return list(tensor.chunk(len(self.hf_names(model))))

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """Inverse of :meth:`split`. The returned blocks still need to be concatenated."""
        return list(parts)


@dataclass(frozen=True, eq=False)
class VocabularyRow(Row):
    """Embedding or LM head. Only Megatron pads these (with zeros)."""

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        (tensor,) = parts
        rows, *other_dims = tensor.shape
        padding_rows = model.padded_vocab_size - rows
        if not padding_rows:
            return [tensor]
        return [tensor, tensor.new_zeros(padding_rows, *other_dims)]


@dataclass(frozen=True, eq=False)
class QKVRow(Row):
    """Fused ``linear_qkv``. See :class:`kha_megatron.model.qkv.QKVLayout`."""

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
    """KV up-projection. GLA has one HF weight per latent head (``kv_b_proj.0``, ``kv_b_proj.1``,
    ...), while MLA has a single ``kv_b_proj``."""

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        if model.latent_heads == 1:
            return (self.hf.format(""),)
        return tuple(self.hf.format(f".{number}") for number in range(model.latent_heads))


@dataclass(frozen=True, eq=False)
class HeadRow(Row):
    """Parameter of a head mechanism.

    Megatron stores matrices as ``[num_matrices, head_dim, head_dim]`` and multiplies from the
    right. In HF, each of them is a separate ``nn.Linear`` weight (so it is transposed). Input
    projections are flattened to two dimensions.
    """

    tensor: HeadTensor = field(kw_only=True)

    def hf_names(self, model: Architecture) -> tuple[str, ...]:
        return self.tensor.hf_names

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        if self.tensor.reads_input:
            return [tensor.flatten(0, -2)]
        return [tensor]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        if self.tensor.matrices:
            return [torch.stack([matrix.T for matrix in parts])]
        (tensor,) = parts
        if self.tensor.reads_input:
            return [tensor.view(self.tensor.shape)]
        return [tensor]


@cache
def head_row(tensor: HeadTensor) -> HeadRow:
    return HeadRow("", (tensor.key,), lambda m: tensor.shape, tensor=tensor)


class TensorSlot(NamedTuple):
    """A :class:`Row` in a given layer (and expert). This is the unit of work in a conversion."""

    row: Row
    layer: int | None = None
    expert: int | None = None

    def hf_names(self, model: Architecture) -> list[str]:
        """Full HF names, e.g. ``model.layers.0.mlp.gate_proj.weight``."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        if self.expert is not None:
            prefix += f"mlp.experts.{self.expert}."
        return [prefix + name for name in self.row.hf_names(model)]


@dataclass(frozen=True)
class FileFormat:
    """How an architecture's safetensors files differ from the rows in ``table``."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Replacements in tensor names. ``{}`` is the number of decoder layers."""
    gate_in_query: Literal["head", "group"] | None = None
    """Set if ``q_proj`` includes the output gate, either after each query head or after each
    group."""
    predictions: int = 0
    """Maximum number of multi-token prediction (MTP) layers."""
    shared: bool = False
    """MTP layers have copies of the embedding and LM head. Megatron always shares them."""

    def names(self, slot: TensorSlot, model: Architecture) -> list[str]:
        names = slot.hf_names(model)
        if self.gate_in_query:
            names = [name for name in names if _GATE not in name]
        for old, new in self.renamed.items():
            names = [name.replace(old.format(model.num_layers), new) for name in names]
        return names

    def copies(self, slot: TensorSlot, model: Architecture) -> list[str]:
        """Names of the copies of an embedding or LM head in MTP layers."""
        if not self.shared:
            return []
        original = slot.hf_names(model)[0]
        names = []
        if original == EMBEDDING:
            names.append("embed_tokens.weight")
        if original == LM_HEAD or (original == EMBEDDING and model.tied_embeddings):
            names.append("shared_head.head.weight")
        copies = []
        for layer in range(model.num_layers, model.num_layers + model.predictions):
            copies += [f"model.layers.{layer}.{name}" for name in names]
        return copies

    def write(self, slot: TensorSlot, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """Convert the tensors of a slot to the format of the files."""
        tensors = list(parts)
        gate_index = self._find_gate(slot, model)
        if gate_index is None:
            return tensors
        gate = tensors.pop(gate_index)
        query = tensors[0]
        blocks = self._count_blocks(model)
        query_blocks = query.unflatten(0, (blocks, -1))
        gate_blocks = gate.unflatten(0, (blocks, -1))
        tensors[0] = torch.cat([query_blocks, gate_blocks], dim=1).flatten(0, 1)
        return tensors

    def read(self, slot: TensorSlot, model: Architecture, stored: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`write`."""
        tensors = list(stored)
        gate_index = self._find_gate(slot, model)
        if gate_index is None:
            return tensors
        blocks = tensors[0].unflatten(0, (self._count_blocks(model), -1))
        query_rows = model.num_attention_heads * model.kv_channels // len(blocks)
        gate_rows = blocks.shape[1] - query_rows
        query, gate = blocks.split([query_rows, gate_rows], dim=1)
        tensors[0] = query.flatten(0, 1)
        tensors.insert(gate_index, gate.flatten(0, 1))
        return tensors

    def _find_gate(self, slot: TensorSlot, model: Architecture) -> int | None:
        """Return the index of the gate in the tensors of a slot, if the files fuse it."""
        if self.gate_in_query is None:
            return None
        for index, name in enumerate(slot.hf_names(model)):
            if _GATE in name:
                return index
        return None

    def _count_blocks(self, model: Architecture) -> int:
        """Return the number of alternating blocks of query and gate in ``q_proj``."""
        if self.gate_in_query == "head":
            return model.num_attention_heads
        return model.num_query_groups


STANDARD = FileFormat()
