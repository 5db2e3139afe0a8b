# kha_megatron.heads.gate of kha-megatron 0.1.0 (Apache-2.0)
"""Gated attention (https://arxiv.org/abs/2505.06708).

A gate computes ``Y * sigmoid(X W)`` or ``Y + sigmoid(X W)``, where ``X`` is the normalized layer
input and ``Y`` is the gated tensor (e.g. the attention output).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from .errors_kha import ConfigError
from .heads_mechanism_kha import (
    Costs,
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
    Stage,
)
from .heads_ranks_kha import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Position = Literal["output", "value", "key", "query", "dense"]
Granularity = Literal["element", "head", "shared"]
Form = Literal["multiply", "add"]
Activation = Literal["sigmoid", "silu", "half_sigmoid"]

ALIASES: Mapping[str, Position] = MappingProxyType(
    {"g1": "output", "g2": "value", "g3": "key", "g4": "query", "g5": "dense"}
)
"""The paper numbers the gate positions. We accept G1 to G5 as aliases, but use words elsewhere
because there are other numberings, too."""

CLOSED_THRESHOLD = 0.1
"""Scores below this threshold count as closed (see the ``gate-shut`` metric)."""


@dataclass(frozen=True, kw_only=True)
class Gate(Mechanism):
    """Learned gates on queries, keys, values or outputs.

    You can set gates at several positions at once. The granularity of each gate is ``element``
    (one score per feature of each head), ``head`` (one score per head) or ``shared`` (one score per
    feature, shared by all heads). For example, this is Megatron's ``--attention-output-gate``:

    >>> Gate(output="element")
    """

    name: ClassVar[str] = "gate"
    stages: ClassVar[tuple[Stage, ...]] = ("qkv", "output", "dense")
    presets: ClassVar = MappingProxyType(
        {
            "gate_output": {"output": "element"},
            "gate_output_head": {"output": "head"},
            "gate_value": {"value": "element"},
            "gate_value_head": {"value": "head"},
            "gate_key": {"key": "element"},
            "gate_query": {"query": "element"},
            "gate_dense": {"dense": "element"},
        }
    )

    output: Granularity | None = None
    """Gate the attention output of each head."""
    value: Granularity | None = None
    """Gate the value heads (after KHA)."""
    key: Granularity | None = None
    """Gate the key heads (after KHA, but before QK-norm and RoPE)."""
    query: Granularity | None = None
    """Same as ``key``, but for the query heads."""
    dense: Literal["element"] | None = None
    """Gate the output of the output projection."""
    form: Form = "multiply"
    """Whether to ``multiply`` by the scores or ``add`` them."""
    activation: Activation = "sigmoid"
    """``half_sigmoid`` is ``0.5 + sigmoid / 2`` (the non-sparse gate in the paper)."""
    reads_input: bool = True
    """Set to False to use a learned parameter instead of ``X W`` (input-independent gate)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.positions:
            raise ConfigError(
                f"gate requires at least one position ({', '.join(get_args(Position))} or the "
                f"aliases {', '.join(ALIASES)}), e.g. gate.output=element."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the gate from a dict. Also accepts the paper's names (``g1`` to ``g5``)."""
        if not isinstance(values, Mapping):
            return super().from_dict(values)  # raises the error
        for name in ALIASES.keys() & values:
            if ALIASES[name] in values:
                raise ConfigError(
                    f"You passed both gate.{ALIASES[name]} and its alias gate.{name}; use only one "
                    "of them."
                )
        return super().from_dict({ALIASES.get(name, name): v for name, v in values.items()})

    @property
    def positions(self) -> dict[Position, Granularity]:
        """Enabled gates and their granularity, in the order in which the gates are applied."""
        order: tuple[Position, ...] = ("query", "key", "value", "output", "dense")
        return {p: found for p in order if (found := getattr(self, p)) is not None}

    @property
    def is_stock(self) -> bool:
        """Whether the output gate is equivalent to Megatron's ``--attention-output-gate``."""
        here = self.output, self.form, self.activation, self.reads_input
        return here == ("element", "multiply", "sigmoid", True)

    def acts_at(self, stage: Stage) -> bool:
        at: Mapping[Position, Stage] = {"output": "output", "dense": "dense"}
        return stage in {at.get(position, "qkv") for position in self.positions}

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Compute gates with per-head scores as part of ``linear_qkv``."""
        if not self.reads_input or sizes.latent:
            return ()
        # same order as in Megatron, where the output gate is first
        order = sorted(self.positions.items(), key=lambda item: item[0] != "output")
        return tuple(
            HeadRows(
                name=_name(position),
                heads=_heads(position),
                features=sizes.dim(_features(position)) if granularity == "element" else 1,
                hf=_name(position),
                is_stock=position == "output" and self.is_stock,
            )
            for position, granularity in order
            if position != "dense" and granularity != "shared"
        )

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        named = {row.name for row in self.rows(sizes)}
        return tuple(
            self._tensor(position, granularity, sizes)
            for position, granularity in self.positions.items()
            if _name(position) not in named
        )

    def _tensor(self, position: Position, granularity: Granularity, sizes: HeadSizes) -> HeadTensor:
        heads, per_head = _heads(position), position != "dense" and granularity != "shared"
        features = 1 if granularity == "head" else sizes.dim(_features(position))
        if position == "dense":
            features = sizes.hidden_size
        shape = (sizes.heads(heads), features) if per_head else (features,)
        return HeadTensor(
            name=_name(position),
            shape=(*shape, sizes.hidden_size) if self.reads_input else shape,
            gradient="tokens" if position == "dense" else "heads",
            heads=heads,
            initial=("normal",) if self.reads_input else ("zeros",),
            hf=_name(position),
            per_head=per_head,
            reads_input=self.reads_input,
        )

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        changed: dict[str, Tensor] = {}
        for position in self.positions:
            if position in tensors:
                name = _name(position)
                score = weights[name] if name in weights else tensors[name]
                score = activate(score, self.activation)
                observe_gate(position, score.detach, ranks)
                changed[position] = gated(tensors[position], score, self.form)
        return changed

    def costs(self, sizes: HeadSizes) -> Costs:
        """Multiplicative gates save the gated tensor. All gates save their scores in float32, i.e.
        two 16-bit values each (four if we multiply by something other than a sigmoid)."""
        total, hidden = 0, sizes.hidden_size
        for position, granularity in self.positions.items():
            if position != "dense":
                heads, dim = sizes.heads(_heads(position)), sizes.dim(_features(position))
                score = {"element": heads * dim, "head": heads, "shared": dim}[granularity]
                total += self._activations(heads * dim, score)
        return Costs(
            flops=2 * self.parameters(sizes) if self.reads_input else 0,
            activations=total,
            sharded_activations=self._activations(hidden, hidden) if self.dense else 0,
        )

    def _activations(self, size: int, score: int) -> int:
        multiplied = self.form == "multiply"
        scores = 1 + (multiplied and self.activation != "sigmoid")
        return size * multiplied + 2 * score * scores

    def projections_to_double(self) -> tuple[Projection | Literal["output"], ...]:
        """Return the projections whose weights `upcycle` doubles.

        With its initial weights, ``x * sigmoid(...)`` is ``x / 2``. The doubled weights cancel this
        exactly, except that ``x / 2`` can be rounded in float16 if it is subnormal."""
        if (self.form, self.activation) == ("multiply", "sigmoid"):
            return tuple("output" if p == "dense" else p for p in self.positions)
        if (self.form, self.activation) == ("add", "silu"):
            return ()
        raise ConfigError(
            f"{self} changes the outputs of a trained model. Use form=multiply with "
            "activation=sigmoid, or form=add with activation=silu."
        )

    def setting_of(self, projection: Projection) -> str | None:
        return f"gate.{projection}" if projection in self.positions else None

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        if facts.attention:
            return super().unsupported_reason(facts)
        if facts.multi_latent and set(self.positions) != {"output"}:
            return (
                f"Multi-latent attention supports only gate.output, got {self}. Queries, keys and "
                "values are not materialized at inference. Please remove the other positions."
            )
        scaled = [p for p in ("query", "key") if self.positions.get(p) == "head"]
        if facts.qk_norm and scaled and self.form == "multiply":
            return (
                f"gate.{scaled[0]}=head has no effect with QK-norm, because the norm cancels a "
                f"scale per head. Use gate.{scaled[0]}=element or remove --qk-layernorm."
            )
        return None


def _name(position: Position) -> str:
    return f"gate_{position}"


def _heads(position: Position) -> Projection:
    return position if position in ("key", "value") else "query"


def _features(position: Position) -> Projection:
    return position if position in ("query", "key") else "value"


def activate(score: "Tensor", activation: Activation) -> "Tensor":
    import torch

    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if activation == "silu":
        return torch.nn.functional.silu(score)
    return 0.5 + score.sigmoid() / 2 if activation == "half_sigmoid" else score.sigmoid()


def gated(x: "Tensor", score: "Tensor", form: Form) -> "Tensor":
    """Apply the scores and cast the result back to the dtype of ``x``."""
    return (x * score if form == "multiply" else x + score).to(x.dtype)


def observe_gate(position: str, score: "Callable[[], Tensor]", ranks: Ranks) -> None:
    """Log the mean gate score and the fraction of closed gates."""
    ranks.observe(f"gate-score/{position}", lambda: score().mean())
    ranks.observe(f"gate-shut/{position}", lambda: (score() < CLOSED_THRESHOLD).float().mean())
