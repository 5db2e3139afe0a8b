"""Parse the variants of a comparison."""

import re
import shlex
from dataclasses import dataclass

from kha_megatron.config import PRESETS, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.run import HEAD_FIELDS, Run
from kha_megatron.recipes.recipe import HEAD_ARGUMENTS

RANDOM_INIT = "random-init"
NULL = "null"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
SETTINGS = tuple(row.flag for row in HEAD_FIELDS if row.argument in HEAD_ARGUMENTS)
"""Flags that a variant may set. The kind of attention is the recipe's."""


@dataclass(frozen=True)
class ModelVariant:
    """KHA settings and a name that is also a directory name."""

    name: str
    kha: KHAConfig
    perturbs: bool = False
    """Whether this is the reference with weights that differ by rounding alone."""


def with_null(variants: tuple[ModelVariant, ...]) -> tuple[ModelVariant, ...]:
    """Insert the null run of the first variant, which shows how far rounding moves its loss."""
    reference, *others = variants
    return reference, ModelVariant(NULL, reference.kha, perturbs=True), *others


def parse_variants(text: str) -> tuple[ModelVariant, ...]:
    """Parse ``baseline,kha_mlp+gate_output,random-init,mine=--kha-key linear --kha-value mlp``.

    A plus joins presets. ``random-init`` is ``kha_mlp`` with ``--kha-init random``, the paper's
    ablation.

    Raises:
        ConfigError: an unknown or repeated name, or fewer than two variants.
    """
    variants = tuple(_parse_variant(word.strip()) for word in text.split(",") if word.strip())
    if len({variant.name for variant in variants}) < max(2, len(variants)):
        raise ConfigError(f"Expected two or more different --variants, got {text!r}.")
    return variants


def _parse_variant(word: str) -> ModelVariant:
    name, equals, flags = word.partition("=")
    name = name.strip()
    if equals:
        if not _NAME.fullmatch(name) or name in (*PRESETS, RANDOM_INIT, NULL):
            raise ConfigError(
                "Expected a variant name of up to 40 letters, digits, dots, dashes and "
                f"underscores that is not the name of a preset, got {name!r}."
            )
        return ModelVariant(name, _parse_flags(name, flags))
    if name == RANDOM_INIT:
        return ModelVariant(name, KHAConfig.from_preset("kha_mlp", init="random"))
    presets = name.split("+")
    if unknown := [preset for preset in presets if preset not in PRESETS]:
        raise ConfigError(
            f"Unknown variant {unknown[0]!r}. Choose from {', '.join(PRESETS)}, {RANDOM_INIT}, "
            "join presets with +, or define one with NAME=--kha-key linear --kha-value mlp."
        )
    return ModelVariant(name, KHAConfig.from_presets(presets))


def _parse_flags(name: str, flags: str) -> KHAConfig:
    try:
        given = Run.from_values().updated(shlex.split(flags))
        if not given.flags or set(given.flags) - set(SETTINGS):
            raise ConfigError(f"Expected flags among {', '.join(SETTINGS)}, got {flags!r}.")
        return given.kha
    except ValueError as error:  # ConfigError, or an open quotation from shlex
        raise ConfigError(f"Variant {name}: {error}") from error
