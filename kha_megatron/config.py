"""Configuration of KHA and the other head mechanisms."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from kha_megatron.errors import ConfigError, raise_first
from kha_megatron.heads import (
    Costs,
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Knock,
    Mechanism,
    Projection,
    registry,
)
from kha_megatron.heads.knock import PROJECTIONS, KnockSettings
from kha_megatron.heads.registry import OutputGate, mechanism_types

AttentionKind = Literal["gta", "gla"]

CONFIG_VARIABLE = "KHA_CONFIG"
"""Environment variable with settings for layer specs (JSON, or the path to a JSON file)."""

ATTENTIONS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Attention types that Megatron does not have: Grouped-Tied and Grouped Latent Attention
(https://arxiv.org/abs/2505.21487)."""


@dataclass(frozen=True, kw_only=True, init=False)
class KHAConfig(KnockSettings):
    """Configuration of KHA and all other head mechanisms of a model.

    All of them are disabled by default. In most cases, you can start from a preset::

        config = KHAConfig.from_preset("kha_mlp")
        config = KHAConfig(value="mlp", gate=Gate(output="head"))  # from kha_megatron.heads

    Every registered mechanism is a keyword argument and an attribute (None if it is disabled).
    """

    attention: AttentionKind | None = None
    """``gta`` ties keys and values (use ``value`` to apply KHA to the tied state). ``gla`` splits
    the MLA latent into heads. If None, the attention type depends on Megatron's own arguments."""
    latent_heads: int = 2
    """Number of latent heads for ``gla`` (the paper's GLA-2 has 2)."""
    other_mechanisms: tuple[Mechanism, ...] = ()
    """All enabled mechanisms except KHA itself, in the order in which they are applied."""

    def __init__(self, **settings: Any) -> None:
        types = mechanism_types()
        given = {m.name: m for m in settings.pop("other_mechanisms", ())}
        given |= {name: settings.pop(name) for name in types.keys() & settings}
        for name, mechanism in given.items():
            if not isinstance(mechanism, types[name] | None):
                raise ConfigError(f"{name} must be a {types[name].__name__}, got {mechanism!r}.")
        settings["other_mechanisms"] = tuple(m for n in types if (m := given.get(n)) is not None)
        for item in fields(self):
            object.__setattr__(self, item.name, settings.pop(item.name, item.default))
        if settings:
            raise TypeError(f"Unknown KHA setting {', '.join(settings)}.")
        self.__post_init__()

    if not TYPE_CHECKING:  # else mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name not in mechanism_types():
                raise AttributeError(f"KHAConfig has no attribute {name!r}.")
            return next((m for m in self.other_mechanisms if m.name == name), None)

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
        for mechanism in self.mechanisms:
            for projection in mechanism.own_projections:
                names = (other.setting_of(projection) for other in self.mechanisms)
                if found := next(filter(None, names), None):
                    raise ConfigError(
                        f"{found} is not supported with {mechanism}, because all heads share the "
                        f"same {projection}. Please remove {found}."
                    )
        if self.attention:
            self.check(HeadFacts(multi_latent=is_gla))

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Build a preset, e.g. ``KHAConfig.from_preset("kha_mlp", init="random")``.

        Several presets are joined with ``+``, e.g. ``kha_mlp+gate_output``.

        Raises:
            ConfigError: If a preset does not exist, or if two presets conflict.
        """
        return cls.from_dict(preset_settings(name) | overrides)

    @classmethod
    def from_presets(cls, names: Sequence[str]) -> Self:
        """Combine several presets, e.g. ``("kha_mlp", "gate_output")``."""
        return cls.from_preset("+".join(names))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from a dict (see :meth:`to_dict`)."""
        types, known = mechanism_types(), setting_names()
        if unknown := sorted(set(values) - {*known}):
            raise ConfigError(
                f"Unknown KHA setting {', '.join(unknown)}. Available settings: {', '.join(known)}."
            )
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
            given: Option values by field name, plus ``preset``, ``heads`` and ``heads_from`` (the
                lists of ``--heads`` and ``--heads-from`` arguments). Use None for options that the
                user did not pass, and ``"none"`` to disable something that is part of the preset.

        Returns:
            The config, or None if there is neither a preset nor a mechanism.
        """
        words = {name: value for name, value in given.items() if value is not None}
        registry.use_files(words.pop("heads_from", ()))
        preset = words.pop("preset", None)
        words = parse_heads(words.pop("heads", ())) | words
        if preset is None and not words.keys() & {*PROJECTIONS, *mechanism_types()}:
            return None
        words |= {name: None for name in PROJECTIONS if words.get(name) == "none"}
        settings = preset_settings(preset or "baseline")
        # options override settings of the preset's mechanisms
        for name in mechanism_types().keys() & words.keys() & settings.keys():
            words[name] = words[name] and {**settings[name], **words[name]}
        return cls.from_dict(settings | words)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Load the config of a saved model. Returns None if the model does not use KHA.

        ``entries`` can be a Hugging Face ``config.json`` or the args in a Megatron checkpoint. Our
        settings start with ``kha_``. For Megatron, we also have to check ``spec`` (it may name a
        preset) and ``attention_output_gate``.

        Raises:
            ConfigError: If the model uses a mechanism of a package that is not installed.
        """
        gated = entries.get("attention_output_gate") is True
        registry.check_registered(entries.get("kha_providers") or {})
        names = {f"kha_{name}": name for name in setting_names()}
        values = {name: entries[entry] for entry, name in names.items() if entry in entries}
        if not values.keys() & {*PROJECTIONS, *mechanism_types()}:
            module, name = (*(entries.get("spec") or ()), None, None)[:2]
            is_preset = module == "kha_megatron.mcore.specs" and is_preset_name(str(name))
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
        return entries | self.providers_entry

    @property
    def providers_entry(self) -> dict[str, dict[str, str]]:
        """Record which package or file each external mechanism is from (empty without any)."""
        named = {m.name: registry.provider_of(m.name) for m in self.other_mechanisms}
        providers = {name: source for name, source in named.items() if source}
        return {"kha_providers": providers} if providers else {}

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the mechanisms that were registered with ``--heads-from``."""
        files = (registry.file_of(m.name) for m in self.other_mechanisms)
        return tuple(dict.fromkeys(path for path in files if path))

    @property
    def has_output_gate(self) -> bool:
        """Whether Megatron's ``--attention-output-gate`` would do the same as our output gate."""
        return self._gate is not None and self._gate.is_stock

    def with_output_gate(self, asked: bool) -> Self:
        """Add the gate of ``--attention-output-gate`` if ``asked``. Does nothing for GTA and GLA.

        Raises:
            ConfigError: If this conflicts with the existing gates.
        """
        if not asked or self.has_output_gate or self.attention is not None:
            return self
        gate = self._gate or OutputGate(output="element")
        if gate.output is None:
            gate = replace(gate, output="element")
        if not gate.is_stock:
            raise ConfigError(
                f"--attention-output-gate is the same as {gate.name}.output=element with its "
                f"defaults and cannot be combined with {self._gate}. Use only one of them."
            )
        return self._with(**{gate.name: gate})

    def without_output_gate(self) -> Self:
        """Remove the output gate if Megatron can apply it itself."""
        gate = self._gate
        if gate is None or not gate.is_stock:
            return self
        others = len(gate.positions) > 1
        return self._with(**{gate.name: replace(gate, output=None) if others else None})

    @property
    def _gate(self) -> OutputGate | None:
        return next((m for m in self.other_mechanisms if isinstance(m, OutputGate)), None)

    def to_dict(self, *, start: bool = True) -> dict[str, Any]:
        """Convert to a JSON-serializable dict, e.g. for checkpoints.

        Disabled mechanisms are left out, and with ``start=False`` also ``init`` and ``init_seed``.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not start:
            del values["init"], values["init_seed"]
        del values["other_mechanisms"]
        return values | {m.name: m.to_dict() for m in self.other_mechanisms}

    def to_options(self) -> dict[str, Any]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        heads = []
        for mechanism in given.pop("other_mechanisms"):
            heads.append(mechanism.name)
            for setting, value in mechanism.non_defaults().items():
                word = value if isinstance(value, str) else json.dumps(value)
                heads.append(f"{mechanism.name}.{setting}={word}")
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
        return self._with(**{name: getattr(source, name) for name in taken})

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)

    @property
    def knock(self) -> Knock:
        return Knock(**{f.name: getattr(self, f.name) for f in fields(Knock)})

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """All enabled mechanisms, in the order in which they are applied."""
        return (*([self.knock] if self.variants else []), *self.other_mechanisms)

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

    def costs(self, sizes: HeadSizes) -> Costs:
        return sum((mechanism.costs(sizes) for mechanism in self.mechanisms), Costs())

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        reasons = (mechanism.unfused_reason(sizes) for mechanism in self.mechanisms)
        return next((why for why in reasons if why), None)

    def check(self, facts: HeadFacts) -> None:
        """Raise ConfigError if this config does not work with the given model."""
        if self.attention and facts.multi_latent != (self.attention == "gla"):
            needs = "does not support" if facts.multi_latent else "requires"
            raise ConfigError(f"kha_attention={self.attention} {needs} --multi-latent-attention.")
        facts = replace(facts, attention=self.attention)
        for mechanism in self.mechanisms:
            if why := mechanism.unsupported_reason(facts):
                raise ConfigError(why)
        if self.mechanisms or self.attention:
            own = self if facts.multi_latent else self.without_output_gate()
            mistakes = {
                "Multi-token prediction with KHA requires a hybrid model (--hybrid-layer-pattern "
                "'*-*-/*-'), because GPTModel builds these layers without the layer spec.": (
                    facts.predictions and (own.mechanisms or own.attention)
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


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings that :meth:`KHAConfig.from_dict` accepts."""
    own = (f.name for f in fields(KHAConfig) if f.name != "other_mechanisms")
    return (*own, *mechanism_types())


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


class _Presets(Mapping[str, Mapping[str, Any]]):
    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return registry.presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(registry.presets())

    def __len__(self) -> int:
        return len(registry.presets())


PRESETS = _Presets()
"""All presets of the registered mechanisms by name, e.g. ``kha_mlp_gate_output``."""


def is_preset_name(name: str) -> bool:
    """Check that ``name`` is a preset or consists of several presets joined with ``+``."""
    return set(name.split("+")) <= PRESETS.keys()


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a preset, or of several presets joined with ``+``.

    Raises:
        ConfigError: If a preset does not exist, or if two presets conflict.
    """
    names = name.split("+")
    settings: dict[str, Any] = {}
    for preset in names:
        if preset not in PRESETS:
            similar = difflib.get_close_matches(preset, PRESETS, n=1)
            hint = f"Did you mean {similar[0]}? " if similar else ""
            raise ConfigError(
                f"Unknown KHA preset {preset!r}. {hint}Available presets: {', '.join(PRESETS)}. "
                "Join presets with + to combine them."
            )
        if names.count(preset) > 1:
            raise ConfigError(f"{name} contains the preset {preset} more than once.")
        for setting, value in PRESETS[preset].items():
            earlier = settings.get(setting, {})
            is_mechanism = isinstance(value, Mapping)
            if setting in settings and not (is_mechanism and earlier.keys().isdisjoint(value)):
                raise ConfigError(
                    f"Presets {', '.join(names)} cannot be combined, because more than one of them "
                    f"sets {setting}."
                )
            settings[setting] = {**earlier, **value} if is_mechanism else value
    return settings
