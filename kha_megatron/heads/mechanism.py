"""Base class of head mechanisms and the descriptions of their tensors."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from kha_megatron.errors import ConfigError
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Projection = Literal["query", "key", "value"]
Gradient = Literal["heads", "tokens", "whole"]
InitialValue = Literal["zeros", "ones", "identity", "blocks", "normal"]
Stage = Literal["qkv", "core", "output", "dense"]


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Head counts and dimensions of an attention layer, either over all ranks or on one rank."""

    query_heads: int
    kv_heads: int  # equal to query_heads in latent attention
    head_dim: int  # without the rotary part in latent attention
    value_dim: int | None = None  # defaults to head_dim
    hidden_size: int = 0  # may be 0 if only tensor names are needed
    latent: bool = False  # MLA or GLA, which have no joint QKV projection

    def heads(self, projection: Projection) -> int:
        return self.query_heads if projection == "query" else self.kv_heads

    def dim(self, projection: Projection) -> int:
        return (self.value_dim or self.head_dim) if projection == "value" else self.head_dim

    def on_rank(self, tp: int) -> Self:
        """Return the sizes on one of ``tp`` ranks. A head that several ranks share counts fully."""
        return replace(
            self,
            query_heads=max(1, self.query_heads // tp),
            kv_heads=max(1, self.kv_heads // tp),
        )


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """Model properties that determine whether a mechanism is supported."""

    multi_latent: bool = False
    attention: str | None = None  # KHAConfig.attention
    qk_norm: bool = False
    flash_decode: bool = False
    rotary_features: int = 0  # features per head that RoPE rotates
    predictions: int = 0  # number of multi-token prediction layers
    layers: int = 0  # 0 if unknown
    query_heads: int = 0  # 0 if unknown
    tokens: int = 0  # maximum sequence length, or 0 if unknown
    fused_attention: bool = False  # whether only fused attention kernels are allowed


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """Description of one parameter that a mechanism adds to a layer."""

    name: str
    """Name of the submodule of Megatron's attention that owns ``weight``, e.g. ``knock_value``."""
    shape: tuple[int, ...]  # over all ranks
    gradient: Gradient
    """Whether the gradient on a TP rank is a partial sum over its ``heads``, a partial sum over its
    ``tokens`` (with sequence parallelism), or the ``whole`` gradient. If ``reads_input`` is set,
    this refers to the projection's output."""
    heads: Projection  # projected tensor whose heads use the parameter
    initial: tuple[InitialValue, ...] = ("zeros",)  # or one entry for each of matrices
    hf: str  # submodule of self_attn in our transformers class
    matrices: tuple[str, ...] = ()
    """Names of ``nn.Linear`` modules in ``hf``, which hold the transposed slices along the first
    dimension. If empty, ``hf`` itself holds the tensor."""
    per_head: bool = False  # whether the first dimension is sharded with the heads
    reads_input: bool = False
    """Whether this is a projection of the normalized layer input (``[..., features, hidden]``),
    whose output the mechanism receives instead of the weight."""

    @property
    def key(self) -> str:
        """Name in Megatron checkpoints, after ``decoder.layers.{layer}.``"""
        return f"self_attention.{self.name}.weight"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names in our transformers class, after ``model.layers.{layer}.``"""
        parts = [f"{self.hf}.{matrix}" for matrix in self.matrices] or [self.hf]
        return tuple(f"self_attn.{part}.weight" for part in parts)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def ranks(self, tp: int) -> int:
        return tp if self.per_head and self.shape[0] % tp == 0 else 1


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Additional rows of ``linear_qkv``, next to those of queries, keys and values.

    The rows are stored and sharded with their KV head (see ``model.qkv.QKVLayout``). The mechanism
    receives their output as ``[..., heads, features]``.
    """

    name: str  # key under which Mechanism.apply receives the output
    heads: Projection
    features: int  # rows per head
    hf: str  # submodule of self_attn in our transformers class
    is_stock: bool = False  # same rows as --attention-output-gate in stock Megatron

    def size(self, sizes: HeadSizes) -> int:
        return sizes.heads(self.heads) * self.features * sizes.hidden_size


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base class of head mechanisms, which are frozen dataclasses of JSON-serializable settings.

    Each field can be set with ``--heads NAME.FIELD=VALUE``. Subclasses implement :meth:`tensors`
    and :meth:`apply`, and override the other methods where the default does not apply.
    """

    name: ClassVar[str]  # field name in KHAConfig
    stages: ClassVar[tuple[Stage, ...]] = ("qkv",)
    """Stages at which :meth:`apply` is called: ``qkv`` (after the QKV split, before QK-norm),
    ``output`` (after core attention) and ``dense`` (after the output projection). A mechanism with
    the stage ``core`` replaces core attention."""
    own_projections: ClassVar[tuple[Projection, ...]] = ()
    """Projections that the mechanism computes itself, instead of ``linear_qkv``."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        check_fields(self, f"{self.name}.")

    def for_layer(self, layer: int) -> Self:
        """Return the settings for a layer index, counted from 0."""
        return self

    @property
    def own_dim(self) -> int | None:
        return None

    def acts_at(self, stage: Stage) -> bool:
        return stage in self.stages

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Describe the parameters of one layer, with shapes over all ranks."""
        return ()

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Describe the additional rows of ``linear_qkv``, in order."""
        return ()

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        """Apply the mechanism at one stage. The default implementation is a no-op.

        Args:
            tensors: The local heads of ``query``, ``key`` and ``value`` (stage ``qkv``) or
                ``output`` (stage ``output``), of shape ``[..., heads, D]``, or ``dense`` of shape
                ``[..., hidden]``. ``own_projections`` have a single head. Also contains the outputs
                of :meth:`rows`, of tensors with ``reads_input`` and of earlier stages.
            weights: The other parameters by name, with the local heads of ``per_head`` parameters.
            ranks: Collectives over the ranks that hold other heads and tokens of the layer.

        Returns:
            The tensors to replace, and any tensors that later stages need.
        """
        return {}

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        """Count the parameters per layer on each of ``tp`` ranks, without padding rows."""
        rows = sum(row.size(sizes) for row in self.rows(sizes))
        return sum(t.size // t.ranks(tp) for t in self.tensors(sizes)) + rows // tp

    def flops(self, sizes: HeadSizes) -> int:
        """Count the matmul FLOPs per token and layer in the forward pass."""
        return 0

    def pair_flops(self, sizes: HeadSizes) -> int:
        """Count the extra forward FLOPs per query-key pair and layer, over all heads."""
        return 0

    def skippable_flops(self, sizes: HeadSizes) -> tuple[int, int]:
        """Count the forward FLOPs per layer of inactive heads: projections per token, and attention
        per query-key pair. Note that the current kernels do not skip them."""
        return 0, 0

    def activations(self, sizes: HeadSizes) -> int:
        """Count 16-bit values per token and layer saved for backward, without recomputation."""
        return 0

    def sharded_activations(self, sizes: HeadSizes) -> int:
        """Count additional saved values per token, which sequence parallelism shards."""
        return 0

    def pair_activations(self, sizes: HeadSizes) -> int:
        """Count 16-bit values per query-key pair and layer saved for backward."""
        return 0

    def communication(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        """Count the bytes per token that a layer's TP ranks exchange forward and backward, of which
        each rank sends ``(tp - 1) / tp``. ``width`` is the number of bytes per activation. Input
        projections are not included."""
        return 0, 0

    @property
    def adds_loss(self) -> bool:
        return False

    @property
    def is_foldable(self) -> bool:
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether a token uses only some of the heads, so that upcycling changes the outputs."""
        return False

    def projections_to_double(self) -> tuple[Projection | Literal["output"], ...]:
        """Return the projections to double so that adding the mechanism preserves a model's
        outputs.

        Tensors that read the input are then initialized to zero. A projection may be listed
        repeatedly. By default, raise ConfigError because no initialization preserves the outputs.
        """
        raise ConfigError(
            f"{self} changes the outputs of a trained model, regardless of its initialization. "
            "Train it from scratch instead."
        )

    @property
    def is_exact_at_start(self) -> bool:
        """Whether adding the mechanism with its own initialization keeps outputs bit-identical."""
        sizes = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
        try:
            doubled = self.projections_to_double()
        except ConfigError:
            return False
        drawn = any("normal" in tensor.initial for tensor in self.tensors(sizes))
        return not (doubled or drawn or self.rows(sizes))

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        """Return why fused attention kernels cannot compute the layer, or None if they can."""
        return None

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        """Return an error message if the model is not supported, otherwise None. By default, all
        attention types except MLA, GTA and GLA are supported."""
        kind = facts.attention or ("multi-latent attention" if facts.multi_latent else None)
        return kind and f"{self} does not support {kind}. Use MHA, MQA or GQA."

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.name} must be a mapping of settings, got {values!r}.")
        known = [f.name for f in fields(cls)]
        if unknown := sorted({*values} - {*known}):
            raise ConfigError(
                f"Unknown setting {', '.join(unknown)} for {cls.name}. Available settings: "
                f"{', '.join(known)}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    def non_defaults(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.non_defaults().items())
        return f"{self.name}({settings})" if settings else self.name


def check_fields(settings: Any, prefix: str) -> None:
    """Raise ConfigError if a field of a dataclass has a value that its annotation does not
    allow."""
    for item in fields(settings):
        value, kind = getattr(settings, item.name), item.type
        kinds = (kind,) if get_origin(kind) in (None, Literal) else get_args(kind)
        if not any(_is_valid(value, kind) for kind in kinds):
            literal = [
                word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)
            ]
            words = literal + [_WORDS[kind] for kind in kinds if kind in _WORDS]
            raise ConfigError(f"{prefix}{item.name} must be {' or '.join(words)}, got {value!r}.")


_WORDS = {
    NoneType: "none",
    bool: "true or false",
    int: "a non-negative integer",
    float: "a non-negative number",
    tuple[int, ...]: "a list of integers",
}


def _is_valid(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_valid(n, get_args(kind)[0]) for n in value)
    if kind in (int, float):
        return type(value) in (int, kind) and 0 <= value < math.inf
    return isinstance(value, kind)


def apply_stage(
    stage: Stage,
    mechanisms: "Iterable[tuple[Mechanism, Mapping[str, Tensor]]]",
    tensors: "dict[str, Tensor]",
    seen: "dict[str, Tensor]",
    ranks: Ranks,
) -> "list[Tensor]":
    """Apply all mechanisms of a stage in order and return the updated ``tensors``.

    ``seen`` holds the outputs of earlier stages and of input projections, and receives any new
    tensors. See :meth:`Mechanism.apply` for the other arguments.
    """
    for mechanism, weights in mechanisms:
        if mechanism.acts_at(stage):
            for name, x in mechanism.apply(tensors | seen, weights, ranks).items():
                (tensors if name in tensors else seen)[name] = x
    return list(tensors.values())
