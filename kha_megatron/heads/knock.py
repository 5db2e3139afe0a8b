"""Knocking heads (arXiv 2510.23052, section 3.2): matrices shared by all heads of a layer.

Shape legend: ``D`` head dim; ``n`` matrices of the variant (:data:`MATRICES`); ``H`` heads of the
knocked tensor; ``K`` input features of its projection; ``...`` any leading dimensions. The matrices
of one projected tensor are one stacked weight ``[n, D, D]``, applied from the right, ``x @ W``, as
in the paper. (``torch.nn.Linear`` has the transpose.)
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
"""Projections that can be knocked, in Megatron's order."""

MATRICES: Mapping[Variant, tuple[str, ...]] = MappingProxyType(
    {"linear": ("proj",), "mlp": ("up", "gate", "down"), "gate": ("gate",)}
)
"""Names of the ``[D, D]`` matrices of each variant, in stacking order."""

SAVED: Mapping[Variant, int] = MappingProxyType({"linear": 1, "mlp": 4, "gate": 3})
"""Tensors of the input's size that :func:`knock` keeps for backward: the input; for ``gate`` also
both factors; for ``mlp`` also both factors and their product."""

INITS: tuple[Init, ...] = get_args(Init)

FOLDS: tuple[Fold, ...] = get_args(Fold)


@dataclass(frozen=True, kw_only=True)
class KnockSettings:
    """Variants of the knocked projections. Fields of ``Knock`` and of ``KHAConfig``."""

    query: Variant | None = None
    """Variant for query heads, before QK-norm and RoPE."""
    key: Variant | None = None
    """Variant for key heads, before QK-norm and RoPE."""
    value: Variant | None = None
    """Variant for value heads."""
    init: Init = "identity"
    """``identity`` starts as a bit-exact no-op. ``random`` is an ablation, for which the paper
    reports much higher losses (section 3.3)."""
    init_seed: int = 1234
    """Seed of ``init="random"``, independent of the random state of a rank."""
    fold: Fold = field(default="auto", compare=False)
    """Whether Megatron folds linear matrices into the QKV weight during training
    (``kha_megatron.mcore.folding``). ``auto`` chooses by the size of the microbatch. Does not
    affect equality, and is not stored in checkpoints or exports."""

    def __post_init__(self) -> None:
        check_fields(self, "kha_")
        if self.fold == "always" and "linear" not in self.variants.values():
            raise ConfigError(
                f"kha_fold=always needs a linear variant to fold, got {self}. Set kha_fold=auto."
            )

    @property
    def variants(self) -> dict[Projection, Variant]:
        """The knocked projections and their variants."""
        return {p: v for p in PROJECTIONS if (v := getattr(self, p)) is not None}


@dataclass(frozen=True, kw_only=True)
class Knock(KnockSettings, Mechanism):
    """The matrices that all heads of a projected tensor share."""

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
    """The paper uses ``kha_mlp`` for MoE models, ``kha_linear`` for dense models and MLA (section
    4.3). ``kha_gate_v`` is the harmful ablation of Table 2."""

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Return ``knock_{projection}`` ``[n, D, D]`` per projection, applied as ``x @ W``."""
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
        """Count ``2 D^2`` per matrix and head (eq. 12: ``6 d^2 / n``), as applied to activations.

        Sigmoids and element-wise products are not counted, as in eq. 12 and in Megatron.
        """
        return sum(
            2 * sizes.dim(p) ** 2 * sizes.heads(p) * len(MATRICES[v])
            for p, v in self.variants.items()
        )

    def activations(self, sizes: HeadSizes) -> int:
        """Count what :func:`knock` keeps (:data:`SAVED`), without folding."""
        return sum(sizes.dim(p) * sizes.heads(p) * SAVED[v] for p, v in self.variants.items())

    @property
    def is_foldable(self) -> bool:
        """Whether all matrices are linear: QK-norm and RoPE come after the knock (eq. 8)."""
        return set(self.variants.values()) <= {"linear"}

    def projections_to_double(self) -> tuple[()]:
        """Return (), because the matrices start as the identity."""
        if self.init != "identity":
            raise ConfigError(f"{self} changes the outputs of a trained model. Set init=identity.")
        return ()

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        """Refuse nonlinear variants and ``fold=always`` on MLA and GLA (section 4.2.3)."""
        if not facts.multi_latent:
            return None
        if nonlinear := [f"{p}={v}" for p, v in self.variants.items() if v != "linear"]:
            return (
                f"Multi-latent attention supports only linear KHA, got {' '.join(nonlinear)}: at "
                "inference it does not compute queries, keys and values. Use linear."
            )
        if self.fold == "always":
            return "kha_fold=always does not support multi-latent attention. Set --kha-fold auto."
        return None

    def __str__(self) -> str:
        """Format for logs: ``query=linear key=linear``."""
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        return " ".join(words) or "nothing (baseline)"


def initial_values(variant: Variant, init: Init = "identity") -> tuple[InitialValue, ...]:
    """Return the initial values of a variant's matrices. Gates start at zero: ``2 * sigmoid(0) =
    1``."""
    if init == "random":
        return tuple("normal" for _ in MATRICES[variant])
    return tuple("zeros" if name == "gate" else "identity" for name in MATRICES[variant])


def module_name(matrix: str) -> str:
    """Return the name of a matrix in our transformers class: ``up_proj`` for ``up``."""
    return matrix if matrix == "proj" else f"{matrix}_proj"


def knock(x: "Tensor", weight: "Tensor", variant: Variant) -> "Tensor":
    """Apply the matrices that all heads share to every head.

    ==========  ==================================================================  =============
    ``linear``  ``x @ T``                                                           eq. 5-7
    ``mlp``     ``2 * ((x @ W_up) * sigmoid(x @ W_gate)) @ W_down``                 eq. 9
    ``gate``    ``2 * x * sigmoid(x @ W_gate)``                                     Table 2, "Gate"
    ==========  ==================================================================  =============

    Args:
        x: ``[..., D]``, any floating dtype, any strides.
        weight: ``[n, D, D]``, same dtype.
        variant: row of the table.

    Returns:
        ``[..., D]``, same dtype. With the identity as initial value, it equals ``x`` bit for bit:
        each product has one non-zero term and ``2 * sigmoid(0) == 1``.
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
    """Return the gradients of :func:`knock` for ``x`` and ``weight``, without autograd.

    Autograd does not record in a custom operator.

    Args:
        x: ``[..., D]``, the input of :func:`knock`.
        dy: ``[..., D]``, the gradient of its result.
        weight: ``[n, D, D]``.
        variant: as in :func:`knock`.

    Returns:
        ``[..., D]`` and ``[n, D, D]``, with the dtypes of ``x`` and ``weight``.
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
    """Return the sum over rows of their outer products, ``[D, D]``."""
    return rows.flatten(0, -2).mT @ others.flatten(0, -2)


def fold(
    projection: "Tensor", weight: "Tensor", *, head_rows: int | None = None, start: int = 0
) -> "Tensor":
    """Fold a ``linear`` knock into the projection before it: ``W' = W T`` (eq. 8).

    Computed in float64, one head at a time, and rounded once to the projection's dtype.

    In latent attention only some rows of a head are knocked. With ``n`` no-position features, a
    rotary part of ``r`` and values of ``v``, fold the matrices into the up-projections like this::

        query_up = fold(query_up, t_query, head_rows=n + r)
        key_value_up = fold(key_value_up, t_key, head_rows=n + v)
        key_value_up = fold(key_value_up, t_value, head_rows=n + v, start=n)

    Args:
        projection: ``[H * head_rows, K]`` weight or ``[H * head_rows]`` bias of a
            ``torch.nn.Linear``, heads outermost.
        weight: ``[1, D, D]``.
        head_rows: rows of one head; ``D`` if None.
        start: first of the ``D`` rows of a head that are knocked.

    Returns:
        Same shape and dtype as ``projection``. Rows that are not knocked keep their bits.
    """
    matrix = weight[0].double()
    folded = projection.clone().unflatten(0, (-1, head_rows or len(matrix)))
    for head in range(len(folded)):
        rows = folded[head, start : start + len(matrix)]
        rows.copy_(matrix.mT @ rows.double())
    return folded.flatten(0, 1)
