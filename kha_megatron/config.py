"""Configure the head mechanisms of a layer.

To add a mechanism, add a field of its type to :class:`KHAConfig`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Self, get_args, get_type_hints

from kha_megatron.errors import ConfigError
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
from kha_megatron.heads.knock import PROJECTIONS, KnockSettings, parse_variant

AttentionKind = Literal["gta", "gla"]

CONFIG_VARIABLE = "KHA_CONFIG"
"""Environment variable with the settings that the name of a spec cannot carry."""

ATTENTIONS: tuple[AttentionKind, ...] = get_args(AttentionKind)
"""Kinds of attention that Megatron has no flag for (Zadouri et al. 2025, arXiv 2505.21487):
Grouped-Tied and Grouped Latent Attention."""


@dataclass(frozen=True, kw_only=True)
class KHAConfig(KnockSettings):
    """Mechanisms of a layer's heads. ``KHAConfig()`` is the baseline without any.

    Raises:
        ConfigError: a field has an invalid value.
    """

    attention: AttentionKind | None = None
    """``gta`` ties keys and values; ``value`` then applies to the tied state. ``gla`` splits the
    latent of MLA into heads. None: the attention that Megatron's flags choose."""

    latent_heads: int = 2
    """Number of latent heads of ``gla`` (two in the paper's GLA-2)."""

    collaborative: CollaborativeHeads | None = None
    """One query and one key shared by all heads, with a mixing vector per head."""

    talking: TalkingHeads | None = None
    """Heads that mix their logits and weights."""

    gate: Gate | None = None
    """Learnt gates on queries, keys, values, attention outputs or layer outputs."""

    moh: MixtureOfHeads | None = None
    """A router that weighs heads and switches some off for each token."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self._check_made()
        if self.attention:
            self.check(HeadFacts(multi_latent=self.attention == "gla"))

    def _check_made(self) -> None:
        """Raise ConfigError if a knock or gate acts on a query or key that a mechanism makes
        itself."""
        gated = self.gate.positions if self.gate else {}
        for mechanism in self.mechanisms:
            for projection in mechanism.own_projections:
                found = [f"--kha-{projection}"] if getattr(self, projection) else []
                if found := found + ([f"gate.{projection}"] if projection in gated else []):
                    raise ConfigError(
                        f"{found[0]} with {mechanism}, which makes a {projection} of its own for "
                        f"all heads: leave {found[0]} out (values and outputs may have theirs)"
                    )

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Return the preset ``name`` (a key of :data:`PRESETS`) with some fields replaced."""
        if name not in PRESETS:
            raise ConfigError(f"unknown KHA preset {name!r}: choose one of {', '.join(PRESETS)}")
        return cls.from_dict({**PRESETS[name], **overrides})

    @classmethod
    def from_presets(cls, names: Sequence[str]) -> Self:
        """Combine several presets, such as ``("kha_mlp", "gate_output")``.

        Raises:
            ConfigError: a preset is unknown, or two presets have the same setting.
        """
        values: dict[str, Any] = {}
        for name in names:
            cls.from_preset(name)  # which refuses one that there is not
            for setting, value in PRESETS[name].items():
                earlier = values.get(setting, {})
                of_mechanism = isinstance(value, Mapping)
                if setting in values and not (of_mechanism and earlier.keys().isdisjoint(value)):
                    raise ConfigError(
                        f"the presets {', '.join(names)} say {setting} twice: leave one out"
                    )
                values[setting] = {**earlier, **value} if of_mechanism else value
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the result of :meth:`to_dict`. Raises ConfigError for an unknown key."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(
                f"unknown KHA setting {', '.join(unknown)}: written by another version of "
                f"kha-megatron; known are {', '.join(f.name for f in fields(cls))}"
            )
        others = mechanism_types(cls)
        read: dict[str, Any] = {
            name: others[name].from_dict(value)
            if name in others and not isinstance(value, Mechanism | None)
            else value
            for name, value in values.items()
        }
        return cls(**read)

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> Self | None:
        """Read the options of a command line. Return None if they name no preset and no mechanism.

        Args:
            given: parsed values by field, with ``preset`` and ``heads`` (the words of ``--heads``).
                None means "not given", ``none`` means "no such mechanism".

        Raises:
            ConfigError: an unknown name or value.
        """
        words = {name: value for name, value in given.items() if value is not None}
        preset = words.pop("preset", None)
        words = parse_heads(words.pop("heads", ())) | words
        if preset is None and not words.keys() & {*PROJECTIONS, *mechanism_types(cls)}:
            return None
        for projection in PROJECTIONS & words.keys():
            words[projection] = parse_variant(words[projection])
        if preset in PRESETS:  # single settings of a mechanism that the preset has
            for name in mechanism_types(cls).keys() & words.keys() & PRESETS[preset].keys():
                words[name] = words[name] and {**PRESETS[preset][name], **words[name]}
        return cls.from_preset(preset or "baseline", **words)

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Self | None:
        """Read the ``kha_*`` entries of a checkpoint or an export. Return None if there are none.

        Args:
            entries: Megatron's arguments or a Hugging Face ``config.json``. Megatron's may name a
                preset in ``spec`` instead, and have their own ``attention_output_gate``.

        Raises:
            ConfigError: an unknown variant or init.
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
        for projection in PROJECTIONS:
            values[projection] = parse_variant(values.get(projection))
        return cls.from_dict(values).with_output_gate(gated)

    def to_entries(self, *, multi_latent: bool = False) -> dict[str, Any]:
        """Return the entries of Megatron's arguments that :meth:`from_entries` reads.

        Args:
            multi_latent: the model has multi-latent attention, where Megatron has no output gate.
        """
        entries = {f"kha_{name}": value for name, value in self.to_dict().items()}
        if self.has_output_gate and not multi_latent:
            entries["attention_output_gate"] = True
        return entries

    @property
    def has_output_gate(self) -> bool:
        """Whether the config has the gate of Megatron's ``--attention-output-gate``."""
        return self.gate is not None and self.gate.is_stock

    def with_output_gate(self, asked: bool) -> Self:
        """Add the gate of ``--attention-output-gate`` if ``asked``. GTA and GLA have no such gate.

        Raises:
            ConfigError: the config has gates of another form.
        """
        if not asked or self.has_output_gate or self.attention is not None:
            return self
        gate = Gate(output="element") if self.gate is None else self.gate
        if gate.output is None:
            gate = replace(gate, output="element")
        if not gate.is_stock:
            raise ConfigError(
                "--attention-output-gate multiplies by the sigmoid of gate.output=element, and "
                f"{self.gate} asks for another: remove one"
            )
        return replace(self, gate=gate)

    def without_output_gate(self) -> Self:
        """Remove the gate that Megatron applies itself."""
        if self.gate is None or not self.gate.is_stock:
            return self
        others = len(self.gate.positions) > 1
        return replace(self, gate=replace(self.gate, output=None) if others else None)

    def to_dict(self, *, start: bool = True) -> dict[str, Any]:
        """Return plain JSON values of all fields but ``fold``, without mechanisms that are None.

        Args:
            start: include ``init`` and ``init_seed``.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        if not start:
            del values["init"], values["init_seed"]
        for name in mechanism_types(type(self)):
            if (mechanism := values.pop(name)) is not None:
                values[name] = mechanism.to_dict()
        return values

    def to_options(self) -> dict[str, Any]:
        """Return the options that :meth:`from_options` reads, with a value for every projection."""
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
        """Remove the mechanisms with these names; ``knock`` is the knock."""
        left: dict[str, Any] = {name: None for name in names if name != Knock.name}
        if Knock.name in names:
            left |= {f.name: getattr(Knock, f.name) for f in fields(Knock)}
        return replace(self, **left)

    def merge(self, other: Self) -> Self:
        """Add the mechanisms of ``other``."""
        names = [mechanism.name for mechanism in other.mechanisms]
        gained = {name: getattr(other, name) for name in names if name != Knock.name}
        if Knock.name in names:
            gained |= {f.name: getattr(other, f.name) for f in fields(Knock)}
        return replace(self, **gained)

    @property
    def knock(self) -> Knock:
        """The head-shared matrices."""
        return Knock(**{f.name: getattr(self, f.name) for f in fields(Knock)})

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """All mechanisms of a layer in the order in which they act, the knock first."""
        return (*([self.knock] if self.variants else []), *self.other_mechanisms)

    @property
    def other_mechanisms(self) -> tuple[Mechanism, ...]:
        """All mechanisms except the knock."""
        found = (getattr(self, name) for name in mechanism_types(type(self)))
        return tuple(mechanism for mechanism in found if mechanism is not None)

    @property
    def own_projections(self) -> tuple[Projection, ...]:
        """Projections that mechanisms compute themselves from the layer's input."""
        return tuple(projection for m in self.mechanisms for projection in m.own_projections)

    @property
    def is_foldable(self) -> bool:
        """Whether everything can be folded into the weights of a stock model."""
        return all(mechanism.is_foldable for mechanism in self.mechanisms)

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        """Return the parameters of one layer, over all ranks."""
        return tuple(t for mechanism in self.mechanisms for t in mechanism.tensors(sizes))

    def rows(self, sizes: HeadSizes) -> tuple[HeadRows, ...]:
        """Return the rows of ``linear_qkv`` beside queries, keys and values, in order."""
        return tuple(r for mechanism in self.mechanisms for r in mechanism.rows(sizes))

    def parameters(self, sizes: HeadSizes, tp: int = 1) -> int:
        """Count the parameters that one layer gains on each of ``tp`` tensor-parallel ranks."""
        return sum(mechanism.parameters(sizes, tp) for mechanism in self.mechanisms)

    def flops(self, sizes: HeadSizes) -> int:
        """Count the extra FLOPs of matrix products per token and layer, forward only."""
        return sum(mechanism.flops(sizes) for mechanism in self.mechanisms)

    def pair_flops(self, sizes: HeadSizes) -> int:
        """Count the extra FLOPs per query-key pair and layer over all heads, forward only."""
        return sum(mechanism.pair_flops(sizes) for mechanism in self.mechanisms)

    def activations(self, sizes: HeadSizes) -> int:
        """Count the elements per token and layer kept for backward, without recomputation."""
        return sum(mechanism.activations(sizes) for mechanism in self.mechanisms)

    def sharded_activations(self, sizes: HeadSizes) -> int:
        """Count the part of kept elements that sequence parallelism shards."""
        return sum(mechanism.sharded_activations(sizes) for mechanism in self.mechanisms)

    def pair_activations(self, sizes: HeadSizes) -> int:
        """Count the elements per query-key pair and layer kept for backward."""
        return sum(mechanism.pair_activations(sizes) for mechanism in self.mechanisms)

    def unfused_reason(self, sizes: HeadSizes) -> str | None:
        """Return why fused attention kernels cannot compute a layer, or None if they can."""
        reasons = (mechanism.unfused_reason(sizes) for mechanism in self.mechanisms)
        return next((why for why in reasons if why), None)

    def check(self, facts: HeadFacts) -> None:
        """Raise ConfigError if a model with these facts does not support the configuration."""
        if self.attention == "gta" and facts.multi_latent:
            raise ConfigError(
                "attention=gta and --multi-latent-attention are two kinds of attention: remove one"
            )
        if self.attention == "gla" and not facts.multi_latent:
            raise ConfigError(
                "attention=gla takes its sizes from Megatron's multi-latent attention: add "
                "--multi-latent-attention (with --kv-lora-rank for all latent heads together)"
            )
        facts = replace(facts, attention=self.attention)
        for mechanism in self.mechanisms:
            if why := mechanism.unsupported_reason(facts):
                raise ConfigError(why)
        if facts.predictions and (self.mechanisms or self.attention):
            raise ConfigError(
                f"mtp_num_layers={facts.predictions}: Megatron builds its multi-token prediction "
                "layers without the layer spec, so they would train plain attention: remove "
                "--mtp-num-layers, or use the baseline preset"
            )
        if facts.flash_decode and (self.mechanisms or self.attention):
            raise ConfigError(
                f"flash_decode=True decodes in kernels that were never run with KHA on {self}: "
                "remove --flash-decode, or use the baseline preset"
            )

    def __str__(self) -> str:
        """Format for logs: ``query=linear key=linear value=linear``, ``value=mlp in gta``."""
        words = " ".join(str(m) for m in self.mechanisms) or str(Knock())
        kind = f" in {self.attention}" if self.attention else ""
        if self.attention == "gla" and self.latent_heads != type(self).latent_heads:
            kind += f" of {self.latent_heads}"
        return words + kind


def mechanism_types(config: type = KHAConfig) -> dict[str, type[Mechanism]]:
    """Return the mechanisms except the knock, by field."""
    return _mechanism_types(config)


@cache  # a planner asks thousands of times
def _mechanism_types(config: type) -> dict[str, type[Mechanism]]:
    hints = get_type_hints(config)
    choices = {f.name: get_args(hints[f.name]) for f in fields(config)}
    return {
        name: kind
        for name, kinds in choices.items()
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, Mechanism)
    }


def parse_heads(words: Iterable[str]) -> dict[str, Any]:
    """Parse ``--heads`` words: ``NAME.FIELD=VALUE``, ``NAME`` for its defaults, ``NAME=none``.

    Returns fields of :class:`KHAConfig`, with mechanisms as dicts. Values are JSON or words;
    ``none`` is None. ``knock.value=mlp`` is ``--kha-value mlp``.

    Raises:
        ConfigError: an unknown mechanism or a malformed word.
    """
    result: dict[str, Any] = {}
    known = (Knock.name, *mechanism_types())
    for word in words:
        path, equals, text = word.partition("=")
        name, dot, setting = path.partition(".")
        if name not in known or bool(equals) < bool(dot) or (equals and not dot and text != "none"):
            raise ConfigError(
                f"--heads {word}: write NAME, NAME.FIELD=VALUE or NAME=none, where NAME is one of "
                f"{', '.join(known)}"
            )
        if name == Knock.name:
            settings = [f.name for f in fields(Knock)]
            if setting not in settings:
                raise ConfigError(f"--heads {word}: {name} has {', '.join(settings)}")
            result[setting] = _value(text)
        elif dot:
            result[name] = (result.get(name) or {}) | {setting: _value(text)}
        else:
            result[name] = None if equals else result.get(name) or {}
    return result


def _value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return json.loads(text)
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
"""Named configurations: the presets of each mechanism, and the paper's two knocks with others."""
