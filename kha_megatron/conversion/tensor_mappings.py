"""Kinds of mappings between Megatron tensors and Hugging Face tensors. See ``tensor_names``.

Splitting and joining are exact: if you concatenate the blocks that ``mapping.join`` makes of the
tensors from ``mapping.split``, you get the Megatron tensor back bit for bit. This also works with
meta tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kha_megatron.heads import HeadTensor
from kha_megatron.model.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorMapping(ABC):
    """Maps a Megatron tensor to one or more Hugging Face tensors.

    By default, the Hugging Face tensors are equal chunks along the first dimension.
    """

    megatron: str
    """Megatron name without ``decoder.layers.{i}.``."""
    shape: Callable[[ModelConfig], Shape]
    """Shape of the Megatron tensor."""
    aliases: tuple[str, ...] = ()
    """Other names that Megatron may use for the tensor."""
    write_aliases: bool = False
    """Write the tensor under all names, because Megatron's two backends read different ones."""
    trained: bool = True
    """False if the tensor is not updated by gradients."""

    @property
    def megatron_names(self) -> list[str]:
        return [self.megatron, *self.aliases]

    @abstractmethod
    def hf_names(self, model: ModelConfig) -> list[str]:
        """HF names without ``model.layers.{i}.``, where ``{expert}`` is the index of an expert."""

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """Split a Megatron tensor into HF tensors, in the order of :meth:`hf_names`."""
        names = self.hf_names(model)
        return list(tensor.chunk(len(names)))

    def join(self, hf_tensors: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Inverse of :meth:`split`.

        Returns:
            Blocks of the Megatron tensor, which still need to be concatenated along the first
            dimension.
        """
        return list(hf_tensors)


@dataclass(frozen=True, eq=False, kw_only=True)
class DirectMapping(TensorMapping):
    """The tensor is the same in both formats."""

    hf: str

    def hf_names(self, model: ModelConfig) -> list[str]:
        return [self.hf]


@dataclass(frozen=True, eq=False, kw_only=True)
class NormMapping(DirectMapping):
    """Weight of a norm."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedMLPMapping(TensorMapping):
    """``linear_fc1``, i.e. ``gate_proj`` stacked on ``up_proj``."""

    gate: str
    up: str

    def hf_names(self, model: ModelConfig) -> list[str]:
        return [self.gate, self.up]


@dataclass(frozen=True, eq=False, kw_only=True)
class VocabularyMapping(DirectMapping):
    """Embedding or LM head. Only Megatron pads the vocabulary (with rows of zeros)."""

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        return [tensor[: model.vocabulary]]

    def join(self, hf_tensors: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        (tensor,) = hf_tensors
        rows, *other_dims = tensor.shape
        padding_rows = model.vocabulary_rows - rows
        if not padding_rows:
            return [tensor]
        return [tensor, tensor.new_zeros(padding_rows, *other_dims)]


@dataclass(frozen=True, eq=False, kw_only=True)
class QKVMapping(TensorMapping):
    """Fused ``linear_qkv``. See :class:`kha_megatron.model.qkv.QKVLayout`."""

    query: str
    key: str | None
    """None if key and value are the same state (GTA)."""
    value: str
    mechanism: str
    """HF name of the rows of a head mechanism, where ``{module}`` is its submodule."""

    def hf_names(self, model: ModelConfig) -> list[str]:
        names_by_part = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
        }
        for rows in model.qkv.mechanism_rows:
            names_by_part[rows.name] = self.mechanism.format(module=rows.hf)
        hf_names = []
        for part in model.qkv.parts:
            hf_name = names_by_part[part]
            assert hf_name is not None, f"{part} has no tensor"
            hf_names.append(hf_name)
        return hf_names

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        layout = model.qkv
        grouped = tensor.unflatten(0, (layout.groups, -1))  # [groups, rows per group, ...]
        hf_tensors = []
        for part in layout.parts.values():
            rows_in_groups = grouped[:, part.rows]
            hf_tensors.append(rows_in_groups.flatten(0, 1))
        return hf_tensors

    def join(self, hf_tensors: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        layout = model.qkv
        grouped_parts = []
        for hf_tensor in hf_tensors:
            grouped_parts.append(hf_tensor.unflatten(0, (layout.groups, -1)))
        padding_rows = layout.padding.stop - layout.padding.start
        if padding_rows:
            any_part = grouped_parts[0]
            _, _, *other_dims = any_part.shape
            padding = any_part.new_zeros(layout.groups, padding_rows, *other_dims)
            grouped_parts.insert(layout.parts_before_padding, padding)
        fused = torch.cat(grouped_parts, dim=1)
        return [fused.flatten(0, 1)]


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentHeadsMapping(TensorMapping):
    """KV up-projection of GLA, which has one HF weight per latent head."""

    hf: str
    """HF name, where ``{latent_head}`` is the index of a latent head."""

    def hf_names(self, model: ModelConfig) -> list[str]:
        names = []
        for head in range(model.latent_heads):
            names.append(self.hf.format(latent_head=head))
        return names


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMapping(TensorMapping):
    """Parameter of a head mechanism. The mechanism defines the names in both formats.

    Megatron stores matrices as ``[num_matrices, head_dim, head_dim]`` and multiplies from the
    right. In HF, each of them is a separate ``nn.Linear`` weight (so it is transposed). Input
    projections are flattened to two dimensions.
    """

    tensor: HeadTensor

    def hf_names(self, model: ModelConfig) -> list[str]:
        return list(self.tensor.hf_names)

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        if self.tensor.reads_input:
            return [tensor.flatten(0, -2)]
        return [tensor]

    def join(self, hf_tensors: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        if self.tensor.matrices:
            matrices = [weight.T for weight in hf_tensors]
            return [torch.stack(matrices)]
        (tensor,) = hf_tensors
        if self.tensor.reads_input:
            return [tensor.view(self.tensor.shape)]
        return [tensor]


@cache
def head_mapping(tensor: HeadTensor) -> HeadMapping:
    """Return the mapping of a parameter. Cached, because mappings are compared by identity."""
    return HeadMapping(
        megatron=tensor.key,
        shape=lambda model: tensor.shape,
        tensor=tensor,
    )


class TensorSlot(NamedTuple):
    """A mapping in a given layer (and expert). This is the unit of work in a conversion."""

    mapping: TensorMapping
    layer: int | None = None
    expert: int | None = None

    @property
    def layer_prefix(self) -> str:
        if self.layer is None:
            return ""
        return f"model.layers.{self.layer}."

    def names_in_layer(self, model: ModelConfig) -> list[str]:
        """HF names without ``model.layers.{i}.``."""
        names = self.mapping.hf_names(model)
        if self.expert is None:
            return names
        return [name.format(expert=self.expert) for name in names]

    def hf_names(self, model: ModelConfig) -> list[str]:
        """Full HF names, e.g. ``model.layers.0.mlp.gate_proj.weight``."""
        names = self.names_in_layer(model)
        return [self.layer_prefix + name for name in names]
