"""Where a run is started: every field of :class:`kha_megatron.recipes.Cluster` as an option."""

from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_type_hints

import typer

from kha_megatron.errors import ConfigError
from kha_megatron.recipes import Cluster, flag_of

_KINDS = get_type_hints(Cluster)


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its parameter ``to``, a :class:`Cluster`, as options.

    Args:
        command: its other parameters are options of typer's as they are.
    """

    def with_options(**given: Any) -> None:
        values = {item.name: _value(item.name, given.pop(item.name)) for item in fields(Cluster)}
        command(to=Cluster(**values), **given)

    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in signature(command).parameters.items()
        if name != "to"
    ]
    parameters += map(_parameter, fields(Cluster))
    shown: Any = wraps(command)(with_options)
    del shown.__wrapped__  # which inspect would look through
    shown.__annotations__ = {p.name: p.annotation for p in parameters}
    shown.__signature__ = signature(command).replace(parameters=parameters)
    return shown


def _several(name: str) -> bool:
    return not isinstance(Cluster.__dataclass_fields__[name].default, str | int | None)


def _parameter(item: Field[Any]) -> Parameter:
    option = typer.Option(flag_of(item.name), help=item.metadata["text"])
    kind = list[str] | None if _several(item.name) else _KINDS[item.name]
    default = None if _several(item.name) else item.default
    return Parameter(
        item.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


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
