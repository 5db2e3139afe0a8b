"""Configuration of all head mechanisms of a model."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

from kha_megatron.errors import ConfigError
from kha_megatron.heads import registry
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.knock import PROJECTIONS, Knock, Variant
from kha_megatron.heads.mechanism import (
    Costs,
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
    check_fields,
    conflict_with_own_projections,
)
from kha_megatron.heads.registry import mechanism_types

AttentionKind = Literal["gta", "gla"]
MechanismT = TypeVar("MechanismT", bound=Mechanism)

CONFIG_VARIABLE = "KHA_CONFIG"
"""Environment variable with settings for layer specs (JSON, or the path to a JSON file)."""

ATTENTIONS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Attention types that Megatron does not have: Grouped-Tied and Grouped Latent Attention
(https://arxiv.org/abs/2505.21487)."""

INIT_SEED = 1234
LATENT_HEADS = 2
"""Default number of latent heads (the paper's GLA-2)."""

_KNOCK_DEFAULTS = {field.name: field.default for field in fields(Knock)}
_KNOCK_SETTINGS = tuple(_KNOCK_DEFAULTS)
_OTHER_SETTINGS = ("init_seed", "attention", "latent_heads")
"""Fields of :class:`HeadsConfig` that do not belong to a mechanism."""


@dataclass(frozen=True, init=False)
class HeadsConfig:
    """Head mechanisms of a model, in the order in which they are applied.

    Without arguments, there are none. In most cases, you can start from a preset::

        config = HeadsConfig.from_preset("kha_mlp")
        config = HeadsConfig(Knock(value="mlp"), Gate(output="head"))  # from kha_megatron.heads

    Raises:
        ConfigError: If a mechanism occurs twice, or if two settings conflict.
    """

    mechanisms: tuple[Mechanism, ...]
    init_seed: int
    """Mixed with layer numbers and tensor names to get the random seeds of initial values."""
    attention: AttentionKind | None
    """``gta`` ties keys and values (KHA for ``value`` then applies to the tied state). ``gla``
    splits the MLA latent into heads. If None, the attention type depends on Megatron's own
    arguments."""
    latent_heads: int
    """Number of latent heads for ``gla``."""

    def __init__(
        self,
        *mechanisms: Mechanism,
        init_seed: int = INIT_SEED,
        attention: AttentionKind | None = None,
        latent_heads: int = LATENT_HEADS,
    ) -> None:
        object.__setattr__(self, "mechanisms", _in_order(mechanisms))
        object.__setattr__(self, "init_seed", init_seed)
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "latent_heads", latent_heads)
        check_fields(self, "kha_")
        self._check_attention()
        self._check_own_projections()

    def _check_attention(self) -> None:
        is_gla = self.attention == "gla"
        is_default = self.latent_heads == LATENT_HEADS
        if self.latent_heads < 1 or not (is_gla or is_default):
            raise ConfigError(
                "kha_latent_heads must be at least 1 and is only supported with kha_attention=gla, "
                f"got {self.latent_heads} with kha_attention={self.attention}."
            )
        key = self.variants.get("key")
        if self.attention == "gta" and key is not None:
            raise ConfigError(
                f"kha_key={key} is not supported with kha_attention=gta, because GTA ties keys to "
                "values. Use kha_value to apply KHA to the tied state."
            )
        if self.attention:
            self.check(HeadFacts(multi_latent=is_gla))

    def _check_own_projections(self) -> None:
        conflict = conflict_with_own_projections(self.mechanisms)
        if conflict:
            raise ConfigError(conflict)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Build a preset, e.g. ``HeadsConfig.from_preset("kha_mlp", init="random")``.

        Several presets are joined with ``+``, e.g. ``kha_mlp+gate_output``. ``overrides`` are
        settings as in :meth:`to_dict`.

        Raises:
            ConfigError: If a preset does not exist, or if two presets conflict.
        """
        return cls.from_dict(preset_settings(name) | overrides)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Build a config from a dict (see :meth:`to_dict`). Missing settings have defaults."""
        _check_known(settings)
        mechanisms: list[Mechanism] = []
        knock_settings = _select(settings, _KNOCK_SETTINGS)
        default_settings = _select(_KNOCK_DEFAULTS, knock_settings)
        if knock_settings != default_settings:  # the defaults mean that KHA is disabled
            mechanisms.append(Knock(**knock_settings))
        for name, mechanism_type in mechanism_types().items():
            value = settings.get(name)
            if isinstance(value, mechanism_type):
                mechanisms.append(value)
            elif value is not None:
                mechanism = mechanism_type.from_dict(value)
                mechanisms.append(mechanism)
        other_settings = _select(settings, _OTHER_SETTINGS)
        return cls(*mechanisms, **other_settings)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self | None:
        """Build a config from command-line options.

        Args:
            options: Option values by setting, plus ``preset``, ``heads`` and ``heads_from`` (the
                lists of ``--heads`` and ``--heads-from`` arguments). Use None for options that the
                user did not pass, and ``"none"`` to disable something that is part of the preset.

        Returns:
            The config, or None if there is neither a preset nor a mechanism.
        """
        passed: dict[str, Any] = {}
        for name, value in options.items():
            if value is not None:
                passed[name] = value
        files = passed.pop("heads_from", ())
        preset = passed.pop("preset", None)
        head_arguments = passed.pop("heads", ())
        registry.use_files(files)  # may register mechanisms of --heads
        passed_settings = parse_heads(head_arguments) | passed
        if preset is None and not _enables_mechanism(passed_settings):
            return None
        _replace_none_strings(passed_settings)
        settings = _override(preset_settings(preset or "baseline"), passed_settings)
        return cls.from_dict(settings)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Load the config of a saved model. Returns None if the model does not use KHA.

        ``entries`` can be a Hugging Face ``config.json`` or the args in a Megatron checkpoint. Our
        settings start with ``kha_``. For Megatron, we also have to check ``spec`` (it may name a
        preset) and ``attention_output_gate``.

        Raises:
            ConfigError: If the model uses a mechanism of a package that is not installed.
        """
        registry.check_registered(entries.get("kha_providers") or {})
        has_output_gate = entries.get("attention_output_gate") is True
        config = cls._from_kha_entries(entries)
        if config is None and has_output_gate:
            config = cls.from_preset("baseline")
        if config is None:
            return None
        return config.with_output_gate(has_output_gate)

    @classmethod
    def from_entries_or_empty(cls, entries: Mapping[str, Any]) -> Self:
        """Like :meth:`from_entries`, but return a config without mechanisms instead of None."""
        return cls.from_entries(entries) or cls()

    @classmethod
    def _from_kha_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Build the config from ``kha_`` entries, or from a preset that ``spec`` names."""
        settings = {}
        for name in setting_names():
            if f"kha_{name}" in entries:
                settings[name] = entries[f"kha_{name}"]
        if _enables_mechanism(settings):
            _replace_none_strings(settings)
            return cls.from_dict(settings)
        preset = _preset_of_spec(entries.get("spec"))
        if preset is None:
            return None
        return cls.from_preset(preset)

    def to_entries(self, *, multi_latent: bool = False) -> dict[str, Any]:
        """Inverse of :meth:`from_entries`, for Megatron args."""
        entries = {}
        for name, value in self.to_dict().items():
            entries[f"kha_{name}"] = value
        # Megatron's own output gate is not available for MLA
        if self.has_output_gate and not multi_latent:
            entries["attention_output_gate"] = True
        return entries | self.providers_entry

    @property
    def providers_entry(self) -> dict[str, dict[str, str]]:
        """Record which package or file each external mechanism is from (empty without any)."""
        providers = {}
        for mechanism in self.without(Knock).mechanisms:
            provider = registry.provider_of(mechanism.name)
            if provider:
                providers[mechanism.name] = provider
        return {"kha_providers": providers} if providers else {}

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the mechanisms that were registered with ``--heads-from``."""
        files: dict[str, None] = {}
        for mechanism in self.without(Knock).mechanisms:
            path = registry.file_of(mechanism.name)
            if path:
                files[path] = None
        return tuple(files)

    def to_dict(self, *, start: bool = True) -> dict[str, Any]:
        """Convert to a JSON-serializable dict, e.g. for checkpoints.

        Settings of KHA itself and of this class have their own names (e.g. ``value``), those of
        other mechanisms are dicts (e.g. ``gate``). Disabled mechanisms are left out, and with
        ``start=False`` also ``init`` and ``init_seed``.
        """
        settings: dict[str, Any] = dict(_KNOCK_DEFAULTS)
        knock = self.get(Knock)
        if knock is not None:
            settings |= knock.to_dict()
        for name in _OTHER_SETTINGS:
            settings[name] = getattr(self, name)
        if not start:
            del settings["init"]
            del settings["init_seed"]
        for mechanism in self.without(Knock).mechanisms:
            settings[mechanism.name] = mechanism.to_dict()
        return settings

    def to_options(self) -> dict[str, Any]:
        """Inverse of :meth:`from_options`."""
        settings = self.to_dict()
        options = {"preset": "baseline", "init": settings["init"]}
        for name in PROJECTIONS:
            options[name] = settings[name] or "none"
        options |= _select(settings, _OTHER_SETTINGS)
        head_arguments = []
        for mechanism in self.without(Knock).mechanisms:
            head_arguments.append(mechanism.name)
            for setting, value in mechanism.non_defaults().items():
                if not isinstance(value, str):
                    value = json.dumps(value)
                head_arguments.append(f"{mechanism.name}.{setting}={value}")
        options["heads"] = tuple(head_arguments) or None
        return options

    def updated(self, **settings: Any) -> Self:
        """Return a copy with other settings (see :meth:`to_dict`), e.g. ``gate=None``."""
        merged = self.to_dict() | settings
        return type(self).from_dict(merged)

    def get(self, mechanism_type: type[MechanismT]) -> MechanismT | None:
        """Return the settings of a mechanism, or None if it is disabled."""
        for mechanism in self.mechanisms:
            if isinstance(mechanism, mechanism_type):
                return mechanism
        return None

    def without(self, *excluded: type[Mechanism]) -> Self:
        """Return a copy without these mechanisms."""
        remaining = []
        for mechanism in self.mechanisms:
            if not isinstance(mechanism, excluded):
                remaining.append(mechanism)
        return self._with_mechanisms(remaining)

    def merge(self, other: Self) -> Self:
        """Return a copy that also has the mechanisms of ``other``."""
        overridden_types = map(type, other.mechanisms)
        remaining = self.without(*overridden_types).mechanisms
        return self._with_mechanisms([*remaining, *other.mechanisms])

    def _with_mechanisms(self, mechanisms: Iterable[Mechanism]) -> Self:
        """Return a copy with other mechanisms, but the same other settings."""
        return type(self)(
            *mechanisms,
            init_seed=self.init_seed,
            attention=self.attention,
            latent_heads=self.latent_heads,
        )

    @property
    def has_output_gate(self) -> bool:
        """Whether Megatron's ``--attention-output-gate`` would do the same as our output gate."""
        gate = self.get(Gate)
        return gate is not None and gate.is_stock

    def with_output_gate(self, is_set: bool) -> Self:
        """Add the gate of ``--attention-output-gate`` if it ``is_set``, except for GTA and GLA.

        Raises:
            ConfigError: If this conflicts with the existing gates.
        """
        if not is_set or self.has_output_gate or self.attention is not None:
            return self
        existing = self.get(Gate)
        gate = existing or Gate(output="element")
        if gate.output is None:
            gate = replace(gate, output="element")
        if not gate.is_stock:
            raise ConfigError(
                f"--attention-output-gate is the same as {gate.name}.output=element with its "
                f"defaults and cannot be combined with {existing}. Use only one of them."
            )
        others = self.without(Gate)
        return self._with_mechanisms([*others.mechanisms, gate])

    def without_output_gate(self) -> Self:
        """Remove the output gate if Megatron can apply it itself."""
        gate = self.get(Gate)
        if gate is None or not gate.is_stock:
            return self
        others = self.without(Gate)
        if len(gate.positions) == 1:
            return others
        other_gates = replace(gate, output=None)
        return self._with_mechanisms([*others.mechanisms, other_gates])

    @property
    def variants(self) -> dict[Projection, Variant]:
        """KHA variants by projection (empty without KHA)."""
        knock = self.get(Knock)
        return knock.variants if knock else {}

    @property
    def own_projections(self) -> tuple[Projection, ...]:
        """Projections that a mechanism computes instead of ``linear_qkv``."""
        projections: list[Projection] = []
        for mechanism in self.mechanisms:
            projections += mechanism.own_projections
        return tuple(projections)

    @property
    def is_foldable(self) -> bool:
        """Whether we can fold everything into the weights of a stock model."""
        return all(mechanism.is_foldable for mechanism in self.mechanisms)

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        tensors: list[HeadTensor] = []
        for mechanism in self.mechanisms:
            tensors += mechanism.tensors(sizes)
        return tuple(tensors)

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        rows: list[HeadRows] = []
        for mechanism in self.mechanisms:
            rows += mechanism.rows(sizes)
        return tuple(rows)

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        count = 0
        for mechanism in self.mechanisms:
            count += mechanism.parameters(sizes, tp)
        return count

    def costs(self, sizes: HeadSizes) -> Costs:
        total = Costs()
        for mechanism in self.mechanisms:
            total += mechanism.costs(sizes)
        return total

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        for mechanism in self.mechanisms:
            reason = mechanism.unfused_reason(sizes)
            if reason is not None:
                return reason
        return None

    def check(self, facts: HeadFacts) -> None:
        """Raise ConfigError if this config does not work with the given model."""
        is_gla = self.attention == "gla"
        if self.attention and facts.multi_latent != is_gla:
            needs = "requires" if is_gla else "does not support"
            raise ConfigError(f"kha_attention={self.attention} {needs} --multi-latent-attention.")
        facts = replace(facts, attention=self.attention)
        for mechanism in self.mechanisms:
            reason = mechanism.unsupported_reason(facts)
            if reason is not None:
                raise ConfigError(reason)
        if facts.predictions and self._needs_layer_spec(facts):
            raise ConfigError(
                "Multi-token prediction with KHA requires a hybrid model (--hybrid-layer-pattern "
                "'*-*-/*-'), because GPTModel builds these layers without the layer spec."
            )
        if facts.flash_decode and (self.mechanisms or self.attention):
            raise ConfigError(f"{self} does not support --flash-decode.")

    def _needs_layer_spec(self, facts: HeadFacts) -> bool:
        """Return whether Megatron's own layers, which may have an output gate, are not enough."""
        config = self if facts.multi_latent else self.without_output_gate()
        return bool(config.mechanisms or config.attention)

    def __str__(self) -> str:
        """Short description for logs, e.g. ``query=linear key=linear`` or ``value=mlp in gta``."""
        mechanisms = map(str, self.mechanisms)
        description = " ".join(mechanisms) or "nothing (baseline)"
        if self.attention:
            description += f" in {self.attention}"
        if self.latent_heads != LATENT_HEADS:
            description += f" of {self.latent_heads}"
        return description


class KHAConfig:
    """Name and arguments of :class:`HeadsConfig` in version 0.1."""

    from_dict = HeadsConfig.from_dict
    from_preset = HeadsConfig.from_preset

    def __new__(cls, **settings: Any) -> HeadsConfig:  # type: ignore[misc]
        return HeadsConfig.from_dict(settings)


def _check_known(settings: Mapping[str, Any]) -> None:
    names = setting_names()
    unknown_names = sorted(settings.keys() - set(names))
    if unknown_names:
        unknown = ", ".join(unknown_names)
        available = ", ".join(names)
        raise ConfigError(f"Unknown KHA setting {unknown}. Available settings: {available}.")


def _select(
    settings: Mapping[str, Any],
    names: Iterable[str],
) -> dict[str, Any]:
    """Return the settings with these names, in the order of ``names``."""
    selected = {}
    for name in names:
        if name in settings:
            selected[name] = settings[name]
    return selected


def _override(preset: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Override settings of a preset. Other fields of the preset's mechanisms are kept.

    For example, ``{"gate": {"form": "add"}}`` changes the form of a gate that the preset enables,
    and ``{"gate": None}`` disables this gate.
    """
    merged = dict(preset)
    for name, value in settings.items():
        is_enabled_mechanism = name in preset and name in mechanism_types()
        if is_enabled_mechanism and value is not None:
            merged[name] = {**preset[name], **value}
        else:
            merged[name] = value
    return merged


def _enables_mechanism(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings mention a mechanism, even if they disable it."""
    names = [*PROJECTIONS, *mechanism_types()]
    return not settings.keys().isdisjoint(names)


def _replace_none_strings(settings: dict[str, Any]) -> None:
    """Replace ``"none"``, which disables a KHA variant on the command line, by None."""
    for projection in PROJECTIONS:
        if settings.get(projection) == "none":
            settings[projection] = None


def _in_order(mechanisms: tuple[Mechanism, ...]) -> tuple[Mechanism, ...]:
    """Sort mechanisms as they are applied. Raises ConfigError for anything else, or duplicates."""
    order = [Knock.name, *mechanism_types()]
    by_name: dict[str, Mechanism] = {}
    for mechanism in mechanisms:
        if not isinstance(mechanism, Mechanism):
            raise ConfigError(f"HeadsConfig requires mechanisms, e.g. Knock(), got {mechanism!r}.")
        if mechanism.name not in order:
            raise ConfigError(
                f"{mechanism.name} is not registered. Pass its file with --heads-from."
            )
        if mechanism.name in by_name:
            raise ConfigError(f"{mechanism.name} is configured more than once.")
        by_name[mechanism.name] = mechanism
    in_order = _select(by_name, order)
    return tuple(in_order.values())


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings that :meth:`HeadsConfig.from_dict` accepts."""
    return (*_KNOCK_SETTINGS, *_OTHER_SETTINGS, *mechanism_types())


def parse_heads(words: Iterable[str]) -> dict[str, Any]:
    """Parse ``--heads`` arguments into settings.

    Supported arguments:

    - ``gate.output=head`` sets a field. The value is parsed as JSON and otherwise used as a string.
    - ``talking`` enables a mechanism with its default settings.
    - ``moh=none`` disables a mechanism, e.g. one from a preset.

    KHA itself is called ``knock`` here, e.g. ``knock.value=mlp`` is equivalent to
    ``--kha-value mlp``.
    """
    settings: dict[str, Any] = {}
    mechanisms = mechanism_types()
    knock_fields = (*_KNOCK_SETTINGS, "init_seed")
    for word in words:
        name, field, value = _split_argument(word)
        is_mechanism = name in mechanisms
        earlier_fields = settings.get(name) or {}
        if name == Knock.name and field in knock_fields and value is not None:
            settings[field] = _parse_value(value)
        elif is_mechanism and field is not None and value is not None:
            settings[name] = {**earlier_fields, field: _parse_value(value)}
        elif is_mechanism and word == name:
            settings[name] = earlier_fields
        elif is_mechanism and word == f"{name}=none":
            settings[name] = None
        else:
            known = ", ".join([Knock.name, *mechanisms])
            raise ConfigError(
                f"Invalid value {word!r} for --heads. Use NAME.FIELD=VALUE, NAME or NAME=none, "
                f"where NAME is one of {known}."
            )
    return settings


class _HeadArgument(NamedTuple):
    """A ``--heads`` argument ``NAME.FIELD=VALUE``. Missing parts are None."""

    name: str
    field: str | None
    value: str | None


def _split_argument(argument: str) -> _HeadArgument:
    path, equals_sign, value = argument.partition("=")
    name, dot, field = path.partition(".")
    return _HeadArgument(
        name=name,
        field=field if dot else None,
        value=value if equals_sign else None,
    )


def _parse_value(text: str) -> Any:
    """Parse the value of a field as JSON, ``none`` or otherwise a string."""
    if text == "none":
        return None
    try:
        return json.loads(text)
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


def _preset_of_spec(spec: Any) -> str | None:
    """Return the preset that ``--spec`` names, if it is one of our layer specs."""
    if not spec or len(spec) < 2:
        return None
    module, name = spec[:2]
    if module != "kha_megatron.mcore.specs" or not is_preset_name(str(name)):
        return None
    return name


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a preset, or of several presets joined with ``+``.

    Raises:
        ConfigError: If a preset does not exist, or if two presets conflict.
    """
    names = name.split("+")
    settings: dict[str, Any] = {}
    for preset in names:
        _check_preset_exists(preset)
        if names.count(preset) > 1:
            raise ConfigError(f"{name} contains the preset {preset} more than once.")
        for setting, value in PRESETS[preset].items():
            if setting not in settings:
                settings[setting] = dict(value) if isinstance(value, Mapping) else value
            elif _has_other_fields(value, settings[setting]):  # e.g. gates at other positions
                settings[setting] = {**settings[setting], **value}
            else:
                raise ConfigError(
                    f"Presets {', '.join(names)} cannot be combined, because more than one of them "
                    f"sets {setting}."
                )
    return settings


def _check_preset_exists(preset: str) -> None:
    if preset in PRESETS:
        return
    similar = difflib.get_close_matches(preset, PRESETS, n=1)
    hint = f"Did you mean {similar[0]}? " if similar else ""
    available = ", ".join(PRESETS)
    raise ConfigError(
        f"Unknown KHA preset {preset!r}. {hint}Available presets: {available}. "
        "Join presets with + to combine them."
    )


def _has_other_fields(value: Any, earlier_value: Any) -> bool:
    """Return whether both values are settings of a mechanism and have no field in common."""
    return isinstance(value, Mapping) and earlier_value.keys().isdisjoint(value)
