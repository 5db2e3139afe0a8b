"""Base class of head mechanisms, and dataclasses that describe their parameters."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from kha_megatron.errors import ConfigError
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Projection = Literal["query", "key", "value"]
Gradient = Literal["heads", "tokens", "whole"]
"""See :attr:`HeadTensor.gradient`."""
InitialValue = Literal["zeros", "ones", "identity", "blocks", "normal"] | Callable[[Any], Any]
"""See :attr:`HeadTensor.initial`."""
Stage = Literal["qkv", "core", "output", "dense"]
"""See :attr:`Mechanism.stages`."""


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Head counts and dimensions of an attention layer (either global or on one TP rank)."""

    query_heads: int
    kv_heads: int  # same as query_heads for MLA and GLA
    head_dim: int  # excluding the rotary part for MLA and GLA
    value_dim: int | None = None  # defaults to head_dim
    hidden_size: int = 0  # not needed to get tensor names
    latent: bool = False  # MLA or GLA (no joint QKV projection)

    def heads(self, projection: Projection) -> int:
        return self.query_heads if projection == "query" else self.kv_heads

    def dim(self, projection: Projection) -> int:
        if projection == "value" and self.value_dim:
            return self.value_dim
        return self.head_dim

    def on_rank(self, tp: int) -> Self:
        """Divide the head counts by the TP size, with at least one head per rank."""
        return replace(
            self,
            query_heads=max(1, self.query_heads // tp),
            kv_heads=max(1, self.kv_heads // tp),
        )


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """Model properties that decide whether a mechanism is supported."""

    multi_latent: bool = False
    attention: str | None = None  # HeadsConfig.attention
    qk_norm: bool = False
    flash_decode: bool = False
    rotary_features: int = 0  # number of features per head with RoPE
    predictions: int = 0  # number of MTP layers
    layers: int = 0  # 0 if unknown
    query_heads: int = 0  # 0 if unknown
    scales_queries: bool = False  # whether folding changes the norm of the queries


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """A parameter that a mechanism adds to an attention layer."""

    name: str
    """Attribute of Megatron's attention module that owns the weight, e.g. ``knock_value``."""
    shape: tuple[int, ...]  # global, i.e. before TP sharding
    gradient: Gradient
    """What a TP rank has after backward: a partial sum over its ``heads``, a partial sum over its
    ``tokens`` (with sequence parallelism), or the ``whole`` gradient. For parameters with
    ``reads_input``, this is about the gradient of the projection's output."""
    heads: Projection  # which heads use the parameter
    initial: tuple[InitialValue, ...] = ("zeros",)  # or one entry per matrix
    """``normal`` samples from a seed of its own. You can also pass a function of a module, which
    fills a tensor in place and does not depend on the random state."""
    hf: str  # submodule of self_attn in our Hugging Face model
    matrices: tuple[str, ...] = ()
    """Names of the ``nn.Linear`` modules under ``hf``, if the parameter stacks several matrices.
    Note that ``nn.Linear`` stores them transposed."""
    per_head: bool = False  # whether dim 0 is sharded along with the heads
    reads_input: bool = False
    """Whether this is a projection of the normalized layer input. :meth:`Mechanism.apply` then gets
    the output of the projection, not the weight. The output has shape
    [..., local_heads, features] with ``per_head`` (``shape`` is then (heads, features,
    hidden_size)), else [..., 1, features] for the gradient ``heads`` and [..., features] for
    ``whole`` and ``tokens``."""

    @property
    def key(self) -> str:
        """Megatron checkpoint key, relative to ``decoder.layers.{layer}.``"""
        return f"self_attention.{self.name}.weight"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Hugging Face checkpoint keys, relative to ``model.layers.{layer}.``"""
        module = f"self_attn.{self.hf}"
        if not self.matrices:
            return (f"{module}.weight",)
        return tuple(f"{module}.{matrix}.weight" for matrix in self.matrices)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def ranks(self, tp: int) -> int:
        """Return the number of TP ranks that the parameter is sharded over (1 if replicated)."""
        is_sharded = self.per_head and self.shape[0] % tp == 0
        return tp if is_sharded else 1


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Extra rows of ``linear_qkv``, next to the query, key and value rows.

    They are sharded and stored with their KV head (see ``model.qkv.QKVLayout``).
    :meth:`Mechanism.apply` gets the output as a tensor of shape [..., num_heads, features].
    """

    name: str  # key in the tensors passed to Mechanism.apply
    heads: Projection
    features: int  # rows per head
    hf: str  # submodule of self_attn in our Hugging Face model
    is_stock: bool = False  # same as Megatron's --attention-output-gate

    def size(self, sizes: HeadSizes) -> int:
        return sizes.heads(self.heads) * self.features * sizes.hidden_size


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a mechanism adds to one layer. FLOPs are those of matmuls in the forward pass."""

    flops: int = 0  # per token
    pair_flops: int = 0  # per query-key pair, summed over heads
    skippable_flops: int = 0  # per token, of inactive heads (which kernels do not skip)
    skippable_pair_flops: int = 0
    activations: int = 0
    """16-bit values saved for backward per token, without recomputation."""
    sharded_activations: int = 0  # those sharded by sequence parallelism
    pair_activations: int = 0  # per query-key pair

    def __add__(self, other: "Costs") -> "Costs":
        total = {}
        for field in fields(self):
            total[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return Costs(**total)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base class of head mechanisms.

    Subclasses are frozen dataclasses with JSON-serializable fields. Users can set every field with
    ``--heads NAME.FIELD=VALUE``. A new mechanism usually implements :meth:`tensors` and
    :meth:`apply`; override the other methods as needed.
    """

    name: ClassVar[str]  # as in --heads NAME.FIELD=VALUE
    stages: ClassVar[tuple[Stage, ...]] = ("qkv",)
    """When to call :meth:`apply`: after the QKV split and before QK-norm (``qkv``), after core
    attention (``output``), or after the output projection (``dense``). With the stage ``core``,
    :meth:`attend` replaces core attention, and no fused kernel can be used."""
    is_sparse: ClassVar[bool] = False
    """Whether tokens use only a subset of the heads (so upcycling changes the outputs)."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # from JSON
                object.__setattr__(self, field.name, tuple(value))
        check_fields(self, f"{self.name}.")

    def for_layer(self, layer: int) -> Self:
        """Return the settings for one layer (0-based), in case they differ between layers."""
        return self

    @property
    def own_projections(self) -> Mapping[Projection, int]:
        """Projections that the mechanism computes itself instead of ``linear_qkv``, and their size.

        All heads share the output of the parameter ``{name}_{projection}``.
        """
        return {}

    def acts_at(self, stage: Stage) -> bool:
        return stage in self.stages

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        return ()

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Return the extra rows of ``linear_qkv``."""
        return ()

    def apply(
        self,
        tensors: "Mapping[str, Tensor]",
        weights: "Mapping[str, Tensor]",
        ranks: Ranks,
    ) -> "dict[str, Tensor]":
        """Apply the mechanism. Does nothing by default.

        Args:
            tensors (Mapping[str, Tensor]): ``query``, ``key`` and ``value`` (after the QKV split)
                or ``output`` (after core attention), with local heads of shape
                [..., num_heads, head_dim], or ``dense`` of shape [..., hidden_size]. Also contains
                the outputs of earlier stages, of :meth:`rows` and of parameters with
                ``reads_input``.
            weights (Mapping[str, Tensor]): All other parameters. ``per_head`` parameters are
                sharded.
            ranks (Ranks): Collectives across the ranks with the other heads and tokens.

        Returns:
            dict[str, Tensor]: New values for some of the tensors, and anything that later stages
                need.
        """
        return {}

    def mix_logits(
        self,
        logits: "Tensor",
        weights: "Mapping[str, Tensor]",
    ) -> "Tensor":
        """Change the attention logits of all heads, before masking (stage ``core`` only).

        Args:
            logits (Tensor): Shape [batch, num_heads, query_len, key_len].
        """
        return logits

    def mix_scores(
        self,
        scores: "Tensor",
        weights: "Mapping[str, Tensor]",
    ) -> "Tensor":
        """Like :meth:`mix_logits`, for the attention weights after the softmax."""
        return scores

    def attend(
        self,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        weights: "Mapping[str, Tensor]",
        *,
        scale: float,
        mask: "Tensor | None" = None,
        dropout: "Callable[[Tensor], Tensor] | None" = None,
    ) -> "tuple[Tensor, Tensor]":
        """Compute scaled dot-product attention of all heads (stage ``core`` only).

        The softmax is computed in float32 or higher. If :meth:`mix_logits` and :meth:`mix_scores`
        change nothing, this is bit-identical to Megatron's unfused attention.

        Args:
            query (Tensor): Shape [batch, num_heads, query_len, head_dim], with all heads of the
                layer.
            key (Tensor): Shape [batch, num_kv_heads, key_len, head_dim].
            value (Tensor): Shape [batch, num_kv_heads, key_len, value_dim].
            weights (Mapping[str, Tensor]): All parameters.
            mask (Tensor, optional): Boolean (True means masked) or additive mask, broadcastable to
                [batch, num_heads, query_len, key_len]. It is applied after mixing, since
                ``-inf * 0`` is NaN. Queries with all keys masked attend to all of them equally.

        Returns:
            tuple[Tensor, Tensor]: Output and attention weights (before dropout).
        """
        import torch

        heads_per_group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(heads_per_group, 1)
        value = value.repeat_interleave(heads_per_group, 1)
        batch_and_heads = query.shape[:2]
        # same matmul as in Megatron's attention, so that results are bit-identical
        logits = torch.baddbmm(
            query.new_empty(1, 1, 1),
            query.flatten(0, 1),
            key.flatten(0, 1).mT,
            beta=0.0,
            alpha=scale,
        )
        logits = self.mix_logits(logits.unflatten(0, batch_and_heads), weights)
        softmax_dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(softmax_dtype)
        if mask is not None:
            lowest = torch.finfo(logits.dtype).min
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(mask, lowest)
            else:
                logits = (logits + mask).clamp(lowest)
        scores = logits.softmax(-1).to(query.dtype)
        scores = self.mix_scores(scores, weights)
        dropped = scores if dropout is None else dropout(scores)
        output = torch.bmm(dropped.flatten(0, 1), value.flatten(0, 1))
        return output.unflatten(0, batch_and_heads), scores

    def fold(
        self,
        weights: "Mapping[str, Tensor]",
        sizes: HeadSizes,
        scale: float,
    ) -> "dict[str, Tensor]":
        """Compute ordinary projections that replace :attr:`own_projections`, for folding.

        Args:
            weights (Mapping[str, Tensor]): All parameters of one layer.
            scale (float): Factor for the queries.

        Returns:
            dict[str, Tensor]: Weights of shape [num_heads * size, hidden_size], by projection.
        """
        return {}

    def setting_of(self, projection: Projection) -> str | None:
        """Return the setting that changes a projection, for error messages (None if none does)."""
        return None

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        """Count the parameters per layer and TP rank (excluding padding)."""
        qkv_parameters = sum(rows.size(sizes) for rows in self.rows(sizes))
        count = qkv_parameters // tp
        for tensor in self.tensors(sizes):
            ranks = tensor.ranks(tp)
            count += tensor.size // ranks
        return count

    def costs(self, sizes: HeadSizes) -> Costs:
        """Count FLOPs and saved activations in one layer (nothing by default)."""
        return Costs()

    @property
    def adds_loss(self) -> bool:
        """Whether :meth:`apply` calls ``ranks.add_loss``."""
        return False

    @property
    def is_foldable(self) -> bool:
        """Whether a trained mechanism can be folded into the projections (see :meth:`fold`)."""
        return False

    @property
    def keeps_value_features(self) -> bool:
        """Whether the mechanism only computes linear combinations of value heads, or scales heads.

        Multiplying all values by a matrix is then the same as multiplying all outputs by it.
        """
        return False

    def projections_to_double(self) -> tuple[Projection | Literal["output"], ...]:
        """Return the projections to double when the mechanism is added to a trained model.

        For example, a sigmoid gate starts at 1/2. To preserve the model's outputs, we double the
        gated projection and initialize the gate's own projection to zero. A projection can be
        listed more than once. Raises ConfigError if there is no way to preserve the outputs (the
        default).
        """
        raise ConfigError(
            f"{self} changes the outputs of a trained model, regardless of its initialization. "
            "Train it from scratch instead."
        )

    @property
    def is_exact_at_start(self) -> bool:
        """Whether the default initialization leaves outputs bit-identical (with the stage ``core``:
        those of unfused attention)."""
        try:
            doubled = self.projections_to_double()
        except ConfigError:
            return False
        if doubled:
            return False
        any_sizes = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
        if self.rows(any_sizes):  # initialized like other rows of linear_qkv, i.e. randomly
            return False
        return all("normal" not in tensor.initial for tensor in self.tensors(any_sizes))

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        """Explain why fused attention kernels cannot be used (None if they can)."""
        return None

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        """Return an error message if the mechanism does not support this model, otherwise None.

        The default implementation rejects MLA, GTA and GLA.
        """
        attention = facts.attention
        if attention is None and facts.multi_latent:
            attention = "multi-latent attention"
        if attention is None:
            return None
        return f"{self} does not support {attention}. Use MHA, MQA or GQA."

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.name} must be a mapping of settings, got {values!r}.")
        known = [field.name for field in fields(cls)]
        unknown = sorted(values.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"Unknown setting {', '.join(unknown)} for {cls.name}. Available settings: "
                f"{', '.join(known)}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        settings = {}
        for field in fields(self):
            value = getattr(self, field.name)
            settings[field.name] = list(value) if isinstance(value, tuple) else value
        return settings

    def non_defaults(self) -> dict[str, Any]:
        settings = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                settings[field.name] = value
        return settings

    def __str__(self) -> str:
        settings = []
        for name, value in self.non_defaults().items():
            settings.append(f"{name}={value}")
        if not settings:
            return self.name
        return f"{self.name}({', '.join(settings)})"


def check_fields(settings: Any, prefix: str) -> None:
    """Check a dataclass against its type annotations. Raises ConfigError."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        alternatives = _alternatives(field.type)
        if not any(_is_valid(value, alternative) for alternative in alternatives):
            expected = _describe(alternatives)
            raise ConfigError(f"{prefix}{field.name} must be {expected}, got {value!r}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a union, e.g. ``(int, NoneType)`` for ``int | None``."""
    is_union = get_origin(annotation) not in (None, Literal, tuple)
    if is_union:
        return get_args(annotation)
    return (annotation,)


def _describe(alternatives: tuple[Any, ...]) -> str:
    literals: list[str] = []
    descriptions: list[str] = []
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            literals += get_args(alternative)
        elif alternative in _DESCRIPTIONS:
            descriptions.append(_DESCRIPTIONS[alternative])
    return " or ".join(literals + descriptions)


_DESCRIPTIONS = {
    NoneType: "none",
    bool: "true or false",
    int: "a non-negative integer",
    float: "a non-negative number",
    tuple[int, ...]: "a list of integers",
}


def _is_valid(value: Any, annotation: Any) -> bool:
    """Check a value against a type that is not a union."""
    origin = get_origin(annotation)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if origin is tuple:
        item_type = get_args(annotation)[0]
        if not isinstance(value, tuple):
            return False
        return all(_is_valid(item, item_type) for item in value)
    if annotation in (int, float):
        if type(value) not in (int, annotation):  # isinstance would accept booleans
            return False
        return 0 <= value < math.inf
    return isinstance(value, annotation)


def conflict_with_own_projections(
    mechanisms: Sequence[Mechanism],
    knocks: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return an error message if anything changes a projection that a mechanism computes itself.

    Args:
        mechanisms (Sequence): All mechanisms of a model.
        knocks (Mapping): The settings of KHA by projection, if it is not one of ``mechanisms``.
    """
    for owner in mechanisms:
        for projection in owner.own_projections:
            settings = [mechanism.setting_of(projection) for mechanism in mechanisms]
            settings.append(knocks.get(projection))
            for setting in settings:
                if setting is not None:
                    return (
                        f"{setting} is not supported with {owner}, because all heads share "
                        f"the same {projection}. Please remove {setting}."
                    )
    return None


def apply_stage(
    stage: Stage,
    mechanisms: "Iterable[tuple[Mechanism, Mapping[str, Tensor]]]",
    tensors: "dict[str, Tensor]",
    earlier_outputs: "dict[str, Tensor]",
    ranks: Ranks,
) -> "list[Tensor]":
    """Apply all mechanisms of a stage in order.

    Args:
        mechanisms (Iterable): Mechanisms with their weights.
        tensors (dict[str, Tensor]): Input of the stage, updated in place.
        earlier_outputs (dict[str, Tensor]): Outputs of earlier stages and input projections. New
            outputs are added to this dict.

    Returns:
        list[Tensor]: The updated ``tensors``.
    """
    for mechanism, weights in mechanisms:
        if not mechanism.acts_at(stage):
            continue
        outputs = mechanism.apply(tensors | earlier_outputs, weights, ranks)
        for name, output in outputs.items():
            if name in tensors:
                tensors[name] = output
            else:
                earlier_outputs[name] = output
    return list(tensors.values())
