"""What is knocked, and how: the one configuration object every room shares.

Knocking-Heads Attention (arXiv 2510.23052, section 3.2) passes each head's query, key or value
through small matrices that all heads of the layer share. This module only names the choice; the
maths is in ``kha_megatron.ops``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, Self

from kha_megatron.errors import ConfigError

Variant = Literal["linear", "mlp", "gate"]
Init = Literal["identity", "random"]
Projection = Literal["query", "key", "value"]
AttentionKind = Literal["gta", "gla"]
Fold = Literal["auto", "always", "never"]

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

FOLDS: tuple[Fold, ...] = ("auto", "always", "never")

ATTENTIONS: tuple[AttentionKind, ...] = ("gta", "gla")
"""Kinds of attention that Megatron has no flag for (Zadouri et al. 2025, arXiv 2505.21487):
Grouped-Tied and Grouped Latent Attention. MHA, MQA, GQA and MLA are Megatron's to choose."""


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

    attention: AttentionKind | None = None
    """``gta`` ties keys and values: ``value`` then names what is applied to the tied state, which
    is the value and half of the key. ``gla`` is latent attention whose latent is cut into heads.
    None is what Megatron's own flags ask for: MHA, MQA, GQA, or MLA."""

    latent_heads: int = 2
    """Heads of the latent in ``gla`` (two in the paper's GLA-2). Nothing else has any."""

    fold: Fold = field(default="auto", compare=False)
    """Whether Megatron folds linear matrices into the weight before them while it trains
    (``kha_megatron.mcore.folding``) or applies them to activations: ``auto`` does what is faster
    for the size of the microbatch. How a model is run, not what it is: two configurations that
    differ here are equal, and neither checkpoints nor exports record it."""

    def __post_init__(self) -> None:
        for projection in PROJECTIONS:
            parse_variant(getattr(self, projection))
            if getattr(self, projection) == "none":
                raise ConfigError(f"KHAConfig({projection}='none'): write None")
        if self.init not in INITS:
            raise ConfigError(f"unknown KHA init {self.init!r}: choose one of {', '.join(INITS)}")
        if type(self.init_seed) is not int:
            raise ConfigError(f"KHA init_seed {self.init_seed!r} is not a whole number")
        self._check_attention()
        self._check_fold()

    def _check_fold(self) -> None:
        if self.fold not in FOLDS:
            raise ConfigError(f"unknown KHA fold {self.fold!r}: choose one of {', '.join(FOLDS)}")
        if self.fold == "always" and "linear" not in self.variants.values():
            raise ConfigError(
                f"KHA fold=always, and nothing linear to fold in {self}: use auto, or a linear "
                "variant"
            )

    def _check_attention(self) -> None:
        if self.attention not in (None, *ATTENTIONS):
            raise ConfigError(
                f"unknown KHA attention {self.attention!r}: choose one of {', '.join(ATTENTIONS)}, "
                "or none for what Megatron's own flags ask for"
            )
        if type(self.latent_heads) is not int or self.latent_heads < 1:
            raise ConfigError(f"KHA latent_heads {self.latent_heads!r}: use 1 or more")
        if self.attention != "gla" and self.latent_heads != type(self).latent_heads:
            raise ConfigError(
                f"KHA latent_heads={self.latent_heads} without attention=gla, which alone has "
                "them: remove one"
            )
        if self.attention == "gta" and self.key is not None:
            raise ConfigError(
                f"KHA key={self.key} on grouped-tied attention: half of a key is the tied state, "
                "which value= knocks, and the other half is one head that all share: leave key out"
            )
        if self.attention == "gla":
            check_latent_attention(self)

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
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(
                f"unknown KHA setting {', '.join(unknown)}: written by another version of "
                f"kha-megatron; known are {', '.join(f.name for f in fields(cls))}"
            )
        return cls(**values)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Read ``kha_query``, ``kha_key``, ``kha_value``, ``kha_init`` and so on; not ``fold``.

        Args:
            entries: Megatron's arguments or a Hugging Face ``config.json``. Megatron's may record
                a preset by the name of its ``spec`` instead.

        Returns:
            None when it names none of the three projections: it was not written with KHA in mind.

        Raises:
            ConfigError: a variant or an init that does not exist.
        """
        names = {f"kha_{f.name}": f.name for f in fields(cls) if f.compare}
        values = {name: entries[entry] for entry, name in names.items() if entry in entries}
        if not set(PROJECTIONS) & set(values):
            module, name = (*(entries.get("spec") or ()), None, None)[:2]
            is_preset = module == "kha_megatron.mcore.specs" and name in PRESETS
            return cls.from_preset(name) if is_preset else None
        for projection in PROJECTIONS:
            values[projection] = parse_variant(values.get(projection))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """What the model is, as plain JSON values: all fields but ``fold``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}

    @property
    def variants(self) -> dict[Projection, Variant]:
        """The knocked projections and their variants; empty for the baseline."""
        return {p: v for p in PROJECTIONS if (v := getattr(self, p)) is not None}

    def parameters_per_layer(self, head_dim: int, value_dim: int | None = None) -> int:
        """How many parameters one layer gains.

        Args:
            head_dim: ``D``; in latent attention the no-position features of a query or key head.
            value_dim: features of a value head; as ``head_dim`` if None.
        """
        dims = _dims(head_dim, value_dim)
        return sum(len(MATRICES[v]) * dims[p] ** 2 for p, v in self.variants.items())

    def forward_flops_per_token(
        self, head_dim: int, query_heads: int, kv_heads: int, value_dim: int | None = None
    ) -> int:
        """Matrix-multiplication FLOPs that one layer gains per token in the forward pass.

        Each ``[D, D]`` matrix costs ``2 D^2`` per head of its tensor. With ``n`` query and ``n``
        key/value heads of ``D = d / n`` features and three matrices this is the paper's
        ``6 d^2 / n`` (eq. 12). The backward pass costs twice as much: training takes three times
        this number, by which Megatron too multiplies its own.

        Matrices count as applied to activations. Linear ones cost nothing per token once they are
        folded into the projection. Sigmoids and element-wise products are left out, as in eq. 12
        and in Megatron's own count.

        Args:
            head_dim: ``D``; in latent attention the no-position features of a query or key head.
            query_heads: query heads of the whole layer.
            kv_heads: key/value heads of the whole layer; latent attention has as many as query
                heads.
            value_dim: features of a value head; as ``head_dim`` if None.
        """
        heads = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        dims = _dims(head_dim, value_dim)
        return sum(2 * dims[p] ** 2 * heads[p] * len(MATRICES[v]) for p, v in self.variants.items())

    def saved_elements_per_token(
        self, head_dim: int, query_heads: int, kv_heads: int, value_dim: int | None = None
    ) -> int:
        """Elements per token that one layer keeps for the backward pass, without recomputing.

        Args:
            head_dim: ``D``; in latent attention the no-position features of a query or key head.
            query_heads: query heads of one rank.
            kv_heads: key/value heads of one rank.
            value_dim: features of a value head; as ``head_dim`` if None.
        """
        heads = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        dims = _dims(head_dim, value_dim)
        return sum(dims[p] * heads[p] * SAVED[v] for p, v in self.variants.items())

    def __str__(self) -> str:
        """Short form for logs: ``query=linear key=linear value=linear``, ``value=mlp in gta``."""
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        kind = f" in {self.attention}" if self.attention else ""
        if self.attention == "gla" and self.latent_heads != type(self).latent_heads:
            kind += f" of {self.latent_heads}"
        return (" ".join(words) or "nothing (baseline)") + kind


def _dims(head_dim: int, value_dim: int | None) -> dict[Projection, int]:
    return {"query": head_dim, "key": head_dim, "value": value_dim or head_dim}


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
    """Refuse what latent attention (MLA, GLA) cannot carry.

    Raises:
        ConfigError: a variant that does not fold away, with the paper's reason (section 4.2.3).
    """
    nonlinear = [f"{p}={v}" for p, v in kha.variants.items() if v != "linear"]
    if nonlinear:
        raise ConfigError(
            f"KHA {' '.join(nonlinear)} on multi-latent attention: MLA never forms q, k and v at "
            "inference, so only matrices that fold away are allowed: use linear"
        )


def check_attention_kind(kha: KHAConfig, *, multi_latent: bool) -> None:
    """Refuse a kind of attention that Megatron's own choice contradicts.

    Args:
        multi_latent: whether Megatron was asked for ``--multi-latent-attention``.

    Raises:
        ConfigError: naming both, or what latent attention cannot carry.
    """
    if kha.attention == "gta" and multi_latent:
        raise ConfigError(
            "attention=gta and --multi-latent-attention are two kinds of attention: remove one"
        )
    if kha.attention == "gla" and not multi_latent:
        raise ConfigError(
            "attention=gla takes its sizes from Megatron's multi-latent attention: add "
            "--multi-latent-attention (with --kv-lora-rank for all latent heads together)"
        )
    if multi_latent:
        check_latent_attention(kha)
