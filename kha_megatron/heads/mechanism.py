"""Base class of head mechanisms, and the descriptions of their tensors."""

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
    """Heads of one attention layer and their features, over all ranks or on one."""

    query_heads: int
    kv_heads: int
    """As many as query heads in latent attention."""
    head_dim: int
    """Features of a query or key head; in latent attention, those without position."""
    value_dim: int | None = None
    """Features of a value head; None for ``head_dim``."""
    hidden_size: int = 0
    """Features of the layer's input; 0 if only names are needed."""
    latent: bool = False
    """Whether the attention is MLA or GLA, which have no common QKV projection."""

    def heads(self, projection: Projection) -> int:
        """Return the number of heads of a projected tensor."""
        return self.query_heads if projection == "query" else self.kv_heads

    def dim(self, projection: Projection) -> int:
        """Return the number of features of one head of a projected tensor."""
        return (self.value_dim or self.head_dim) if projection == "value" else self.head_dim

    def on_rank(self, tp: int) -> Self:
        """Return the sizes on one of ``tp`` ranks; a head that ranks share counts as whole."""
        return replace(
            self,
            query_heads=max(1, self.query_heads // tp),
            kv_heads=max(1, self.kv_heads // tp),
        )


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """Facts about a model that a mechanism may not support."""

    multi_latent: bool = False
    """MLA or GLA."""
    attention: str | None = None
    """``gta``, ``gla`` or None."""
    qk_norm: bool = False
    flash_decode: bool = False
    rotary_features: int = 0
    """Features of a head that the rotary embedding rotates."""
    predictions: int = 0
    """Number of multi-token prediction layers."""
    layers: int = 0
    """Number of layers; 0 if unknown, as in the fields below."""
    query_heads: int = 0
    """Query heads of a layer, over all ranks."""
    tokens: int = 0
    """Length of the longest sequence."""
    fused_attention: bool = False
    """Whether only fused kernels may compute the attention."""


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """A parameter of one layer."""

    name: str
    """Module beside Megatron's attention that holds it as ``weight``: ``{mechanism}_...``."""
    shape: tuple[int, ...]
    """Shape over all ranks."""
    gradient: Gradient
    """The gradient on one tensor-parallel rank: a partial sum over its ``heads``, over its
    ``tokens`` (sequence parallelism), or the ``whole``. If ``reads_input``, the gradient of the
    projection's output."""
    heads: Projection
    """The projected tensor whose heads it applies to."""
    initial: tuple[InitialValue, ...] = ("zeros",)
    """Initial value: one word, or one for each of ``matrices``."""
    hf: str
    """Module below ``self_attn`` of our transformers class."""
    matrices: tuple[str, ...] = ()
    """``nn.Linear`` modules below ``hf``, each holding one transposed entry of the first dimension.
    Empty: ``hf`` holds the tensor as it is."""
    per_head: bool = False
    """Whether the first dimension counts heads and is sharded with them."""
    reads_input: bool = False
    """Whether it is a projection ``[features, hidden]`` or ``[heads, features, hidden]`` of the
    layer's normed input. Its mechanism then gets the output instead of the weight."""

    @property
    def key(self) -> str:
        """Name in Megatron's checkpoints, below ``decoder.layers.{layer}.``."""
        return f"self_attention.{self.name}.weight"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names in our transformers class, below ``model.layers.{layer}.``, in stacking order."""
        parts = [f"{self.hf}.{matrix}" for matrix in self.matrices] or [self.hf]
        return tuple(f"self_attn.{part}.weight" for part in parts)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def ranks(self, tp: int) -> int:
        """Return the number of ``tp`` ranks that shard it; 1 if it is replicated."""
        return tp if self.per_head and self.shape[0] % tp == 0 else 1


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of ``linear_qkv`` beside those of queries, keys and values.

    They are stored with the KV head they belong to (``model.qkv.QKVLayout``), so they are sharded
    like heads. The mechanism gets their output ``[..., heads, features]``.
    """

    name: str
    """Name by which the mechanism reads the output."""
    heads: Projection
    """The projected tensor whose heads they belong to."""
    features: int
    """Rows of one head."""
    hf: str
    """Module below ``self_attn`` of our transformers class: ``[heads * features, hidden]``."""
    is_stock: bool = False
    """Whether Megatron has the same rows, as with ``--attention-output-gate``."""

    def size(self, sizes: HeadSizes) -> int:
        """Return the number of elements over all ranks."""
        return sizes.heads(self.heads) * self.features * sizes.hidden_size


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base class of head mechanisms: a frozen dataclass of plain values.

    The fields are flags (``--heads NAME.FIELD=VALUE``) and JSON keys. Subclasses implement
    :meth:`tensors` and :meth:`apply`, and override other methods where the defaults are wrong.

    Raises:
        ConfigError: a field has an invalid value.
    """

    name: ClassVar[str]
    """Name of its field in ``KHAConfig``."""
    stages: ClassVar[tuple[Stage, ...]] = ("qkv",)
    """Where :meth:`apply` is called: ``qkv`` between split and QK-norm, ``output`` on the core
    attention's output, ``dense`` on the output projection's output. ``core`` replaces the core
    attention."""
    own_projections: ClassVar[tuple[Projection, ...]] = ()
    """Projected tensors that it computes from the layer's input; ``linear_qkv`` has no rows for
    them."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings."""

    def __post_init__(self) -> None:
        check_fields(self, f"{self.name}.")

    def for_layer(self, layer: int) -> Self:
        """Return the settings of the layer with this index (from 0)."""
        return self

    @property
    def own_dim(self) -> int | None:
        """Features of each head of the ``own_projections``."""
        return None

    def acts_at(self, stage: Stage) -> bool:
        """Return whether these settings change anything at ``stage``."""
        return stage in self.stages

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Return the parameters of one layer, over all ranks."""
        return ()

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Return its rows of ``linear_qkv``, in order."""
        return ()

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        """Compute the mechanism at one stage. By default, nothing changes.

        Args:
            tensors: ``query``, ``key`` and ``value`` at ``qkv`` and ``output`` at ``output``,
                ``[..., heads, D]`` with this rank's heads (one head for ``own_projections``);
                ``dense`` ``[..., hidden]`` at ``dense``. At every stage also the outputs of its
                ``rows`` ``[..., heads, features]``, of its tensors that read the input (``[...,
                features]``, or ``[..., 1, features]`` if all heads use it), and what earlier
                stages added.
            weights: its other parameters by name, with this rank's part of those per head.
            ranks: communication with the ranks that have other heads and tokens.

        Returns:
            The tensors that change, and tensors of its own for later stages.
        """
        return {}

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        """Count its parameters in one layer on each of ``tp`` ranks, without padding rows."""
        rows = sum(row.size(sizes) for row in self.rows(sizes))
        return sum(t.size // t.ranks(tp) for t in self.tensors(sizes)) + rows // tp

    def flops(self, sizes: HeadSizes) -> int:
        """Count FLOPs of matrix products per token and layer, forward only."""
        return 0

    def pair_flops(self, sizes: HeadSizes) -> int:
        """Count extra FLOPs per query-key pair and layer over all heads, forward only."""
        return 0

    def skippable_flops(self, sizes: HeadSizes) -> tuple[int, int]:
        """Count FLOPs of the heads that it switches off. Kernels do not skip them today.

        Returns:
            Per layer, forward: FLOPs of projections per token, and of scores and values per pair.
        """
        return 0, 0

    def activations(self, sizes: HeadSizes) -> int:
        """Count 16-bit elements per token and layer saved for backward, without recomputation."""
        return 0

    def sharded_activations(self, sizes: HeadSizes) -> int:
        """Count further saved elements per token, which sequence parallelism shards."""
        return 0

    def pair_activations(self, sizes: HeadSizes) -> int:
        """Count 16-bit elements per query-key pair and layer saved for backward."""
        return 0

    def communication(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        """Count bytes per token, forward and backward, that the TP ranks of a layer exchange.

        A rank sends ``(tp - 1) / tp`` of them. ``sizes`` are over all ranks; ``width`` is the
        number of bytes of an activation. Projections of the input are not counted.
        """
        return 0, 0

    @property
    def adds_loss(self) -> bool:
        """Whether it adds an auxiliary loss."""
        return False

    @property
    def is_foldable(self) -> bool:
        """Whether it can be folded into the projections of a stock model."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether tokens use a part of the heads, so that upcycling changes the outputs."""
        return False

    def projections_to_double(self) -> tuple[Projection | Literal["output"], ...]:
        """Return the projections to double when it is added to a trained model.

        Outputs then stay the same. Each is doubled as often as it is named, which is exact in any
        dtype. Tensors that read the input start at zero.

        Raises:
            ConfigError: no initial value preserves the outputs (the default).
        """
        raise ConfigError(
            f"{self} changes the outputs of a trained model with any initial value. Use it in a "
            "training from scratch."
        )

    @property
    def is_exact_at_start(self) -> bool:
        """Whether adding it with its own initial values preserves a model's outputs bit for bit."""
        sizes = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
        try:
            doubled = self.projections_to_double()
        except ConfigError:
            return False
        drawn = any("normal" in tensor.initial for tensor in self.tensors(sizes))
        return not (doubled or drawn or self.rows(sizes))

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        """Return why fused attention kernels cannot compute its layer, or None if they can."""
        return None

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        """Return an error message if the model does not support it, otherwise None.

        By default, mechanisms support MHA, MQA and GQA.
        """
        kind = facts.attention or ("multi-latent attention" if facts.multi_latent else None)
        return kind and f"{self} does not support {kind}. Use MHA, MQA or GQA."

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of :meth:`to_dict`. Raises ConfigError for an unknown setting."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"Expected {cls.name} to be an object of settings, got {values!r}.")
        known = [f.name for f in fields(cls)]
        if unknown := sorted({*values} - {*known}):
            raise ConfigError(
                f"Unknown setting {', '.join(unknown)} of {cls.name}. Expected some of {known}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values of all fields that take part in comparisons."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    def non_defaults(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    def __str__(self) -> str:
        """Format for logs: ``name``, or ``name(setting=value)``."""
        settings = ", ".join(f"{name}={value}" for name, value in self.non_defaults().items())
        return f"{self.name}({settings})" if settings else self.name


def check_fields(settings: Any, prefix: str) -> None:
    """Raise ConfigError if a field of a dataclass has a value that its annotation does not allow.

    Numbers must not be negative. Error messages put ``prefix`` before the name of the field.
    """
    for item in fields(settings):
        value, kind = getattr(settings, item.name), item.type
        kinds = (kind,) if get_origin(kind) in (None, Literal) else get_args(kind)
        if not any(_is_valid(value, kind) for kind in kinds):
            literal = [
                word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)
            ]
            words = literal + [_WORDS[kind] for kind in kinds if kind in _WORDS]
            raise ConfigError(
                f"Expected {prefix}{item.name} to be {' or '.join(words)}, got {value!r}."
            )


_WORDS = {
    NoneType: "none",
    bool: "true or false",
    int: "a whole number from 0 up",
    float: "a number from 0 up",
    tuple[int, ...]: "a list of them",
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
    """Apply the mechanisms of a stage to ``tensors`` and return these in the same order.

    Args:
        stage: which mechanisms act.
        mechanisms: with their weights, in order.
        tensors: tensors of the stage (see :meth:`Mechanism.apply`).
        seen: outputs of earlier stages and of projections of the input. Tensors that mechanisms add
            are stored here.
        ranks: see :meth:`Mechanism.apply`.
    """
    for mechanism, weights in mechanisms:
        if mechanism.acts_at(stage):
            for name, x in mechanism.apply(tensors | seen, weights, ranks).items():
                (tensors if name in tensors else seen)[name] = x
    return list(tensors.values())
