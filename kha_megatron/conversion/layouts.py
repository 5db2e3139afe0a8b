"""How one Megatron tensor lies in memory, and the Hugging Face tensors that it holds.

One small class for each layout. Shape legend: ``H`` query heads, ``G`` key/value heads, ``D`` head
dim, ``C`` hidden size, ``F`` features inside an MLP, ``E`` experts, ``V`` vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kha_megatron.config import MATRICES, Projection, Variant
from kha_megatron.conversion.hf_reader import knock_name
from kha_megatron.hf import KHAModelConfig

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Same:
    """The tensor as it is."""

    name: str

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        yield self.name, tensor


@dataclass(frozen=True)
class Vocabulary:
    """``[V padded to a multiple, C]``: without the padding."""

    name: str

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        yield self.name, tensor[: config.vocab_size]


@dataclass(frozen=True)
class InterleavedQKV:
    """``[G * (H/G + 2) * D, ...]``: per key/value head its query heads, then the key, the value."""

    name: str  # with {} for q, k and v

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        groups, heads = config.num_key_value_heads, config.num_attention_heads
        blocks = tensor.view(groups, heads // groups + 2, config.head_dim, *tensor.shape[1:])
        for letter, part in zip(
            "qkv", (blocks[:, :-2], blocks[:, -2:-1], blocks[:, -1:]), strict=True
        ):
            yield self.name.format(letter), part.reshape(-1, *tensor.shape[1:])


@dataclass(frozen=True)
class GateUp:
    """``[2 * F, C]``: all of the gate, then all of the up projection."""

    name: str  # with {} for gate and up

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        for word, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield self.name.format(word), part


@dataclass(frozen=True)
class Experts:
    """``[E, ...]``: one expert after the other, each in its own layout."""

    prefix: str  # with {} for the expert's number
    each: Same | GateUp

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        for number, expert in enumerate(tensor):
            for name, part in self.each.to_hf(expert, config):
                yield self.prefix.format(number) + name, part


@dataclass(frozen=True)
class SharedMatrices:
    """``[n, D, D]``, ``x @ W``: the stacked head-shared matrices, each an ``nn.Linear`` there."""

    projection: Projection

    def to_hf(self, tensor: Tensor, config: KHAModelConfig) -> Named:
        """Yield the Hugging Face tensors that ``tensor`` holds, by name."""
        variant: Variant = config.kha.variants[self.projection]
        for matrix, weight in zip(MATRICES[variant], tensor, strict=True):
            yield f"self_attn.{knock_name(self.projection, matrix)}", weight.T


Layout = Same | Vocabulary | InterleavedQKV | GateUp | Experts | SharedMatrices
