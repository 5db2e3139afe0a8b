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

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_GATE = "self_attn.gate_output."
_Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


@dataclass(frozen=True, eq=False)
class Row:
    """Maps a Megatron tensor to one or more Hugging Face tensors.

    By default, the tensor is split into equal chunks along the first dimension. For example,
    ``linear_fc1`` has the parts ``("gate", "up")``, i.e. it's ``gate_proj`` stacked on ``up_proj``.
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
    """False if the tensor isn't updated by gradients."""

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
        missing = model.padded_vocab_size - parts[0].shape[0]
        padding = [parts[0].new_zeros(missing, *parts[0].shape[1:])] if missing else []
        return [parts[0], *padding]


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
        numbers = [""] if model.latent_heads == 1 else [f".{n}" for n in range(model.latent_heads)]
        return tuple(self.hf.format(number) for number in numbers)


@dataclass(frozen=True, eq=False)
class HeadRow(Row):
    """Parameter of a head mechanism.

    Megatron stores matrices as ``[num_matrices, head_dim, head_dim]`` and multiplies from the
    right. In HF, each of them is a separate ``nn.Linear`` weight (so it's transposed). Input
    projections are flattened to two dimensions.
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
        layers = range(model.num_layers, model.num_layers + model.predictions)
        (name, *_), names = slot.hf_names(model), list[str]()
        if self.shared and name == EMBEDDING:
            names = ["embed_tokens.weight", *["shared_head.head.weight"] * model.tied_embeddings]
        elif self.shared and name == LM_HEAD:
            names = ["shared_head.head.weight"]
        return [f"model.layers.{layer}.{name}" for layer in layers for name in names]

    def write(self, slot: TensorSlot, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """Convert the tensors of a slot to the format of the files."""
        names, parts = slot.hf_names(model), list(parts)
        gate = self._gate(names)
        if gate is not None:
            rows = parts.pop(gate)
            blocks = [part.unflatten(0, (self._blocks(model), -1)) for part in (parts[0], rows)]
            parts[0] = torch.cat(blocks, dim=1).flatten(0, 1)
        return parts

    def read(self, slot: TensorSlot, model: Architecture, held: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`write`."""
        names, parts = slot.hf_names(model), list(held)
        gate = self._gate(names)
        if gate is not None:
            blocks = parts[0].unflatten(0, (self._blocks(model), -1))
            queries = model.num_attention_heads * model.kv_channels // len(blocks)
            both = blocks.split([queries, blocks.shape[1] - queries], dim=1)
            parts[0], rows = (part.flatten(0, 1) for part in both)
            parts.insert(gate, rows)
        return parts

    def _gate(self, names: Sequence[str]) -> int | None:
        return next(
            (n for n, name in enumerate(names) if self.gate_in_query and _GATE in name), None
        )

    def _blocks(self, model: Architecture) -> int:
        per_head = self.gate_in_query == "head"
        return model.num_attention_heads if per_head else model.num_query_groups


STANDARD = FileFormat()
