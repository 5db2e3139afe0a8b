"""Options that belong together, as one dataclass among a command's parameters."""

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: on the command line each field is an option.

    Args:
        command: keyword parameters, of which those that are annotated with a dataclass are made of
            that class's fields, which are annotated with ``typer.Option`` and have plain defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def ungrouped(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{item.name: given.pop(item.name) for item in fields(kind)})
        command(**given)

    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            )
            continue
        own = get_type_hints(kind, include_extras=True)
        for item in fields(kind):
            assert item.default is not MISSING, f"{kind.__name__}.{item.name} needs a default"
            parameters.append(
                Parameter(
                    item.name,
                    Parameter.KEYWORD_ONLY,
                    default=item.default,
                    annotation=own[item.name],
                )
            )
    shown: Any = functools.wraps(command)(ungrouped)
    del shown.__wrapped__  # which inspect would look through
    shown.__annotations__ = {p.name: p.annotation for p in parameters}
    shown.__signature__ = signature(command).replace(parameters=parameters)
    return shown
