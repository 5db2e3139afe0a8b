"""Where a run is started: every field of :class:`kha_megatron.recipes.Cluster` as an option."""

from collections.abc import Callable
from dataclasses import Field, fields
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from kha_megatron.cli.options import option_of, with_options
from kha_megatron.errors import ConfigError
from kha_megatron.recipes import Cluster, flag_of

_KINDS = get_type_hints(Cluster)


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its parameter ``to``, a :class:`Cluster`, as options.

    Args:
        command: its other parameters are options of typer's as they are.
    """

    options = [_option(item) for item in fields(Cluster)]
    return with_options(command, "to", options, _cluster)


def _cluster(given: dict[str, Any]) -> Cluster:
    return Cluster(**{name: _value(name, value) for name, value in given.items()})


def _several(name: str) -> bool:
    return not isinstance(Cluster.__dataclass_fields__[name].default, str | int | None)


def _option(item: Field[Any]) -> Parameter:
    option = typer.Option(flag_of(item.name), help=item.metadata["text"])
    kind = list[str] | None if _several(item.name) else _KINDS[item.name]
    return option_of(item, Annotated[kind, option], None if _several(item.name) else item.default)


def _value(name: str, given: Any) -> Any:
    """A field's value; repeated words as a tuple, or by NAME where they are NAME=VALUE."""
    if not _several(name):
        return given
    if name == "mounts":
        return tuple(given or ())
    pairs = {}
    for word in given or ():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"{flag_of(name)} {word}: give NAME=VALUE")
        pairs[key] = value
    return pairs
