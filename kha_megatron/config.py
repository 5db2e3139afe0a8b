"""What is knocked, and how: the one configuration object every room shares.

Knocking-Heads Attention (arXiv 2510.23052, section 3.2) passes each head's query, key or value
through small matrices that all heads of the layer share. This module only names the choice; the
maths is in ``kha_megatron.ops``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, Self

from kha_megatron.errors import ConfigError

Variant = Literal["linear", "mlp", "gate"]
Init = Literal["identity", "random"]
Projection = Literal["query", "key", "value"]

PROJECTIONS: tuple[Projection, ...] = ("query", "key", "value")
"""The projected tensors that can be knocked, in the order Megatron lays them out."""

MATRICES: Mapping[Variant, tuple[str, ...]] = MappingProxyType(
    {"linear": ("proj",), "mlp": ("up", "gate", "down"), "gate": ("gate",)}
)
"""Names of the ``[D, D]`` matrices of each variant, in the order they are stacked."""

SAVED: Mapping[Variant, int] = MappingProxyType({"linear": 1, "mlp": 4, "gate": 3})
"""Tensors of the size of its input that ``ops.knock`` keeps for the backward pass: the input; for
``gate`` also the two factors of the product; for ``mlp`` also the two factors and their product."""

CONFIG_VARIABLE = "KHA_CONFIG"
"""Environment variable from which a spec chosen by its name takes what the name cannot carry."""

INITS: tuple[Init, ...] = ("identity", "random")


def parse_variant(text: str | None) -> Variant | None:
    """``"linear"``, ``"mlp"`` or ``"gate"`` as they are; ``"none"`` (command lines) as None.

    Raises:
        ConfigError: for any other word.
    """
    if text is None or text == "none":
        return None
    if not isinstance(text, str) or text not in MATRICES:  # JSON may hold anything
        raise ConfigError(
            f"unknown KHA variant {text!r}: choose one of {', '.join(MATRICES)} or none"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class KHAConfig:
    """Which of a layer's projected tensors are knocked, and with which variant.

    ``KHAConfig()`` knocks nothing: it is the baseline that runs the same code path.

    Raises:
        ConfigError: a field holds a value that its type does not list.
    """

    query: Variant | None = None
    """Variant applied to the query heads, before QK-norm and RoPE; None leaves them alone."""

    key: Variant | None = None
    """Variant applied to the key heads, before QK-norm and RoPE; None leaves them alone."""

    value: Variant | None = None
    """Variant applied to the value heads; None leaves them alone."""

    init: Init = "identity"
    """``identity`` (section 3.3) starts as a bit-exact no-op. ``random`` is the paper's ablation:
    it trains to a much higher loss, and is here only to be reproduced."""

    init_seed: int = 1234
    """Seed of ``init="random"``. The draw does not depend on any rank's own random state."""

    def __post_init__(self) -> None:
        for projection in PROJECTIONS:
            parse_variant(getattr(self, projection))
            if getattr(self, projection) == "none":
                raise ConfigError(f"KHAConfig({projection}='none'): write None")
        if self.init not in INITS:
            raise ConfigError(f"unknown KHA init {self.init!r}: choose one of {', '.join(INITS)}")
        if type(self.init_seed) is not int:
            raise ConfigError(f"KHA init_seed {self.init_seed!r} is not a whole number")

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """The named preset (a key of :data:`PRESETS`) with some fields replaced.

        Raises:
            ConfigError: no preset has that name.
        """
        if name not in PRESETS:
            raise ConfigError(f"unknown KHA preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: ``values`` has a key that is no field: it comes from another version.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(
                f"unknown KHA setting {', '.join(unknown)}: written by another version of "
                f"kha-megatron; known are {', '.join(field.name for field in fields(cls))}"
            )
        return cls(**values)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Read ``kha_query``, ``kha_key``, ``kha_value``, ``kha_init`` and ``kha_init_seed``.

        Args:
            entries: Megatron's arguments or a Hugging Face ``config.json``. Megatron's may record
                a preset by the name of its ``spec`` instead.

        Returns:
            None when it names none of the three projections: it was not written with KHA in mind.

        Raises:
            ConfigError: a variant or an init that does not exist.
        """
        names = {f"kha_{field.name}": field.name for field in fields(cls)}
        values = {field: entries[name] for name, field in names.items() if name in entries}
        if not set(PROJECTIONS) & set(values):
            module, name = (*(entries.get("spec") or ()), None, None)[:2]
            is_preset = module == "kha_megatron.mcore.specs" and name in PRESETS
            return cls.from_preset(name) if is_preset else None
        for projection in PROJECTIONS:
            values[projection] = parse_variant(values.get(projection))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return asdict(self)

    @property
    def variants(self) -> dict[Projection, Variant]:
        """The knocked projections and their variants; empty for the baseline."""
        return {p: v for p in PROJECTIONS if (v := getattr(self, p)) is not None}

    def parameters_per_layer(self, head_dim: int) -> int:
        """How many parameters one layer gains, for heads of ``head_dim`` features."""
        return sum(len(MATRICES[v]) for v in self.variants.values()) * head_dim**2

    def forward_flops_per_token(self, head_dim: int, query_heads: int, kv_heads: int) -> int:
        """Matrix-multiplication FLOPs that one layer gains per token in the forward pass.

        Each ``[D, D]`` matrix costs ``2 D^2`` per head of its tensor. With ``n`` query and ``n``
        key/value heads of ``D = d / n`` features and three matrices this is the paper's
        ``6 d^2 / n`` (eq. 12). The backward pass costs twice as much: training takes three times
        this number, by which Megatron too multiplies its own.

        Matrices count as applied to activations. Linear ones cost nothing per token once they are
        folded into the projection. Sigmoids and element-wise products are left out, as in eq. 12
        and in Megatron's own count.

        Args:
            head_dim: ``D``.
            query_heads: query heads of the whole layer.
            kv_heads: key/value heads of the whole layer.
        """
        heads = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        return sum(2 * head_dim**2 * heads[p] * len(MATRICES[v]) for p, v in self.variants.items())

    def saved_elements_per_token(self, head_dim: int, query_heads: int, kv_heads: int) -> int:
        """Elements per token that one layer keeps for the backward pass, without recomputing.

        Args:
            head_dim: ``D``.
            query_heads: query heads of one rank.
            kv_heads: key/value heads of one rank.
        """
        heads = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        return sum(head_dim * heads[p] * SAVED[v] for p, v in self.variants.items())

    def __str__(self) -> str:
        """Short form for logs: ``query=linear key=linear value=linear``."""
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        return " ".join(words) or "nothing (baseline)"


PRESETS: Mapping[str, Mapping[str, Variant]] = MappingProxyType(
    {
        "baseline": {},
        "kha_mlp": {"value": "mlp"},
        "kha_linear": {"query": "linear", "key": "linear", "value": "linear"},
        "kha_linear_v": {"value": "linear"},
        "kha_gate_v": {"value": "gate"},
        "kha_mlp_qkv": {"query": "mlp", "key": "mlp", "value": "mlp"},
    }
)
"""Named configurations. ``kha_mlp`` is the paper's choice for MoE models, ``kha_linear`` for dense
models and MLA (section 4.3); ``kha_gate_v`` is Table 2's harmful ablation."""


def check_latent_attention(kha: KHAConfig) -> None:
    """Refuse what multi-latent attention cannot carry.

    Raises:
        ConfigError: a variant that does not fold away, with the paper's reason (section 4.2.3), or
            linear ones, which this version does not have for MLA.
    """
    nonlinear = [f"{p}={v}" for p, v in kha.variants.items() if v != "linear"]
    if nonlinear:
        raise ConfigError(
            f"KHA {' '.join(nonlinear)} on multi-latent attention: MLA never forms q, k and v at "
            "inference, so only matrices that fold away are allowed: use linear"
        )
    if kha.variants:
        raise ConfigError(
            f"KHA {kha} on multi-latent attention is not available in this version: "
            "use MHA, MQA or GQA, or the baseline preset"
        )
