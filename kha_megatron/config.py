"""Configuration of KHA and the other head mechanisms."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Self, get_args, get_type_hints

from kha_megatron.errors import ConfigError, raise_first
from kha_megatron.heads import (
    CollaborativeHeads,
    Gate,
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Knock,
    Mechanism,
    MixtureOfHeads,
    Projection,
    TalkingHeads,
)
from kha_megatron.heads.knock import PROJECTIONS, KnockSettings

AttentionKind = Literal["gta", "gla"]

CONFIG_VARIABLE = "KHA_CONFIG"
"""Environment variable with settings for layer specs (JSON, or the path to a JSON file)."""

ATTENTIONS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Attention types that Megatron doesn't have: Grouped-Tied and Grouped Latent Attention
(https://arxiv.org/abs/2505.21487)."""


@dataclass(frozen=True, kw_only=True)
class KHAConfig(KnockSettings):
    """Configuration of KHA and all other head mechanisms of a model.

    All of them are disabled by default. In most cases, you can start from a preset::

        config = KHAConfig.from_preset("kha_mlp")
        config = KHAConfig(value="mlp", gate=Gate(output="head"))
    """

    attention: AttentionKind | None = None
    """``gta`` ties keys and values (use ``value`` to apply KHA to the tied state). ``gla`` splits
    the MLA latent into heads. If None, the attention type depends on Megatron's own arguments."""
    latent_heads: int = 2
    """Number of latent heads for ``gla`` (the paper's GLA-2 has 2)."""
    collaborative: CollaborativeHeads | None = None
    """Share one query and one key between all heads."""
    talking: TalkingHeads | None = None
    """Mix attention logits and attention weights across heads."""
    gate: Gate | None = None
    """Gate queries, keys, values or outputs."""
    moh: MixtureOfHeads | None = None
    """Let a router pick the heads that each token uses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_gla = self.attention == "gla"
        if self.latent_heads < 1 or not (is_gla or self.latent_heads == type(self).latent_heads):
            raise ConfigError(
                "kha_latent_heads must be at least 1 and is only supported with kha_attention=gla, "
                f"got {self.latent_heads} with kha_attention={self.attention}."
            )
        if self.attention == "gta" and self.key is not None:
            raise ConfigError(
                f"kha_key={self.key} is not supported with kha_attention=gta, because GTA ties "
                "keys to values. Use kha_value to apply KHA to the tied state."
            )
        gated = self.gate.positions if self.gate else {}
        for mechanism in self.mechanisms:
            for projection in mechanism.own_projections:
                found = f"gate.{projection}" if projection in gated else None
                if found := f"--kha-{projection}" if getattr(self, projection) else found:
                    raise ConfigError(
                        f"{found} is not supported with {mechanism}, because all heads share the "
                        f"same {projection}. Please remove {found}."
                    )
        if self.attention:
            self.check(HeadFacts(multi_latent=is_gla))

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Build a preset, e.g. ``KHAConfig.from_preset("kha_mlp", init="random")``."""
        if name not in PRESETS:
            similar = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"Did you mean {similar[0]}? " if similar else ""
            raise ConfigError(
                f"Unknown KHA preset {name!r}. {hint}Available presets: {', '.join(PRESETS)}."
            )
        return cls.from_dict({**PRESETS[name], **overrides})

    @classmethod
    def from_presets(cls, names: Sequence[str]) -> Self:
        """Combine several presets, e.g. ``("kha_mlp", "gate_output")``.

        Raises:
            ConfigError: If a preset doesn't exist, or if two presets conflict.
        """
        values: dict[str, Any] = {}
        for name in names:
            cls.from_preset(name)  # raises if the preset is unknown
            for setting, value in PRESETS[name].items():
                earlier = values.get(setting, {})
                is_mechanism = isinstance(value, Mapping)
                if setting in values and not (is_mechanism and earlier.keys().isdisjoint(value)):
                    raise ConfigError(
                        f"Presets {', '.join(names)} cannot be combined, because more than one of "
                        f"them sets {setting}."
                    )
                values[setting] = {**earlier, **value} if is_mechanism else value
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from a dict (see :meth:`to_dict`)."""
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise ConfigError(
                f"Unknown KHA setting {', '.join(unknown)}. Available settings: "
                f"{', '.join(f.name for f in fields(cls))}."
            )
        types = mechanism_types(cls)
        read: dict[str, Any] = {
            name: types[name].from_dict(value)
            if name in types and not isinstance(value, Mechanism | None)
            else value
            for name, value in values.items()
        }
        return cls(**read)

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self | None:
        """Build a config from command-line options.

        Args:
            given: Option values by field name, plus ``preset`` and ``heads`` (the list of
                ``--heads`` arguments). Use None for options that the user didn't pass, and
                ``"none"`` to disable something that is part of the preset.

        Returns:
            The config, or None if there's neither a preset nor a mechanism.
        """
        words = {name: value for name, value in given.items() if value is not None}
        preset = words.pop("preset", None)
        words = parse_heads(words.pop("heads", ())) | words
        if preset is None and not words.keys() & {*PROJECTIONS, *mechanism_types(cls)}:
            return None
        words |= {name: None for name in PROJECTIONS if words.get(name) == "none"}
        if preset in PRESETS:  # options override settings of the preset's mechanisms
            for name in mechanism_types(cls).keys() & words.keys() & PRESETS[preset].keys():
                words[name] = words[name] and {**PRESETS[preset][name], **words[name]}
        return cls.from_preset(preset or "baseline", **words)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Load the config of a saved model. Returns None if the model doesn't use KHA.

        ``entries`` can be a Hugging Face ``config.json`` or the args in a Megatron checkpoint. Our
        settings start with ``kha_``. For Megatron, we also have to check ``spec`` (it may name a
        preset) and ``attention_output_gate``.
        """
        gated = entries.get("attention_output_gate") is True
        names = {f"kha_{f.name}": f.name for f in fields(cls) if f.compare}
        values = {name: entries[entry] for entry, name in names.items() if entry in entries}
        if not values.keys() & {*PROJECTIONS, *mechanism_types(cls)}:
            module, name = (*(entries.get("spec") or ()), None, None)[:2]
            is_preset = module == "kha_megatron.mcore.specs" and name in PRESETS
            if not (is_preset or gated):
                return None
            return cls.from_preset(name if is_preset else "baseline").with_output_gate(gated)
        values |= {name: None for name in PROJECTIONS if values.get(name) == "none"}
        return cls.from_dict(values).with_output_gate(gated)

    def to_entries(self, *, multi_latent: bool = False) -> dict[str, Any]:
        """Inverse of :meth:`from_entries`, for Megatron args."""
        entries = {f"kha_{name}": value for name, value in self.to_dict().items()}
        # Megatron's own output gate is not available for MLA
        if self.has_output_gate and not multi_latent:
            entries["attention_output_gate"] = True
        return entries

    @property
    def has_output_gate(self) -> bool:
        """Whether Megatron's ``--attention-output-gate`` would do the same as our output gate."""
        return self.gate is not None and self.gate.is_stock

    def with_output_gate(self, asked: bool) -> Self:
        """Add the gate of ``--attention-output-gate`` if ``asked``. Does nothing for GTA and GLA.

        Raises:
            ConfigError: If this conflicts with the existing gates.
        """
        if not asked or self.has_output_gate or self.attention is not None:
            return self
        gate = Gate(output="element") if self.gate is None else self.gate
        if gate.output is None:
            gate = replace(gate, output="element")
        if not gate.is_stock:
            raise ConfigError(
                "--attention-output-gate is the same as gate.output=element with its defaults and "
                f"cannot be combined with {self.gate}. Use only one of them."
            )
        return replace(self, gate=gate)

    def without_output_gate(self) -> Self:
        """Remove the output gate if Megatron can apply it itself."""
        if self.gate is None or not self.gate.is_stock:
            return self
        others = len(self.gate.positions) > 1
        return replace(self, gate=replace(self.gate, output=None) if others else None)

    def to_dict(self, *, start: bool = True) -> dict[str, Any]:
        """Convert to a JSON-serializable dict, e.g. for checkpoints.

        Disabled mechanisms and runtime settings such as ``fold`` are left out, and with
        ``start=False`` also ``init`` and ``init_seed``.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        if not start:
            del values["init"], values["init_seed"]
        for name in mechanism_types(type(self)):
            if (mechanism := values.pop(name)) is not None:
                values[name] = mechanism.to_dict()
        return values

    def to_options(self) -> dict[str, Any]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        heads = []
        for name in mechanism_types(type(self)):
            if (mechanism := given.pop(name)) is not None:
                heads.append(name)
                for setting, value in mechanism.non_defaults().items():
                    word = value if isinstance(value, str) else json.dumps(value)
                    heads.append(f"{name}.{setting}={word}")
        given |= {projection: given[projection] or "none" for projection in PROJECTIONS}
        return {"preset": "baseline", **given, "heads": tuple(heads) or None}

    def without(self, *names: str) -> Self:
        """Disable mechanisms by name. Use ``"knock"`` for KHA itself."""
        return self._replace(type(self)(), names)

    def merge(self, other: Self) -> Self:
        """Return a copy that also has the mechanisms of ``other``."""
        return self._replace(other, [mechanism.name for mechanism in other.mechanisms])

    def _replace(self, source: Self, names: Sequence[str]) -> Self:
        taken = {n for n in names if n != Knock.name}
        taken |= {f.name for f in fields(Knock)} if Knock.name in names else set()
        return replace(self, **{name: getattr(source, name) for name in taken})

    @property
    def knock(self) -> Knock:
        return Knock(**{f.name: getattr(self, f.name) for f in fields(Knock)})

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """All enabled mechanisms, in the order in which they are applied."""
        return (*([self.knock] if self.variants else []), *self.other_mechanisms)

    @property
    def other_mechanisms(self) -> tuple[Mechanism, ...]:
        found = (getattr(self, name) for name in mechanism_types(type(self)))
        return tuple(mechanism for mechanism in found if mechanism is not None)

    @property
    def own_projections(self) -> tuple[Projection, ...]:
        """Projections that a mechanism computes instead of ``linear_qkv``."""
        return tuple(projection for m in self.mechanisms for projection in m.own_projections)

    @property
    def is_foldable(self) -> bool:
        """Whether we can fold everything into the weights of a stock model."""
        return all(mechanism.is_foldable for mechanism in self.mechanisms)

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        return tuple(t for mechanism in self.mechanisms for t in mechanism.tensors(sizes))

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        return tuple(r for mechanism in self.mechanisms for r in mechanism.rows(sizes))

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        return sum(mechanism.parameters(sizes, tp) for mechanism in self.mechanisms)

    def flops(self, sizes: HeadSizes) -> int:
        return sum(mechanism.flops(sizes) for mechanism in self.mechanisms)

    def pair_flops(self, sizes: HeadSizes) -> int:
        return sum(mechanism.pair_flops(sizes) for mechanism in self.mechanisms)

    def activations(self, sizes: HeadSizes) -> int:
        return sum(mechanism.activations(sizes) for mechanism in self.mechanisms)

    def sharded_activations(self, sizes: HeadSizes) -> int:
        return sum(mechanism.sharded_activations(sizes) for mechanism in self.mechanisms)

    def pair_activations(self, sizes: HeadSizes) -> int:
        return sum(mechanism.pair_activations(sizes) for mechanism in self.mechanisms)

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        reasons = (mechanism.unfused_reason(sizes) for mechanism in self.mechanisms)
        return next((why for why in reasons if why), None)

    def check(self, facts: HeadFacts) -> None:
        """Raise ConfigError if this config doesn't work with the given model."""
        if self.attention and facts.multi_latent != (self.attention == "gla"):
            needs = "does not support" if facts.multi_latent else "requires"
            raise ConfigError(f"kha_attention={self.attention} {needs} --multi-latent-attention.")
        facts = replace(facts, attention=self.attention)
        for mechanism in self.mechanisms:
            if why := mechanism.unsupported_reason(facts):
                raise ConfigError(why)
        if self.mechanisms or self.attention:
            mistakes = {
                "Multi-token prediction with KHA requires a hybrid model (--hybrid-layer-pattern "
                "'*-*-/*-'), because GPTModel builds these layers without the layer spec.": (
                    facts.predictions
                ),
                f"{self} does not support --flash-decode.": facts.flash_decode,
            }
            raise_first(mistakes)

    def __str__(self) -> str:
        """Short description for logs, e.g. ``query=linear key=linear`` or ``value=mlp in gta``."""
        words = " ".join(str(m) for m in self.mechanisms) or str(Knock())
        kind = f" in {self.attention}" if self.attention else ""
        if self.attention == "gla" and self.latent_heads != type(self).latent_heads:
            kind += f" of {self.latent_heads}"
        return words + kind


def mechanism_types(config: type = KHAConfig) -> Mapping[str, type[Mechanism]]:
    """Map field names of the config to mechanism classes (except ``Knock``)."""
    return _mechanism_types(config)


@cache
def _mechanism_types(config: type) -> Mapping[str, type[Mechanism]]:
    return {
        name: kind
        for name, hint in get_type_hints(config).items()
        for kind in get_args(hint)
        if isinstance(kind, type) and issubclass(kind, Mechanism)
    }


def parse_heads(words: Iterable[str]) -> dict[str, Any]:
    """Parse ``--heads`` arguments into a dict of config fields.

    Supported arguments:

    - ``gate.output=head`` sets a field. The value is parsed as JSON and otherwise used as a string.
    - ``talking`` enables a mechanism with its default settings.
    - ``moh=none`` disables a mechanism, e.g. one from a preset.

    KHA itself is called ``knock`` here, e.g. ``knock.value=mlp`` is equivalent to
    ``--kha-value mlp``.
    """
    result: dict[str, Any] = {}
    known, knock = (Knock.name, *mechanism_types()), [f.name for f in fields(Knock)]
    for word in words:
        path, equals, text = word.partition("=")
        name, dot, setting = path.partition(".")
        is_complete = equals if dot else not equals or text == "none"
        is_known = name in known and (name != Knock.name or setting in knock)
        if not (is_complete and is_known):
            raise ConfigError(
                f"Invalid value {word!r} for --heads. Use NAME.FIELD=VALUE, NAME or NAME=none, "
                f"where NAME is one of {', '.join(known)}."
            )
        if name == Knock.name:
            result[setting] = _parse_value(text)
        elif dot:
            result[name] = (result.get(name) or {}) | {setting: _parse_value(text)}
        else:
            result[name] = None if equals else result.get(name) or {}
    return result


def _parse_value(text: str) -> Any:
    try:
        return None if text == "none" else json.loads(text)
    except (ValueError, RecursionError):
        return text


_OTHERS = {
    preset: {name: dict(settings)}
    for name, mechanism in mechanism_types().items()
    for preset, settings in mechanism.presets.items()
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    dict(Knock.presets)
    | _OTHERS
    | {
        f"{knock}_{other}": {**Knock.presets[knock], **_OTHERS[other]}
        for knock in ("kha_linear", "kha_mlp")
        for other in ("gate_output", "moh_75")
    }
)
"""All presets by name, including a few combinations such as ``kha_mlp_gate_output``."""
