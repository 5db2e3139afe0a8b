"""Multi-head Explicit Attention, MEA (Peng et al. 2026, https://arxiv.org/abs/2601.19611).

Head-level linear composition (HLC) replaces the key and value heads by learned linear combinations
of all key and all value heads, with one matrix each. Head-level GroupNorm then normalizes the
attention output of each head::

    K'[j] = sum_i W_K[i, j] K[i]
    V'[j] = sum_i W_V[i, j] V[i]
    O[h]  = GroupNorm(softmax(Q[h] K'[g(h)]^T / sqrt(d)) V'[g(h)])

where ``g(h)`` is the KV head of query head ``h``. Use it as follows::

    kha-megatron launch laptop/dense --heads-from mea.py -- --kha-preset mea

We know the paper's abstract and a published summary of its formulas, but neither its full text nor
code of its authors. We chose these details:

- **GQA**: We combine the KV heads, before they are repeated for the query heads. The number of
  heads doesn't change, i.e. there are no "virtual heads".
- **Order**: We combine heads before QK-norm and RoPE. RoPE rotates all heads by the same angle, so
  it commutes with the combination. QK-norm doesn't.
- **KV cache**: It contains the combined heads, so it doesn't grow.
- **Initial value**: ``W_K`` and ``W_V`` are identity matrices, and the scale of the norm is one.
  Thus MEA without the norm starts with exactly the outputs of the baseline. The norm changes them.
- **GroupNorm**: It is an RMSNorm over the features of a head, as in Differential Transformer, with
  a scale for each feature of each head, no bias, and ``eps=1e-5``. It is computed in float32.
- **Weight decay**: It applies to all three parameters, because Megatron decays all 2D parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import Costs, HeadSizes, HeadTensor, Mechanism, Stage
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Mixed = Literal["key", "value"]
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ExplicitAttention(Mechanism):
    """Combine key heads and value heads, and normalize the output of each head."""

    name: ClassVar[str] = "mea"
    stages: ClassVar[tuple[Stage, ...]] = ("qkv", "output")
    presets: ClassVar = MappingProxyType({"mea": {}, "mea_no_norm": {"norm": False}})

    key: bool = True
    """Combine the key heads."""
    value: bool = True
    """Combine the value heads."""
    norm: bool = True
    """Normalize the attention output of each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.mixed or self.norm):
            raise ConfigError("At least one of mea.key, mea.value and mea.norm must be true.")

    @property
    def mixed(self) -> tuple[Mixed, ...]:
        names: tuple[Mixed, ...] = ("key", "value")
        return tuple(name for name in names if getattr(self, name))

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        heads = sizes.kv_heads
        matrices = tuple(
            HeadTensor(
                name=f"mea_{name}",
                shape=(heads, heads),
                gradient="whole",  # each rank combines all heads, see _combine
                heads=name,
                initial=("identity",),
                hf=f"mea_{name}",
            )
            for name in self.mixed
        )
        scale = HeadTensor(
            name="mea_norm",
            shape=(sizes.query_heads, sizes.dim("value")),
            gradient="heads",
            heads="query",
            initial=("ones",),
            hf="mea_norm",
            per_head=True,
        )
        return (*matrices, scale) if self.norm else matrices

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        if "output" in tensors:
            return {"output": _normalize(tensors["output"], weights["mea_norm"])}
        return {name: _combine(tensors[name], weights[f"mea_{name}"], ranks) for name in self.mixed}

    def acts_at(self, stage: Stage) -> bool:
        return self.norm if stage == "output" else stage == "qkv" and bool(self.mixed)

    def projections_to_double(self) -> tuple[()]:
        return super().projections_to_double() if self.norm else ()  # the norm raises ConfigError

    def costs(self, sizes: HeadSizes) -> Costs:
        combined = sum(sizes.kv_heads * sizes.dim(name) for name in self.mixed)
        normalized = sizes.query_heads * sizes.dim("value") if self.norm else 0
        return Costs(
            flops=2 * sizes.kv_heads * combined,
            activations=combined + 4 * normalized,  # two float32 tensors
        )


def _combine(x: "Tensor", weight: "Tensor", ranks: Ranks) -> "Tensor":
    """Compute ``y[..., j, :] = sum_i weight[i, j] * x[..., i, :]`` over all heads.

    Every rank gathers and combines all heads, then keeps its own. This repeats a small matmul, but
    it needs no reduction in the backward pass: all ranks compute the same gradient of ``weight``.
    If there are fewer KV heads than ranks, several ranks have a copy of the same head.
    """
    heads = ranks.all_heads(x.mT).mT
    copies = heads.shape[-2] // weight.shape[0]
    combined = weight.mT.to(x.dtype) @ heads[..., ::copies, :]
    own = ranks.own_heads(combined.repeat_interleave(copies, -2).mT).mT
    return own.contiguous()  # Megatron's unfused attention calls `view`


def _normalize(x: "Tensor", scale: "Tensor") -> "Tensor":
    """Apply RMSNorm to the features of each head."""
    import torch

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (wide * scale).to(x.dtype)
