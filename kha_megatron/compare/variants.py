"""Parsing of ``kha-megatron compare --variants``."""

import re
import shlex
from dataclasses import dataclass

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import PRESETS, HeadsConfig
from kha_megatron.model.run import HEAD_FIELDS, Run
from kha_megatron.recipes.recipe import HEAD_ARGUMENTS

RANDOM_INIT = "random-init"
NULL = "null"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
SETTINGS = tuple(field.flag for field in HEAD_FIELDS if field.argument in HEAD_ARGUMENTS)
"""Flags that can be used in a variant. ``--kha-attention`` has to be set in the recipe."""


@dataclass(frozen=True)
class ModelVariant:
    name: str  # also used as directory name
    kha: HeadsConfig
    perturbs: bool = False  # True for null runs


def parse_variants(text: str) -> tuple[ModelVariant, ...]:
    """Parse a comma-separated list of variants.

    A variant is either a preset, several presets joined by ``+``, ``random-init`` (the ablation in
    the paper: ``kha_mlp`` with random initialization), or ``NAME=FLAGS``::

        baseline,kha_mlp+gate_output,mine=--kha-key linear --kha-value mlp
    """
    variants = []
    for word in text.split(","):
        if word.strip():
            variants.append(_parse_variant(word.strip()))
    names = {variant.name for variant in variants}
    if len(names) < 2 or len(names) < len(variants):
        raise ConfigError(f"--variants must contain two or more different variants, got {text!r}.")
    return tuple(variants)


def _parse_variant(word: str) -> ModelVariant:
    name, equals, flags = word.partition("=")
    name = name.strip()
    if equals:
        is_reserved = name in (*PRESETS, RANDOM_INIT, NULL)
        if is_reserved or not _NAME.fullmatch(name):
            raise ConfigError(
                f"Invalid variant name {name!r}. Use up to 40 letters, digits, dots, dashes and "
                "underscores, and choose a name that is not a preset."
            )
        return ModelVariant(name, _parse_flags(name, flags))
    if name == RANDOM_INIT:
        return ModelVariant(name, HeadsConfig.from_preset("kha_mlp", init="random"))
    try:
        return ModelVariant(name, HeadsConfig.from_preset(name))
    except ConfigError as error:
        raise ConfigError(
            f"Invalid variant {name!r}. {error} A variant can also be {RANDOM_INIT}, or NAME=FLAGS "
            "such as NAME=--kha-key linear --kha-value mlp."
        ) from error


def _parse_flags(name: str, flags: str) -> HeadsConfig:
    try:
        run = Run.from_values().updated(shlex.split(flags))
        unknown = set(run.flags) - set(SETTINGS)
        if unknown or not run.flags:
            raise ConfigError(f"Invalid flags {flags!r}. Available flags: {', '.join(SETTINGS)}.")
        return run.kha
    except ValueError as error:  # ConfigError, or ValueError from shlex
        raise ConfigError(f"Variant {name}: {error}") from error
