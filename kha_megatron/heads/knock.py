"""Knocking heads (arXiv 2510.23052, section 3.2): matrices that all heads of a layer share.

Each head's query, key or value passes through the matrices of a *variant*; the maths is in
``kha_megatron.ops.heads.knock``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, cast, get_args

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
    Start,
)

Variant = Literal["linear", "mlp", "gate"]
Init = Literal["identity", "random"]
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

INITS: tuple[Init, ...] = get_args(Init)

FOLDS: tuple[Fold, ...] = get_args(Fold)


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
    return cast(Variant, text)


@dataclass(frozen=True, kw_only=True)
class KnockSettings:
    """Which projected tensors are knocked, and how; fields of ``Knock`` and of ``KHAConfig``.

    Raises:
        ConfigError: a field holds a value that its type does not list.
    """

    query: Variant | None = None
    """Variant applied to the query heads, before QK-norm and RoPE."""
    key: Variant | None = None
    """Variant applied to the key heads, before QK-norm and RoPE."""
    value: Variant | None = None
    """Variant applied to the value heads."""
    init: Init = "identity"
    """``identity`` (section 3.3) starts as a bit-exact no-op. ``random`` reproduces the paper's
    ablation, which trains to a much higher loss."""
    init_seed: int = 1234
    """Seed of ``init="random"``. The draw does not depend on the random state of a rank."""
    fold: Fold = field(default="auto", compare=False)
    """Whether Megatron folds linear matrices into the weight before them during training
    (``kha_megatron.mcore.folding``) or applies them to activations. ``auto`` chooses by the size of
    the microbatch. Two configurations that differ only here are equal, and neither checkpoints nor
    exports record it."""

    def __post_init__(self) -> None:
        for projection in PROJECTIONS:
            parse_variant(getattr(self, projection))
            if getattr(self, projection) == "none":
                raise ConfigError(f"KHAConfig({projection}='none'): write None")
        if self.init not in INITS:
            raise ConfigError(f"unknown KHA init {self.init!r}: choose one of {', '.join(INITS)}")
        if type(self.init_seed) is not int:
            raise ConfigError(f"KHA init_seed {self.init_seed!r} is not a whole number")
        if self.fold not in FOLDS:
            raise ConfigError(f"unknown KHA fold {self.fold!r}: choose one of {', '.join(FOLDS)}")
        if self.fold == "always" and "linear" not in self.variants.values():
            raise ConfigError(
                f"KHA fold=always, and nothing linear to fold in {self}: use auto, or a linear "
                "variant"
            )

    @property
    def variants(self) -> dict[Projection, Variant]:
        """The knocked projections and their variants; empty for the baseline."""
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
    """``kha_mlp`` is the paper's choice for MoE models, ``kha_linear`` for dense models and MLA
    (section 4.3); ``kha_gate_v`` is Table 2's harmful ablation."""

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """For each knocked projection ``knock_{projection}`` ``[n, D, D]``: its ``n`` matrices,
        applied as ``x @ W``. They start as a bit-exact no-op (section 3.3), unless ``init`` is
        ``random``."""
        return tuple(
            HeadTensor(
                name=f"knock_{projection}",
                shape=(len(MATRICES[variant]), sizes.dim(projection), sizes.dim(projection)),
                gradient="heads",
                heads=projection,
                starts=starts_of(variant, self.init),
                hf=f"{projection[0]}_knock",
                matrices=tuple(module_name(matrix) for matrix in MATRICES[variant]),
            )
            for projection, variant in self.variants.items()
        )

    def flops(self, sizes: HeadSizes) -> int:
        """Each ``[D, D]`` matrix costs ``2 D^2`` per head of its tensor.

        With ``n`` query and ``n`` key/value heads of ``D = d / n`` features and three matrices this
        is the paper's ``6 d^2 / n`` (eq. 12). Matrices count as applied to activations: linear ones
        cost nothing per token once they are folded. Sigmoids and element-wise products are left
        out, as in eq. 12 and in Megatron's own count.
        """
        return sum(
            2 * sizes.dim(p) ** 2 * sizes.heads(p) * len(MATRICES[v])
            for p, v in self.variants.items()
        )

    def saved(self, sizes: HeadSizes) -> int:
        """What ``ops.knock`` keeps of each knocked tensor (:data:`SAVED`), without folding."""
        return sum(sizes.dim(p) * sizes.heads(p) * SAVED[v] for p, v in self.variants.items())

    @property
    def folds(self) -> bool:
        """Linear matrices do: QK-norm and RoPE come after the knock (eq. 8)."""
        return set(self.variants.values()) <= {"linear"}

    def doubled(self) -> tuple[()]:
        """Nothing, from the identity.

        Raises:
            ConfigError: it begins at random.
        """
        if self.init != "identity":
            raise ConfigError(f"KHA on {self} is no start for a trained model: leave init out")
        return ()

    def refusal(self, facts: HeadFacts) -> str | None:
        """What latent attention (MLA, GLA) cannot carry, with the paper's reason (4.2.3)."""
        if not facts.multi_latent:
            return None
        if nonlinear := [f"{p}={v}" for p, v in self.variants.items() if v != "linear"]:
            return (
                f"KHA {' '.join(nonlinear)} on multi-latent attention: MLA never forms q, k and v "
                "at inference, so only matrices that fold away are allowed: use linear"
            )
        if self.fold == "always":
            return (
                "fold=always with multi-latent attention, whose matrices are applied to "
                "activations while training: use --kha-fold auto"
            )
        return None

    def __str__(self) -> str:
        """``query=linear key=linear``, and how it starts unless at the identity."""
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        return " ".join(words) or "nothing (baseline)"


def starts_of(variant: Variant, init: Init = "identity") -> tuple[Start, ...]:
    """How each matrix of a variant starts: gates at zero, where ``2 * sigmoid(0)`` is 1."""
    if init == "random":
        return tuple("normal" for _ in MATRICES[variant])
    return tuple("zeros" if name == "gate" else "identity" for name in MATRICES[variant])


def module_name(matrix: str) -> str:
    """What our transformers class calls a matrix of :data:`MATRICES`: ``up`` is ``up_proj``."""
    return matrix if matrix == "proj" else f"{matrix}_proj"
