"""Gated attention (https://arxiv.org/abs/2505.06708).

A gate computes ``Y * sigmoid(X W)`` or ``Y + sigmoid(X W)``, where ``X`` is the normalized layer
input and ``Y`` is the gated tensor (e.g. the attention output).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    Costs,
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
    Stage,
)
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Position = Literal["output", "value", "key", "query", "dense"]
Granularity = Literal["element", "head", "shared"]
Form = Literal["multiply", "add"]
Activation = Literal["sigmoid", "silu", "half_sigmoid"]

ALIASES: Mapping[str, Position] = MappingProxyType(
    {
        "g1": "output",
        "g2": "value",
        "g3": "key",
        "g4": "query",
        "g5": "dense",
    }
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
    """Gate the query heads (after KHA, but before QK-norm and RoPE)."""
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
            positions = ", ".join(get_args(Position))
            aliases = ", ".join(ALIASES)
            raise ConfigError(
                f"gate requires at least one position ({positions} or the "
                f"aliases {aliases}), e.g. gate.output=element."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the gate from a dict. Also accepts the paper's names (``g1`` to ``g5``)."""
        if not isinstance(values, Mapping):
            return super().from_dict(values)  # raises the error
        settings = {}
        for name, value in values.items():
            setting = ALIASES.get(name, name)
            if setting != name and setting in values:
                raise ConfigError(
                    f"You passed both gate.{setting} and its alias gate.{name}; use only one "
                    "of them."
                )
            settings[setting] = value
        return super().from_dict(settings)

    @property
    def positions(self) -> dict[Position, Granularity]:
        """Enabled gates and their granularity, in the order in which the gates are applied."""
        order: tuple[Position, ...] = (
            "query",
            "key",
            "value",
            "output",
            "dense",
        )
        positions = {}
        for position in order:
            granularity = getattr(self, position)
            if granularity is not None:
                positions[position] = granularity
        return positions

    @property
    def is_stock(self) -> bool:
        """Whether the output gate is equivalent to Megatron's ``--attention-output-gate``."""
        is_sigmoid = self.form == "multiply" and self.activation == "sigmoid"
        return self.output == "element" and is_sigmoid and self.reads_input

    def acts_at(self, stage: Stage) -> bool:
        if stage == "output":
            return self.output is not None
        if stage == "dense":
            return self.dense is not None
        qkv_gates = (self.query, self.key, self.value)
        has_qkv_gate = any(gate is not None for gate in qkv_gates)
        return stage == "qkv" and has_qkv_gate

    def _has_head_scores(self, position: Position) -> bool:
        """Whether each head has scores of its own."""
        return position != "dense" and self.positions[position] != "shared"

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Compute gates with per-head scores as part of ``linear_qkv``."""
        if not self.reads_input or sizes.latent:
            return ()
        rows: list[HeadRows] = []
        for position in self.positions:
            if not self._has_head_scores(position):
                continue
            rows_of_gate = HeadRows(
                name=_name(position),
                heads=_projection_with_same_heads(position),
                features=self._features(position, sizes),
                hf=_name(position),
                is_stock=position == "output" and self.is_stock,
            )
            if position == "output":  # same order as in Megatron
                rows.insert(0, rows_of_gate)
            else:
                rows.append(rows_of_gate)
        return tuple(rows)

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        names_of_rows = {rows.name for rows in self.rows(sizes)}
        tensors = []
        for position in self.positions:
            if _name(position) not in names_of_rows:
                tensors.append(self._tensor(position, sizes))
        return tuple(tensors)

    def _tensor(self, position: Position, sizes: HeadSizes) -> HeadTensor:
        shape: tuple[int, ...] = (self._features(position, sizes),)
        per_head = self._has_head_scores(position)
        if per_head:
            shape = (sizes.heads(_projection_with_same_heads(position)), *shape)
        if self.reads_input:
            shape = (*shape, sizes.hidden_size)
        return HeadTensor(
            name=_name(position),
            shape=shape,
            gradient="tokens" if position == "dense" else "heads",
            heads=_projection_with_same_heads(position),
            initial=("normal",) if self.reads_input else ("zeros",),
            hf=_name(position),
            per_head=per_head,
            reads_input=self.reads_input,
        )

    def _features(self, position: Position, sizes: HeadSizes) -> int:
        """Return the number of scores per head, or of all scores if heads share them."""
        if position == "dense":
            return sizes.hidden_size
        if self.positions[position] == "head":
            return 1
        return sizes.dim(_projection_with_same_dim(position))

    def apply(
        self,
        tensors: "Mapping[str, Tensor]",
        weights: "Mapping[str, Tensor]",
        ranks: Ranks,
    ) -> "dict[str, Tensor]":
        changed: dict[str, Tensor] = {}
        for position in self.positions:
            if position not in tensors:
                continue
            name = _name(position)
            logits = weights[name] if name in weights else tensors[name]
            score = activate(logits, self.activation)
            observe_gate(position, score.detach, ranks)
            changed[position] = gated(tensors[position], score, self.form)
        return changed

    def costs(self, sizes: HeadSizes) -> Costs:
        """Multiplicative gates save the gated tensor. All gates save their scores in float32, i.e.
        two 16-bit values each (four if we multiply by something other than a sigmoid)."""
        activations = 0
        sharded_activations = 0
        for position in self.positions:
            scores = self._features(position, sizes)
            if position == "dense":
                sharded_activations = self._activations(sizes.hidden_size, scores)
                continue
            heads = sizes.heads(_projection_with_same_heads(position))
            if self._has_head_scores(position):
                scores *= heads
            gated_features = heads * sizes.dim(_projection_with_same_dim(position))
            activations += self._activations(gated_features, scores)
        return Costs(
            flops=2 * self.parameters(sizes) if self.reads_input else 0,
            activations=activations,
            sharded_activations=sharded_activations,
        )

    def _activations(self, gated_features: int, scores: int) -> int:
        values_per_score = 2  # float32
        if self.form == "add":
            return values_per_score * scores
        if self.activation != "sigmoid":  # the scores before and after the activation
            values_per_score *= 2
        return gated_features + values_per_score * scores

    def projections_to_double(self) -> tuple[Projection | Literal["output"], ...]:
        """Return the projections whose weights `upcycle` doubles.

        With its initial weights, ``x * sigmoid(...)`` is ``x / 2``. The doubled weights cancel this
        exactly, except that ``x / 2`` can be rounded in float16 if it is subnormal."""
        if self.form == "multiply" and self.activation == "sigmoid":
            projections: list[Projection | Literal["output"]] = []
            for position in self.positions:
                projections.append("output" if position == "dense" else position)
            return tuple(projections)
        if self.form == "add" and self.activation == "silu":
            return ()
        raise ConfigError(
            f"{self} changes the outputs of a trained model. Use form=multiply with "
            "activation=sigmoid, or form=add with activation=silu."
        )

    @property
    def keeps_value_features(self) -> bool:
        return self.value is None and self.output is None

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
        if not facts.qk_norm or self.form != "multiply":
            return None
        for position in ("query", "key"):
            if getattr(self, position) == "head":
                return (
                    f"gate.{position}=head has no effect with QK-norm, because the norm cancels a "
                    f"scale per head. Use gate.{position}=element or remove --qk-layernorm."
                )
        return None


def _name(position: Position) -> str:
    """Return the name of the gate's scores, and of the parameter or rows that compute them."""
    return f"gate_{position}"


def _projection_with_same_heads(position: Position) -> Projection:
    """Return the projection that has as many heads as the gated tensor."""
    return position if position in ("key", "value") else "query"


def _projection_with_same_dim(position: Position) -> Projection:
    """Return the projection whose heads are as wide as those of the gated tensor."""
    return position if position in ("query", "key") else "value"


def activate(score: "Tensor", activation: Activation) -> "Tensor":
    import torch

    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if activation == "silu":
        return torch.nn.functional.silu(score)
    if activation == "half_sigmoid":
        return 0.5 + score.sigmoid() / 2
    return score.sigmoid()


def gated(x: "Tensor", score: "Tensor", form: Form) -> "Tensor":
    """Apply the scores and cast the result back to the dtype of ``x``."""
    changed = x * score if form == "multiply" else x + score
    return changed.to(x.dtype)


def observe_gate(
    position: str,
    score: "Callable[[], Tensor]",
    ranks: Ranks,
) -> None:
    """Log the mean gate score and the fraction of closed gates."""

    def mean_score() -> "Tensor":
        return score().mean()

    def closed_share() -> "Tensor":
        is_closed = score() < CLOSED_THRESHOLD
        return is_closed.float().mean()

    ranks.observe(f"gate-score/{position}", mean_score)
    ranks.observe(f"gate-shut/{position}", closed_share)
