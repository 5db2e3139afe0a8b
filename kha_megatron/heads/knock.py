"""Knocking heads (arXiv 2510.23052, section 3.2): matrices shared by all heads of a layer.

The maths is in ``kha_megatron.ops.heads.knock``.
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
"""Projections that can be knocked, in Megatron's order."""

MATRICES: Mapping[Variant, tuple[str, ...]] = MappingProxyType(
    {"linear": ("proj",), "mlp": ("up", "gate", "down"), "gate": ("gate",)}
)
"""Names of the ``[D, D]`` matrices of each variant, in stacking order."""

SAVED: Mapping[Variant, int] = MappingProxyType({"linear": 1, "mlp": 4, "gate": 3})
"""Tensors of the input's size that ``ops.knock`` keeps for backward: the input; for ``gate`` also
both factors; for ``mlp`` also both factors and their product."""

INITS: tuple[Init, ...] = get_args(Init)

FOLDS: tuple[Fold, ...] = get_args(Fold)


def parse_variant(text: str | None) -> Variant | None:
    """Parse the name of a variant; ``"none"`` is None. Raises ConfigError for any other word."""
    if text is None or text == "none":
        return None
    if not isinstance(text, str) or text not in MATRICES:  # JSON may hold anything
        raise ConfigError(
            f"unknown KHA variant {text!r}: choose one of {', '.join(MATRICES)} or none"
        )
    return cast(Variant, text)


@dataclass(frozen=True, kw_only=True)
class KnockSettings:
    """Variants of the knocked projections. Fields of ``Knock`` and of ``KHAConfig``.

    Raises:
        ConfigError: a field has an invalid value.
    """

    query: Variant | None = None
    """Variant for query heads, before QK-norm and RoPE."""
    key: Variant | None = None
    """Variant for key heads, before QK-norm and RoPE."""
    value: Variant | None = None
    """Variant for value heads."""
    init: Init = "identity"
    """``identity`` (section 3.3) starts as a bit-exact no-op. ``random`` is the paper's ablation,
    which trains to a much higher loss."""
    init_seed: int = 1234
    """Seed of ``init="random"``, independent of the random state of a rank."""
    fold: Fold = field(default="auto", compare=False)
    """Whether Megatron folds linear matrices into the QKV weight during training
    (``kha_megatron.mcore.folding``). ``auto`` chooses by the size of the microbatch. Does not
    affect equality, and is not stored in checkpoints or exports."""

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
        """The knocked projections and their variants."""
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
    """The paper uses ``kha_mlp`` for MoE models, ``kha_linear`` for dense models and MLA (section
    4.3). ``kha_gate_v`` is the harmful ablation of Table 2."""

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Return ``knock_{projection}`` ``[n, D, D]`` per projection, applied as ``x @ W``."""
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
        """Count ``2 D^2`` per matrix and head (eq. 12: ``6 d^2 / n``), as applied to activations.

        Sigmoids and element-wise products are not counted, as in eq. 12 and in Megatron.
        """
        return sum(
            2 * sizes.dim(p) ** 2 * sizes.heads(p) * len(MATRICES[v])
            for p, v in self.variants.items()
        )

    def saved(self, sizes: HeadSizes) -> int:
        """Count what ``ops.knock`` keeps (:data:`SAVED`), without folding."""
        return sum(sizes.dim(p) * sizes.heads(p) * SAVED[v] for p, v in self.variants.items())

    @property
    def folds(self) -> bool:
        """Whether all matrices are linear: QK-norm and RoPE come after the knock (eq. 8)."""
        return set(self.variants.values()) <= {"linear"}

    def doubled(self) -> tuple[()]:
        """Return (): it starts as the identity. Raises ConfigError for a random start."""
        if self.init != "identity":
            raise ConfigError(f"KHA on {self} is no start for a trained model: leave init out")
        return ()

    def refusal(self, facts: HeadFacts) -> str | None:
        """Refuse nonlinear variants and ``fold=always`` on MLA and GLA (section 4.2.3)."""
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
        """Format for logs: ``query=linear key=linear``."""
        words = [f"{projection}={variant}" for projection, variant in self.variants.items()]
        if words and self.init != "identity":
            words.append(f"init={self.init}")
        return " ".join(words) or "nothing (baseline)"


def starts_of(variant: Variant, init: Init = "identity") -> tuple[Start, ...]:
    """Return the initial values of a variant's matrices. Gates start at zero: ``2 * sigmoid(0) =
    1``."""
    if init == "random":
        return tuple("normal" for _ in MATRICES[variant])
    return tuple("zeros" if name == "gate" else "identity" for name in MATRICES[variant])


def module_name(matrix: str) -> str:
    """Return the name of a matrix in our transformers class: ``up_proj`` for ``up``."""
    return matrix if matrix == "proj" else f"{matrix}_proj"
