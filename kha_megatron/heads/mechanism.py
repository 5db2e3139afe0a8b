"""What every mechanism says of itself, and what of a model it needs to know for that."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from kha_megatron.errors import ConfigError

Projection = Literal["query", "key", "value"]
Gradient = Literal["heads", "tokens", "whole"]
Start = Literal["zeros", "ones", "identity", "blocks", "normal"]
Stage = Literal["qkv", "core", "output", "dense"]


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Heads of one attention layer, of a rank or over all of them, and their features."""

    query_heads: int
    kv_heads: int
    """Latent attention has as many as query heads."""
    head_dim: int
    """Of a query or key head; in latent attention those without position, which are knocked."""
    value_dim: int | None = None
    """Of a value head; None for as many as ``head_dim``."""
    hidden_size: int = 0
    """Features of the layer's input; 0 where only names are asked for."""
    latent: bool = False
    """Whether queries, keys and values are no rows of one projection (MLA, GLA)."""

    def heads(self, projection: Projection) -> int:
        """How many heads a projected tensor has."""
        return self.query_heads if projection == "query" else self.kv_heads

    def dim(self, projection: Projection) -> int:
        """How many features one of them has."""
        return (self.value_dim or self.head_dim) if projection == "value" else self.head_dim

    def on_rank(self, tp: int) -> Self:
        """Those of one of ``tp`` tensor-parallel ranks; a head that several share is whole."""
        return replace(
            self,
            query_heads=max(1, self.query_heads // tp),
            kv_heads=max(1, self.kv_heads // tp),
        )


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What of a model's attention a mechanism may be unable to honour."""

    multi_latent: bool = False
    """MLA or GLA."""
    attention: str | None = None
    """A kind that Megatron has no flag for: ``gta`` or ``gla``."""
    qk_norm: bool = False
    flash_decode: bool = False
    rotary_features: int = 0
    """Of a head, that the rotary embedding turns."""
    predictions: int = 0
    """Multi-token prediction layers behind the model's own."""
    layers: int = 0
    """Of the model; 0 where that is not known, as in the following."""
    query_heads: int = 0
    """Of a layer, over all ranks."""
    tokens: int = 0
    """Of the longest sequence."""
    fused_attention: bool = False
    """Whether only fused kernels may compute it."""


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """A parameter of one layer: all that any room needs to know of it."""

    name: str
    """Of the module beside Megatron's attention whose ``weight`` it is: ``{mechanism}_...``."""
    shape: tuple[int, ...]
    """Of the whole tensor, over all ranks."""
    gradient: Gradient
    """What a tensor-parallel rank computes of the gradient: a sum over its own ``heads`` only, over
    its own ``tokens`` only (under sequence parallelism), or the ``whole``. Where the tensor
    ``reads_input``, of the gradient of what it gives."""
    heads: Projection
    """Which projected tensor's heads it meets."""
    starts: tuple[Start, ...] = ("zeros",)
    """How it begins: one word, or one for each of ``matrices``."""
    hf: str
    """Module below ``self_attn`` of our transformers class."""
    matrices: tuple[str, ...] = ()
    """Modules below ``hf`` that hold one entry of the first dimension each, as ``nn.Linear`` does:
    transposed. None of them: ``hf`` holds the tensor as it is."""
    per_head: bool = False
    """Whether the first dimension counts heads, and is cut over tensor-parallel ranks with them."""
    reads_input: bool = False
    """Whether it is a projection ``[features, hidden]``, or ``[heads, features, hidden]``, of the
    layer's normed input: its mechanism gets what it gives, and not the weight."""

    @property
    def key(self) -> str:
        """In Megatron's checkpoints, below ``decoder.layers.{layer}.``."""
        return f"self_attention.{self.name}.weight"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """In our transformers class, below ``model.layers.{layer}.``, in the order of stacking."""
        parts = [f"{self.hf}.{matrix}" for matrix in self.matrices] or [self.hf]
        return tuple(f"self_attn.{part}.weight" for part in parts)

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def ranks(self, tp: int) -> int:
        """Over how many of ``tp`` tensor-parallel ranks it is cut; 1 where each has all of it.

        Ranks that share a head have it whole, and their ``gradient`` is a sum over ``heads``.
        """
        return tp if self.per_head and self.shape[0] % tp == 0 else 1


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows beside queries, keys and values in the projection that makes them, some for each head.

    They stand in Megatron's ``linear_qkv`` with the key/value head they belong to
    (``model.qkv.QKVLayout``), so that any number of ranks cuts them as it cuts the heads. The
    mechanism gets what they give: ``[..., heads, features]``.
    """

    name: str
    """Under which the mechanism finds it."""
    heads: Projection
    """Whose heads they go with."""
    features: int
    """Rows of one head."""
    hf: str
    """Module below ``self_attn`` of our transformers class: ``[heads * features, hidden]``."""
    is_stock: bool = False
    """Whether Megatron has the same rows in the same place, as ``--attention-output-gate``."""

    def size(self, sizes: HeadSizes) -> int:
        """How many numbers they hold, over all ranks."""
        return sizes.heads(self.heads) * self.features * sizes.hidden_size


class Mechanism(ABC):
    """One mechanism with its settings: a frozen dataclass of plain values, ``None`` where unset.

    A child's fields are its flags (``--heads NAME.FIELD=VALUE``) and its JSON. It raises
    :class:`~kha_megatron.errors.ConfigError` for values that it does not know.
    """

    name: ClassVar[str]
    """Of its field in ``KHAConfig`` and its module in ``ops.heads``."""
    stages: ClassVar[tuple[Stage, ...]] = ("qkv",)
    """Where its function is called: ``qkv`` between split and QK-norm, ``output`` on what the core
    attention gives, ``dense`` on what the output projection gives. ``core`` takes the place of the
    core attention, and is no function of one head's tensors."""
    makes: ClassVar[tuple[Projection, ...]] = ()
    """Projected tensors that it makes itself, of the layer's input: they have no rows in the
    projection of queries, keys and values."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Its named settings."""

    def _check_choices(self) -> None:
        """Refuse a value that is none of the words, or of the two truths, of its field's type."""
        assert is_dataclass(self)
        for item in fields(self):
            value, words = getattr(self, item.name), get_args(item.type)
            if item.type is bool and type(value) is not bool:
                raise ConfigError(f"{self.name} {item.name}={value!r}: choose true or false")
            if get_origin(item.type) is Literal and value not in words:
                raise ConfigError(
                    f"{self.name} {item.name}={value!r}: choose one of {', '.join(words)}"
                )

    def for_layer(self, layer: int) -> Self:
        """As the layer, counted from 0, has it, where settings differ between layers."""
        return self

    @property
    def made_dim(self) -> int | None:
        """Features of each head of the projected tensors that it ``makes``."""
        return None

    def acts_at(self, stage: Stage) -> bool:
        """Whether it changes something there, with these settings."""
        return stage in self.stages

    @abstractmethod
    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """The parameters of one layer of these sizes, counted over all ranks."""

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """What it has in the projection of queries, keys and values, in the order of the rows."""
        return ()

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        """How many one layer has of it, on each of ``tp`` tensor-parallel ranks.

        Rows count without those that only fill up their group (``model.qkv``).
        """
        rows = sum(row.size(sizes) for row in self.rows(sizes))
        return sum(t.size // t.ranks(tp) for t in self.tensors(sizes)) + rows // tp

    def flops(self, sizes: HeadSizes) -> int:
        """FLOPs of its matrix products for one token in one layer, forward."""
        return 0

    def pair_flops(self, sizes: HeadSizes) -> int:
        """FLOPs that it adds for one query and one key in one layer, over all heads, forward."""
        return 0

    def spared(self, sizes: HeadSizes) -> tuple[int, int]:
        """FLOPs that kernels which leave out the heads it switches off would save, on paper.

        Returns:
            In one layer, forward: of the projections for one token, and of the scores and values
            for one query and one key. Stock kernels compute every head and save none.
        """
        return 0, 0

    def pair_saved(self, sizes: HeadSizes) -> int:
        """Elements for one query and one key that one layer keeps for the backward pass."""
        return 0

    def unfused(self, sizes: HeadSizes) -> str | None:
        """Why fused attention kernels cannot compute its layer; None where they do."""
        return None

    def saved(self, sizes: HeadSizes) -> int:
        """Elements for one token that one layer keeps for the backward pass, not recomputing."""
        return 0

    def saved_between(self, sizes: HeadSizes) -> int:
        """As :meth:`saved`, of what lies between tensor-parallel regions: sequence parallelism
        leaves a rank its own tokens of it."""
        return 0

    def sent(self, sizes: HeadSizes, tp: int, width: int) -> tuple[int, int]:
        """What tensor-parallel ranks exchange in one layer beside projections of the input.

        Args:
            sizes: over all ranks; keys may be wider than values.
            tp: ranks.
            width: bytes of an activation.

        Returns:
            Bytes for one token, forward and backward, of which a rank sends ``(tp - 1) / tp``.
        """
        return 0, 0

    @property
    def adds_loss(self) -> bool:
        """Whether a loss of its own is trained on, beside that of the model."""
        return False

    @property
    def folds(self) -> bool:
        """Whether it can be folded into the projections, leaving a stock model."""
        return False

    @property
    def drops_heads(self) -> bool:
        """Whether a trained model that gains it computes something else, :meth:`doubled` or not,
        because tokens lose heads: further training makes up for that."""
        return False

    def doubled(self) -> tuple[Projection | Literal["output"], ...]:
        """What is doubled of a trained model that gains it, so that it computes what it did.

        The projections named, each as often as it is named; doubling is exact in any dtype. What
        reads the input then begins at zero, all else as it says of itself.

        Raises:
            ConfigError: no start does that; the message says why.
        """
        raise ConfigError(
            f"{self} changes what a trained model computes, however it begins: train with it from "
            "the start"
        )

    @property
    def is_exact_at_start(self) -> bool:
        """Whether a trained model that gains it just as it starts computes what it did, bit for
        bit: nothing has to be doubled, and nothing is drawn at random."""
        sizes = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
        try:
            doubled = self.doubled()
        except ConfigError:
            return False
        drawn = any("normal" in tensor.starts for tensor in self.tensors(sizes))
        return not (doubled or drawn or self.rows(sizes))

    def refusal(self, facts: HeadFacts) -> str | None:
        """Why such a model cannot have it, with the remedy; None if it can.

        Of a mechanism that says no more: the other kinds of attention do not reach its stage.
        """
        kind = facts.attention or ("multi-latent attention" if facts.multi_latent else None)
        return kind and f"{self} on {kind}, which gives it no place to act: use MHA, MQA or GQA"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The mechanism whose :meth:`to_dict` this is.

        Raises:
            ConfigError: a setting that it does not have, or a value that is none.
        """
        assert is_dataclass(cls)
        known = [f.name for f in fields(cls)]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.name}={values!r}: give an object of {', '.join(known)}")
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"unknown setting {', '.join(unknown)} of {cls.name}: it has "
                f"{', '.join(known) or 'none'}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """What it is, as plain JSON values; without how it is run (fields that do not compare)."""
        assert is_dataclass(self)
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    def said(self) -> dict[str, Any]:
        """What is not its default, of what it is and how it is run."""
        assert is_dataclass(self)
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def __str__(self) -> str:
        """Short form for logs: ``name``, or ``name(setting=value)``."""
        settings = ", ".join(f"{name}={value}" for name, value in self.said().items())
        return f"{self.name}({settings})" if settings else self.name
