"""Knocking heads (arXiv 2510.23052, section 3.2): matrices shared by all heads of a layer.

The ``n`` matrices of a projected tensor with head dim ``D`` are stacked in one weight ``[n, D, D]``
and, as in the paper, multiplied from the right (``x @ W``, the transpose of ``torch.nn.Linear``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadSizes,
    HeadTensor,
    InitialValue,
    Mechanism,
    Projection,
    check_fields,
)

if TYPE_CHECKING:
    from torch import Tensor

Variant = Literal["linear", "mlp", "gate"]
Init = Literal["identity", "random"]
Fold = Literal["auto", "always", "never"]

PROJECTIONS: tuple[Projection, ...] = ("query", "key", "value")

MATRICES: Mapping[Variant, tuple[str, ...]] = MappingProxyType(
    {"linear": ("proj",), "mlp": ("up", "gate", "down"), "gate": ("gate",)}
)
"""Names of the ``[D, D]`` matrices of each variant, in stacking order."""

SAVED: Mapping[Variant, int] = MappingProxyType({"linear": 1, "mlp": 4, "gate": 3})
"""Number of tensors of the input's size that autograd saves for :func:`knock`."""

INITS: tuple[Init, ...] = get_args(Init)

FOLDS: tuple[Fold, ...] = get_args(Fold)


@dataclass(frozen=True, kw_only=True)
class KnockSettings:
    """Settings of the knocked projections, shared by ``Knock`` and ``KHAConfig``."""

    query: Variant | None = None
    """Variant for query heads, before QK-norm and RoPE."""
    key: Variant | None = None
    """Variant for key heads, applied before QK-norm and RoPE."""
    value: Variant | None = None
    """Variant for value heads."""
    init: Init = "identity"
    """``identity`` is a bit-exact no-op at initialization. ``random`` is an ablation, for which the
    paper reports a much higher loss (section 3.3)."""
    init_seed: int = 1234
    fold: Fold = field(default="auto", compare=False)
    """Whether to fold linear matrices into the QKV weight during training (see
    ``kha_megatron.mcore.folding``). ``auto`` decides by microbatch size. This setting is not stored
    in checkpoints or exports and is ignored in comparisons."""

    def __post_init__(self) -> None:
        check_fields(self, "kha_")
        if self.fold == "always" and "linear" not in self.variants.values():
            raise ConfigError(
                f"kha_fold=always requires a linear variant, got {self}. Use kha_fold=auto instead."
            )

    @property
    def variants(self) -> dict[Projection, Variant]:
        return {p: v for p in PROJECTIONS if (v := getattr(self, p)) is not None}


@dataclass(frozen=True, kw_only=True)
class Knock(KnockSettings, Mechanism):
    """Matrices that are shared by all heads of a projected tensor."""

    name: ClassVar[str] = "knock"
    presets: ClassVar = MappingProxyType(
        {
            "baseline": {},
            "kha_mlp": {"value": "mlp"},
            "kha_linear": {"query": "linear", "key": "linear", "value": "linear"},
            "kha_linear_v": {"value": "linear"},
            "kha_gate_v": {"value": "gate"},
            "kha_mlp_qkv": {"query": "mlp", "key": "mlp", "value": "mlp"},
        }
    )
    """The paper uses ``kha_mlp`` for MoE models, and ``kha_linear`` for dense models and MLA
    (section 4.3). ``kha_gate_v`` is the harmful ablation of Table 2."""

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        return tuple(
            HeadTensor(
                name=f"knock_{projection}",
                shape=(len(MATRICES[variant]), sizes.dim(projection), sizes.dim(projection)),
                gradient="heads",
                heads=projection,
                initial=initial_values(variant, self.init),
                hf=f"{projection[0]}_knock",
                matrices=tuple(module_name(matrix) for matrix in MATRICES[variant]),
            )
            for projection, variant in self.variants.items()
        )

    def flops(self, sizes: HeadSizes) -> int:
        """Count ``2 D^2`` FLOPs per matrix and head (eq. 12: ``6 d^2 / n``), without folding. As in
        the paper and in Megatron, element-wise operations are not counted."""
        return sum(
            2 * sizes.dim(p) ** 2 * sizes.heads(p) * len(MATRICES[v])
            for p, v in self.variants.items()
        )

    def activations(self, sizes: HeadSizes) -> int:
        return sum(sizes.dim(p) * sizes.heads(p) * SAVED[v] for p, v in self.variants.items())

    @property
    def is_foldable(self) -> bool:
        return set(self.variants.values()) <= {"linear"}

    def projections_to_double(self) -> tuple[()]:
        if self.init != "identity":
            raise ConfigError(
                f"{self} changes the outputs of a trained model. Use init=identity instead."
            )
        return ()

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        if not facts.multi_latent:
            return None
        if nonlinear := [f"{p}={v}" for p, v in self.variants.items() if v != "linear"]:
            return (
                f"Multi-latent attention supports only linear KHA, got {' '.join(nonlinear)}. "
                "Since queries, keys and values are not materialized at inference, the matrices "
                "must be folded into the projections. Use linear instead."
            )
        if self.fold == "always":
            return "Multi-latent attention does not support kha_fold=always. Use --kha-fold auto."
        return None

    def __str__(self) -> str:
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        return " ".join(words) or "nothing (baseline)"


def initial_values(variant: Variant, init: Init = "identity") -> tuple[InitialValue, ...]:
    """Return the initialization of each matrix. Gates are zero, because ``2 * sigmoid(0) = 1``."""
    if init == "random":
        return tuple("normal" for _ in MATRICES[variant])
    return tuple("zeros" if name == "gate" else "identity" for name in MATRICES[variant])


def module_name(matrix: str) -> str:
    return matrix if matrix == "proj" else f"{matrix}_proj"


def knock(x: "Tensor", weight: "Tensor", variant: Variant) -> "Tensor":
    """Apply the shared matrices ``weight`` ``[n, D, D]`` to every head ``x`` ``[..., D]``.

    ==========  ==================================================================  =============
    ``linear``  ``x @ T``                                                           eq. 5-7
    ``mlp``     ``2 * ((x @ W_up) * sigmoid(x @ W_gate)) @ W_down``                 eq. 9
    ``gate``    ``2 * x * sigmoid(x @ W_gate)``                                     Table 2, "Gate"
    ==========  ==================================================================  =============

    At identity initialization the result equals ``x`` bit for bit, because each dot product has
    only one non-zero term and ``2 * sigmoid(0) == 1``.
    """
    if variant == "linear":
        return x @ weight[0]
    if variant == "gate":
        return 2 * x * (x @ weight[0]).sigmoid()
    up, gate, down = weight.unbind(0)
    return (2 * (x @ up) * (x @ gate).sigmoid()) @ down


def gradients(
    x: "Tensor", dy: "Tensor", weight: "Tensor", variant: Variant
) -> "tuple[Tensor, Tensor]":
    """Compute the gradients of :func:`knock` with respect to ``x`` and ``weight``.

    They are computed by hand because autograd does not record inside a custom operator. ``dy`` is
    the gradient of the output; see :func:`knock` for the other arguments.
    """
    import torch

    if variant == "linear":
        return dy @ weight[0].mT, _outer(x, dy)[None]
    if variant == "gate":
        factor = torch.sigmoid(x @ weight[0])
        d_gate = 2 * dy * x * factor * (1 - factor)
        return 2 * dy * factor + d_gate @ weight[0].mT, _outer(x, d_gate)[None]
    up, gate, down = weight.unbind(0)
    hidden, factor = x @ up, torch.sigmoid(x @ gate)
    d_hidden = dy @ down.mT
    d_up = 2 * d_hidden * factor
    d_gate = 2 * d_hidden * hidden * factor * (1 - factor)
    d_weight = _outer(x, d_up), _outer(x, d_gate), _outer(2 * hidden * factor, dy)
    return d_up @ up.mT + d_gate @ gate.mT, torch.stack(d_weight)


def _outer(rows: "Tensor", others: "Tensor") -> "Tensor":
    return rows.flatten(0, -2).mT @ others.flatten(0, -2)


def fold(
    projection: "Tensor", weight: "Tensor", *, head_rows: int | None = None, start: int = 0
) -> "Tensor":
    """Fold a ``linear`` matrix ``[1, D, D]`` into the preceding projection: ``W' = W T`` (eq. 8).

    The product is computed in float64 and then rounded to the projection's dtype. In latent
    attention, only ``D`` of the rows of each head are folded. With ``n`` no-position features,
    ``r`` rotary features and ``v`` value features, use::

        query_up = fold(query_up, t_query, head_rows=n + r)
        key_value_up = fold(key_value_up, t_key, head_rows=n + v)
        key_value_up = fold(key_value_up, t_value, head_rows=n + v, start=n)

    Args:
        projection: Weight ``[H * head_rows, K]`` or bias ``[H * head_rows]``, heads outermost.
        head_rows: Number of rows per head. Defaults to ``D``.
        start: Offset within each head of the ``D`` rows to fold. Other rows are unchanged.
    """
    matrix = weight[0].double()
    folded = projection.clone().unflatten(0, (-1, head_rows or len(matrix)))
    for head in range(len(folded)):
        rows = folded[head, start : start + len(matrix)]
        rows.copy_(matrix.mT @ rows.double())
    return folded.flatten(0, 1)
