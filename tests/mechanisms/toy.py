"""A mechanism from outside the package: mix the value heads, then scale the output by the input.

With ``V`` of shape [kv_heads, head_dim], ``M`` of shape [kv_heads, head_dim] (one row per head) and
``s`` of shape [head_dim] (shared by all heads)::

    V <- V + tanh(M * V) * s
    O <- O * (1 + X W)

where ``X W`` is one number per token, which all heads share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from kha_megatron.heads.mechanism import HeadSizes, HeadTensor, Mechanism, Stage
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Toy(Mechanism):
    """Two additions to attention that start as the identity."""

    name: ClassVar[str] = "toy"
    stages: ClassVar[tuple[Stage, ...]] = ("qkv", "output")
    presets: ClassVar = MappingProxyType({"toy": {}, "toy_strong": {"strength": 2.0}})

    strength: float = 1.0
    """Factor of the added values."""

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        dim = sizes.dim("value")
        return (
            HeadTensor(
                name="toy_mix",
                shape=(sizes.kv_heads, dim),
                gradient="heads",
                heads="value",
                initial=("ones",),
                hf="toy_mix",
                per_head=True,
            ),
            HeadTensor(
                name="toy_scale", shape=(dim,), gradient="heads", heads="value", hf="toy_scale"
            ),
            HeadTensor(
                name="toy_score",
                shape=(1, sizes.hidden_size),
                gradient="heads",
                heads="query",
                initial=("zeros",),
                hf="toy_score",
                reads_input=True,
            ),
        )

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        if "output" in tensors:
            return {"output": tensors["output"] * (1 + tensors["toy_score"])}
        value = tensors["value"]
        mixed = (weights["toy_mix"] * value).tanh() * weights["toy_scale"]
        return {"value": value + self.strength * mixed}

    def projections_to_double(self) -> tuple[()]:
        return ()

    def flops(self, sizes: HeadSizes) -> int:
        return 2 * sizes.hidden_size

    def activations(self, sizes: HeadSizes) -> int:
        dim = sizes.dim("value")
        return 3 * sizes.kv_heads * dim + sizes.query_heads * dim
