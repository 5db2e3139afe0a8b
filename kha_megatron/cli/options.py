"""Arguments and options shared by several commands."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import PRESETS
from kha_megatron.model.run import list_unknown_flags


def recipe_names() -> list[tuple[str, str]]:
    from kha_megatron.recipes import RECIPES

    return [(name, recipe.description) for name, recipe in RECIPES.items()]


def preset_names(incomplete: str) -> list[str]:
    """Shell completion for a list of presets, e.g. ``kha_mlp,gate_`` or ``kha_mlp+gate_``."""
    last_separator = max(incomplete.rfind(","), incomplete.rfind("+"))
    prefix = incomplete[: last_separator + 1]
    return [prefix + name for name in PRESETS]


def megatron_flags() -> list[str]:
    from kha_megatron.model.run import TABLE

    return [field.flag for field in TABLE]


def register_files(paths: list[Path] | None) -> list[Path] | None:
    """Register the head mechanisms in these files. Returns the value of the option."""
    from kha_megatron.heads.registry import use_files

    use_files(paths or ())
    return paths


HeadsFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--heads-from",
        is_eager=True,
        callback=register_files,
        metavar="FILE",
        help="Python file with a head mechanism of your own. Repeatable.",
    ),
]
"""The callback registers the mechanisms before the other options are parsed."""
RecipeName = Annotated[
    str,
    typer.Argument(
        help="Recipe to use (see `kha-megatron recipes list`), or FILE.py:NAME for your own.",
        autocompletion=recipe_names,
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="Preset, or several joined with +.", autocompletion=preset_names)
]
MegatronArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- MEGATRON ARGS]",
        help="Megatron and --kha-* arguments that override the recipe.",
        autocompletion=megatron_flags,
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Data directory, written by `kha-megatron data prepare`.")
]
TrainingDevice = Annotated[
    str | None, typer.Option(help="Device to train on: cuda or cpu (default: set by recipe).")
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 etc.")]
GPUMemory = Annotated[str, typer.Option(help="Memory per GPU, e.g. 80GB (10^9 bytes) or 80GiB.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Number of threads (default: number of CPU cores)."),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def warn_about_unused(words: Sequence[str], used: Collection[str] = ()) -> None:
    """Log a warning for Megatron arguments without an effect on a command that does not train.

    They can be misspelled, which only Megatron knows.

    Args:
        used: Flags that are not in our table of arguments, but have an effect.
    """
    unused = [flag for flag in list_unknown_flags(words) if flag not in used]
    if unused:
        announce(
            f"WARNING: No effect on this command: {', '.join(unused)}. To check the spelling with "
            "Megatron, run `kha-megatron launch --dry-run` with the same arguments."
        )


_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}


def parse_size(flag: str, text: str) -> int:
    """Parse a size in bytes.

    >>> parse_size("--gpu-memory", "1.5GiB")
    1610612736
    """
    error = ConfigError(f"{flag} must be a size such as 1000, 64KiB or 5GB, got {text[:40]!r}.")
    number_and_unit = r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Z]*)"
    match = re.fullmatch(number_and_unit, text.strip().upper(), re.ASCII)
    if match is None:
        raise error
    number, unit = match.groups()
    if unit not in _BYTES_PER_UNIT:
        raise error
    size = int(float(number) * _BYTES_PER_UNIT[unit])
    if size < 1:
        raise error
    return size
