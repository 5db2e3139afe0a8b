"""Options that several commands have, and options that belong together as one dataclass."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import Field
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kha_megatron.config import PRESETS
from kha_megatron.errors import ConfigError


def recipe_names() -> list[tuple[str, str]]:
    """For a shell that completes: names of recipes, and what they are."""
    from kha_megatron.recipes import RECIPES

    return [(name, recipe.description) for name, recipe in RECIPES.items()]


def preset_names(incomplete: str) -> list[str]:
    """For a shell that completes: presets, behind those that stand there joined already."""
    joined = re.match(r"(.*[,+])?", incomplete)
    return [f"{joined[0] if joined else ''}{name}" for name in PRESETS]


def megatron_flags() -> list[str]:
    """For a shell that completes behind ``--``: the arguments that this package knows."""
    from kha_megatron.model.run import TABLE

    return [row.flag for row in TABLE]


RecipeName = Annotated[
    str,
    typer.Argument(help="A name of `kha-megatron recipes list`.", autocompletion=recipe_names),
]
Preset = Annotated[
    str | None,
    typer.Option(help="Such as kha_mlp or kha_linear.", autocompletion=preset_names),
]
MegatronArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- MEGATRON ARGS]",
        help="Megatron's and --kha-* arguments; each replaces the recipe's own value.",
        autocompletion=megatron_flags,
    ),
]
ModelFolder = Annotated[Path, typer.Argument(help="Model folder with config, weights, tokenizer.")]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder made by `kha-megatron data prepare`.")
]
TrainingDevice = Annotated[str | None, typer.Option(help="cuda or cpu; the recipe's if not given.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
GPUMemory = Annotated[str, typer.Option(help="Memory of one GPU: 80GB (10^9 bytes) or 80GiB.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; default: one for each core.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def parse_size(flag: str, text: str) -> int:
    """Bytes from ``"1000"``, ``"64KiB"``, ``"500MB"`` or ``"1.5GiB"`` (any case).

    Raises:
        ConfigError: it is no such size, or none of at least a byte; naming ``flag``.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Z]*)", text.strip().upper(), re.ASCII)
    size = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if size < 1:
        raise ConfigError(
            f"{flag} {text} is no size: write bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        )
    return size


def with_options(
    command: Callable[..., None],
    name: str,
    options: Sequence[Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """Let a command take its parameter ``name``, which belongs together, as several options.

    Args:
        command: its other parameters are options of typer's as they are.
        options: annotated with ``typer.Option``.
        make: from the options' values, by their names, to what the command takes.
    """

    def called(**given: Any) -> None:
        values = {option.name: given.pop(option.name) for option in options}
        command(**{name: make(values)}, **given)

    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[own])
        for own, parameter in signature(command).parameters.items()
        if own != name
    ]
    parameters += options
    shown: Any = functools.wraps(command)(called)
    del shown.__wrapped__  # which inspect would look through
    shown.__annotations__ = {p.name: p.annotation for p in parameters}
    shown.__signature__ = signature(command).replace(parameters=parameters)
    return shown


def option_of(item: Field[Any], annotation: Any, default: Any) -> Parameter:
    """A dataclass's field as one of the options of :func:`with_options`."""
    return Parameter(item.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
