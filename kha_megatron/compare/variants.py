"""What is compared: variants of one recipe that differ in what is knocked, and in nothing else."""

import re
import shlex
from dataclasses import dataclass

from kha_megatron.config import PRESETS, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.run import OF_HEADS, Run
from kha_megatron.recipes.recipe import DECIDED

RANDOM_INIT = "random-init"
NULL = "null"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
SETTINGS = tuple(row.flag for row in OF_HEADS if row.argument in DECIDED)
"""Flags of what a variant decides; a recipe's kind of attention is not among it."""


@dataclass(frozen=True)
class Candidate:
    """One choice of what is knocked, under a name that can name a folder."""

    name: str
    kha: KHAConfig

    perturbs: bool = False
    """Whether it is the reference itself from a start that differs by rounding alone."""


def with_null(variants: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The variants with the first one's null run behind it: how far rounding moves its loss."""
    reference, *others = variants
    return reference, Candidate(NULL, reference.kha, perturbs=True), *others


def parse_variants(text: str) -> tuple[Candidate, ...]:
    """Read ``baseline,kha_mlp+gate_output,random-init,mine=--kha-key linear --kha-value mlp``.

    A plus joins presets. ``random-init`` is ``kha_mlp`` with ``--kha-init random``, the paper's
    ablation.

    Raises:
        ConfigError: a name that does not exist, twice the same, or fewer than two.
    """
    variants = tuple(_variant(word.strip()) for word in text.split(",") if word.strip())
    names = [variant.name for variant in variants]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"--variants names {twice} twice: give the second another name, as in "
            f"{twice}-2=--kha-preset kha_mlp"
        )
    if len(variants) < 2:
        raise ConfigError(
            f"--variants {text!r} names {len(variants)}: name the reference and at least one to "
            "compare with it, as in baseline,kha_mlp"
        )
    return variants


def _variant(word: str) -> Candidate:
    name, equals, flags = word.partition("=")
    name = name.strip()
    if equals:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"variant name {name!r} cannot name a folder: use up to 40 letters, digits, "
                "dots, dashes and underscores"
            )
        if name in PRESETS or name in (RANDOM_INIT, NULL):
            raise ConfigError(f"variant {name}= has a name that is taken: choose another one")
        return Candidate(name, _from_flags(name, flags))
    if name == RANDOM_INIT:
        return Candidate(name, KHAConfig.from_preset("kha_mlp", init="random"))
    presets = name.split("+")
    if unknown := [preset for preset in presets if preset not in PRESETS]:
        raise ConfigError(
            f"unknown variant {unknown[0]!r}: choose among {', '.join(PRESETS)}, {RANDOM_INIT}, "
            "join some with +, or define it: NAME=--kha-key linear --kha-value mlp"
        )
    return Candidate(name, KHAConfig.combined(presets))


def _from_flags(name: str, flags: str) -> KHAConfig:
    try:
        given = Run.of().updated(shlex.split(flags))
    except ValueError as error:  # an open quotation; a ConfigError says as much itself
        raise ConfigError(f"variant {name}: {error}") from error
    if not given.flags or (other := set(given.flags) - set(SETTINGS)):
        what = f"{min(other)} is none of its flags" if given.flags else "it has no flags"
        raise ConfigError(f"variant {name}: {what}: choose among {', '.join(SETTINGS)}")
    try:
        return given.kha
    except ConfigError as error:
        raise ConfigError(f"variant {name}: {error}") from error
