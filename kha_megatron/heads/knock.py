"""Knocking-Heads Attention (https://arxiv.org/abs/2510.23052, section 3.2).

KHA multiplies the query, key or value heads by small matrices that all heads of a layer share. The
matrices for one projection are stored as a single weight of shape
[num_matrices, head_dim, head_dim]. Note that we compute ``x @ W`` like the paper, i.e. not
``x @ W.T`` like ``torch.nn.Linear``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    Costs,
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

PROJECTIONS: tuple[Projection, ...] = ("query", "key", "value")

MATRICES: Mapping[Variant, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("proj",),
        "mlp": ("up", "gate", "down"),
        "gate": ("gate",),
    }
)
"""Names of each variant's matrices, in stacking order."""

SAVED: Mapping[Variant, int] = MappingProxyType({"linear": 1, "mlp": 4, "gate": 3})
"""How many input-sized tensors autograd saves in :func:`knock`."""

INITS: tuple[Init, ...] = get_args(Init)


@dataclass(frozen=True, kw_only=True)
class Knock(Mechanism):
    """KHA itself: matrices shared by all heads."""

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
    (section 4.3). ``kha_gate_v`` is only here to reproduce the (harmful) ablation in Table 2."""

    query: Variant | None = None
    """KHA variant for queries (applied before QK-norm and RoPE)."""
    key: Variant | None = None
    """KHA variant for keys (applied before QK-norm and RoPE)."""
    value: Variant | None = None
    """KHA variant for values."""
    init: Init = "identity"
    """With ``identity``, KHA does not change the model at initialization (bit-exact). ``random`` is
    meant for ablations only; the paper reports a much higher loss (section 3.3)."""

    def __post_init__(self) -> None:
        check_fields(self, "kha_")
        if self.variants:
            return
        if self.init != "identity":
            raise ConfigError(
                f"kha_init={self.init} initializes only the matrices of KHA, but no KHA variant is "
                "enabled. Remove kha_init, or set e.g. kha_value=mlp."
            )
        raise ConfigError(
            "KHA requires a variant for at least one of query, key and value, e.g. value=mlp."
        )

    @property
    def variants(self) -> dict[Projection, Variant]:
        variants = {}
        for projection in PROJECTIONS:
            variant = getattr(self, projection)
            if variant is not None:
                variants[projection] = variant
        return variants

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        tensors = []
        for projection, variant in self.variants.items():
            dim = sizes.dim(projection)
            matrices = MATRICES[variant]
            stacked_matrices = HeadTensor(
                name=f"knock_{projection}",
                shape=(len(matrices), dim, dim),
                gradient="heads",
                heads=projection,
                initial=initial_values(variant, self.init),
                hf=f"{projection[0]}_knock",  # e.g. v_knock
                matrices=tuple(map(module_name, matrices)),
            )
            tensors.append(stacked_matrices)
        return tuple(tensors)

    def costs(self, sizes: HeadSizes) -> Costs:
        """Count ``2 * head_dim**2`` FLOPs per matrix and head (eq. 12).

        We ignore element-wise operations, like the paper and Megatron.
        """
        flops = 0
        activations = 0
        for projection, variant in self.variants.items():
            dim = sizes.dim(projection)
            heads = sizes.heads(projection)
            matrices = len(MATRICES[variant])
            flops_per_matrix = 2 * dim**2
            flops += heads * matrices * flops_per_matrix
            activations += heads * dim * SAVED[variant]
        return Costs(flops=flops, activations=activations)

    def setting_of(self, projection: Projection) -> str | None:
        return f"--kha-{projection}" if projection in self.variants else None

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
        nonlinear = []
        for projection, variant in self.variants.items():
            if variant != "linear":
                nonlinear.append(f"{projection}={variant}")
        if nonlinear:
            return (
                f"Multi-latent attention supports only linear KHA, got {' '.join(nonlinear)}. "
                "Since queries, keys and values are not materialized at inference, the matrices "
                "must be folded into the projections. Use linear instead."
            )
        return None

    def __str__(self) -> str:
        settings = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if self.init != "identity":
            settings.append(f"init={self.init}")
        return " ".join(settings)


def initial_values(
    variant: Variant,
    init: Init = "identity",
) -> tuple[InitialValue, ...]:
    """Return how to initialize each matrix. Gates start at zero since ``2 * sigmoid(0) = 1``."""
    values: list[InitialValue] = []
    for matrix in MATRICES[variant]:
        if init == "random":
            values.append("normal")
        elif matrix == "gate":
            values.append("zeros")
        else:
            values.append("identity")
    return tuple(values)


def module_name(matrix: str) -> str:
    """Return the name of a matrix in our Hugging Face model, e.g. ``up_proj``."""
    return matrix if matrix == "proj" else f"{matrix}_proj"


def knock(
    x: "Tensor",
    weight: "Tensor",
    variant: Variant,
) -> "Tensor":
    """Apply KHA to every head.

    - ``linear``: ``x @ W`` (eq. 5-7)
    - ``mlp``: ``2 * ((x @ W_up) * sigmoid(x @ W_gate)) @ W_down`` (eq. 9)
    - ``gate``: ``2 * x * sigmoid(x @ W_gate)`` ("Gate" in Table 2)

    At identity initialization the output is bit-identical to ``x``, because every dot product has
    only one non-zero term and ``2 * sigmoid(0) == 1``.

    Args:
        x (Tensor): Heads of shape [..., head_dim].
        weight (Tensor): Stacked matrices of shape [num_matrices, head_dim, head_dim].
    """
    # indexing would fill a tensor with zeros in the backward pass, and copy the gradient into it
    if variant == "linear":
        return x @ weight.squeeze(0)
    if variant == "gate":
        factor = (x @ weight.squeeze(0)).sigmoid()
        return 2 * x * factor
    up, gate, down = weight.unbind(0)
    hidden = 2 * (x @ up) * (x @ gate).sigmoid()
    return hidden @ down


def gradients(
    x: "Tensor",
    dy: "Tensor",
    weight: "Tensor",
    variant: Variant,
) -> "tuple[Tensor, Tensor]":
    """Backward pass of :func:`knock`. Returns the gradients of ``x`` and ``weight``.

    Below, ``d_up`` and ``d_gate`` are the gradients of ``x @ W_up`` and ``x @ W_gate``. We cannot
    use autograd for this, because it does not record inside a custom operator.
    """
    import torch

    if variant == "linear":
        proj = weight[0]
        return dy @ proj.mT, _outer(x, dy)[None]
    if variant == "gate":
        gate = weight[0]
        factor = torch.sigmoid(x @ gate)
        d_gate = 2 * dy * x * factor * (1 - factor)
        d_gate_matrix = _outer(x, d_gate)
        dx = 2 * dy * factor + d_gate @ gate.mT
        return dx, d_gate_matrix[None]
    up, gate, down = weight.unbind(0)
    hidden = x @ up
    factor = torch.sigmoid(x @ gate)
    d_hidden = dy @ down.mT
    d_up = 2 * d_hidden * factor
    d_gate = 2 * d_hidden * hidden * factor * (1 - factor)
    dx = d_up @ up.mT + d_gate @ gate.mT
    d_matrices = [
        _outer(x, d_up),
        _outer(x, d_gate),
        _outer(2 * hidden * factor, dy),
    ]
    return dx, torch.stack(d_matrices)


def _outer(inputs: "Tensor", gradients: "Tensor") -> "Tensor":
    """Sum the outer products of the inputs and gradients of a matmul."""
    return inputs.flatten(0, -2).mT @ gradients.flatten(0, -2)


def fold(
    projection: "Tensor",
    weight: "Tensor",
    *,
    head_rows: int | None = None,
    start: int = 0,
) -> "Tensor":
    """Fold a KHA-Linear matrix into the preceding projection (eq. 8), computed in float64.

    In MLA, only some rows of each head are folded. E.g. ``linear_kv_up_proj`` has ``n`` key rows
    (without RoPE) and ``v`` value rows per head::

        kv_up = fold(kv_up, key_matrix, head_rows=n + v)
        kv_up = fold(kv_up, value_matrix, head_rows=n + v, start=n)

    Args:
        projection (Tensor): Weight of shape [num_heads * head_rows, in_features], or its bias.
        weight (Tensor): KHA weight of shape [1, head_dim, head_dim].
        head_rows (int, optional): Number of rows per head, if larger than ``head_dim``.
        start (int): First row to fold within each head.
    """
    matrix = weight[0].double()
    stop = start + len(matrix)
    head_rows = head_rows or len(matrix)
    folded = projection.clone().unflatten(0, (-1, head_rows))
    for head in range(len(folded)):
        rows = folded[head, start:stop]
        rows.copy_(matrix.mT @ rows.double())
    return folded.flatten(0, 1)
