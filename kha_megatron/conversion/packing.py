"""How one Megatron tensor lies in memory, and the Hugging Face tensors that it holds.

One small class for each form, which goes both ways: the blocks of ``join(split(x))``, one below
the other, are ``x`` bit for bit. All of it works on meta tensors too, so that the shapes of a whole
conversion are known before it starts, and copies nothing but what is really interleaved.
Shape legend: ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``C`` hidden size, ``F``
features inside an MLP, ``V`` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.heads import HeadTensor


@dataclass(frozen=True)
class Packing:
    """Hugging Face tensors of one shape, one below the other; of one, the tensor as it is.

    ``[2 * F, C]`` of ``("gate", "up")`` is all of the gate, then all of the up projection.
    """

    name: str  # with {} for the parts
    parts: tuple[str, ...] = ("",)

    def names(self, model: Architecture) -> tuple[str, ...]:
        """The Hugging Face tensors that the Megatron tensor holds."""
        return tuple(self.name.format(part) for part in self.parts)

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """The tensors of :meth:`names`, in that order, from the Megatron tensor."""
        return list(tensor.chunk(len(self.names(model))))

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """The Megatron tensor from those of :meth:`names`, in blocks of its rows."""
        return list(parts)


@dataclass(frozen=True)
class Vocabulary(Packing):
    """``[V padded to a multiple, C]``: without the padding, which comes back as zeros."""

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """The rows of real entries."""
        return [tensor[: model.vocab_size]]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """The rows, and zeros below them."""
        missing = model.padded_vocab_size - parts[0].shape[0]
        padding = [parts[0].new_zeros(missing, *parts[0].shape[1:])] if missing else []
        return [parts[0], *padding]


@dataclass(frozen=True)
class QKVRows(Packing):
    """The rows of ``linear_qkv``, which lie as :class:`kha_megatron.model.qkv.QKVLayout` says."""

    def names(self, model: Architecture) -> tuple[str, ...]:
        """One for each part of a group's heads."""
        return tuple(self.name.format(part.hf) for part in model.qkv.parts.values())

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """``[heads * rows of one, ...]`` each, without what only fills a group up."""
        groups = tensor.unflatten(0, (model.qkv.groups, -1))
        return [groups[:, part.rows].flatten(0, 1) for part in model.qkv.parts.values()]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """One block, the heads of all parts interleaved again, and zeros filled in."""
        layout = model.qkv
        blocks = [part.unflatten(0, (layout.groups, -1)) for part in parts]
        if filling := layout.padding.stop - layout.padding.start:
            zeros = blocks[0].new_zeros(layout.groups, filling, *parts[0].shape[1:])
            blocks.insert(layout.parts_before_padding, zeros)
        return [torch.cat(blocks, dim=1).flatten(0, 1)]


@dataclass(frozen=True)
class LatentHeads(Packing):
    """``[H * rows, latent / c]``: what every head takes from its one of ``c`` latent heads.

    In MLA, where there is one, it is one tensor; in GLA one for each.
    """

    def names(self, model: Architecture) -> tuple[str, ...]:
        """One for each latent head, which has its number in the name, after a dot."""
        if model.latent_heads == 1:
            return (self.name.format(""),)
        return tuple(self.name.format(f".{head}") for head in range(model.latent_heads))


@dataclass(frozen=True, kw_only=True)
class HeadParameter(Packing):
    """A parameter of a mechanism of the heads: as it is; ``[n, D, D]``, ``x @ W``, stacked
    matrices that are an ``nn.Linear`` each there, and so transposed; or a projection of the input
    ``[heads, features, C]``, which is one ``nn.Linear`` there."""

    tensor: HeadTensor

    def names(self, model: Architecture) -> tuple[str, ...]:
        """One for each matrix, or one."""
        return self.tensor.hf_names

    def split(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Each matrix transposed; heads one below the other."""
        if self.tensor.matrices:
            return [matrix.T for matrix in tensor]
        return [tensor.flatten(0, -2) if self.tensor.reads_input else tensor]

    def join(self, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
        """One block, the matrices transposed and stacked again, the heads apart."""
        if self.tensor.matrices:
            return [torch.stack([part.T for part in parts])]
        return [parts[0].view(self.tensor.shape) if self.tensor.reads_input else parts[0]]
