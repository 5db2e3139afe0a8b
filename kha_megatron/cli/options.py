"""Arguments and options that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from kha_megatron.config import PRESETS
from kha_megatron.errors import ConfigError


def recipe_names() -> list[tuple[str, str]]:
    """Return recipe names and descriptions for shell completion."""
    from kha_megatron.recipes import RECIPES

    return [(name, recipe.description) for name, recipe in RECIPES.items()]


def preset_names(incomplete: str) -> list[str]:
    """Complete the last preset of a list joined with ``,`` or ``+``."""
    joined = re.match(r"(.*[,+])?", incomplete)
    return [f"{joined[0] if joined else ''}{name}" for name in PRESETS]


def megatron_flags() -> list[str]:
    """Return the Megatron arguments of the model table for shell completion after ``--``."""
    from kha_megatron.model.run import TABLE

    return [row.flag for row in TABLE]


RecipeName = Annotated[
    str,
    typer.Argument(help="Recipe from `kha-megatron recipes list`.", autocompletion=recipe_names),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Preset, such as kha_mlp or kha_linear.", autocompletion=preset_names),
]
MegatronArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- MEGATRON ARGS]",
        help="Megatron and --kha-* arguments, which override the recipe.",
        autocompletion=megatron_flags,
    ),
]
ModelFolder = Annotated[Path, typer.Argument(help="Hugging Face model directory.")]
DataFolder = Annotated[
    Path | None, typer.Option(help="Directory written by `kha-megatron data prepare`.")
]
TrainingDevice = Annotated[str | None, typer.Option(help="cuda or cpu. Default: the recipe's.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
GPUMemory = Annotated[str, typer.Option(help="Memory of one GPU: 80GB (10^9 bytes) or 80GiB.")]
Workers = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Threads. Default: one per core.")
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def parse_size(flag: str, text: str) -> int:
    """Parse ``"1000"``, ``"64KiB"``, ``"500MB"`` or ``"1.5GiB"`` (any case) to bytes.

    Raises:
        ConfigError: ``text`` is not a size of at least one byte. The message names ``flag``.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Z]*)", text.strip().upper(), re.ASCII)
    size = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if size < 1:
        raise ConfigError(
            f"Expected {flag} to be a size such as 1000, 64KiB or 5GB, got {text[:40]!r}."
        )
    return size
