"""The table that maps each field of a run to Megatron's and Hugging Face's names.

Each dataclass field is declared with :func:`flag`, for example
``num_layers: int | None = flag("--num-layers", hf="num_hidden_layers")``. The row contains the
flag, Megatron's parsed argument, the attribute of its ``TransformerConfig``, the key of
``config.json`` and Megatron's default.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from kha_megatron.errors import ConfigError

MOST_LAYERS = 4096
"""Largest number of layers, and of repetitions in a layer pattern."""

_ROW = "row"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One row of the table."""

    field: str
    flag: str
    """Megatron's flag. The flag of a boolean takes no value and inverts the default."""
    argument: str
    """Name in Megatron's parsed arguments, and thus in its checkpoints."""
    attribute: str | None
    """Attribute of ``TransformerConfig``; None if it has none."""
    hf: str | None
    """Key of ``config.json``; None if architectures do not agree on one."""
    default: Any
    """Megatron's default; None for a required field."""
    kind: type
    """int, float, str or bool."""
    many: bool
    """True if the flag takes several values."""
    least: int | None
    """Smallest integer allowed."""
    most: int
    """Largest integer allowed."""
    reads: Callable[[str], Any] | None
    """Parses values that are not just a number; raises ``ValueError``."""
    writes: Callable[[Any], str]

    def value_of(self, words: tuple[str, ...]) -> Any:
        """Return the typed value of the words after the flag.

        Raises:
            ConfigError: the words cannot be parsed.
        """
        if self.many:
            return words
        if self.kind is bool:
            if words:
                raise ConfigError(f"{self.flag} stands alone: remove {' '.join(words)}")
            return not self.default
        if len(words) != 1:
            raise ConfigError(
                f"{self.flag} takes one value, not {len(words)}: {' '.join(words) or 'none'}"
            )
        return self.typed(words[0])

    def typed(self, value: Any) -> Any:
        """Convert a parsed argument to a typed value; lists become tuples.

        Raises:
            ConfigError: a string cannot be parsed.
        """
        if isinstance(value, list):
            return tuple(value)
        if isinstance(value, Enum):
            value = value.value if isinstance(value.value, str) else value.name
        if self.kind is int and type(value) is int and value > self.most:
            raise ConfigError(f"{self.flag} {value}: give a whole number up to {self.most}")
        if not isinstance(value, str) or self.kind is bool:
            return value
        if self.many:
            return (value,)
        try:
            if self.reads is not None:
                return self.reads(value)
            if self.kind is int:
                return _whole(value, self.least, self.most)
            return self.kind(value)
        except ValueError as error:
            hint = "give a number" if self.kind is float and self.reads is None else error
            raise ConfigError(f"{self.flag} {value}: {hint}") from None

    def words_of(self, value: Any) -> tuple[str, ...] | None:
        """Return the words after the flag for ``value``; None if the flag is to be omitted."""
        if value is None or (self.kind is bool and value == self.default):
            return None
        if self.kind is bool:
            return ()
        return tuple(map(str, value)) if self.many else (self.writes(value),)


def flag(
    flag: str,
    default: Any = MISSING,
    *,
    argument: str | None = None,
    attribute: str | None = "",
    hf: str | None = None,
    least: int | None = 1,
    most: int = 2**31 - 1,
    reads: Callable[[str], Any] | None = None,
    writes: Callable[[Any], str] = str,
) -> Any:
    """Declare a dataclass field with its row; see :class:`Field`.

    Args:
        default: Megatron's default; omitted for a required field.
        argument: None for the flag's name with underscores.
        attribute: "" for the same name as the argument.
    """
    argument = argument or flag.removeprefix("--").replace("-", "_")
    names = {"flag": flag, "argument": argument, "hf": hf, "least": least, "most": most}
    names |= {"attribute": argument if attribute == "" else attribute}
    row = names | {"reads": reads, "writes": writes}
    return field(default=default, metadata={_ROW: row})


@cache
def rows(*kinds: type) -> tuple[Field, ...]:
    """Return the rows of dataclasses in the order of their fields."""
    found = []
    for owner in kinds:
        hints = get_type_hints(owner)
        for item in fields(owner):
            if _ROW not in item.metadata:
                continue
            parts = [hints[item.name], *get_args(hints[item.name])]
            many = any(get_origin(part) is tuple for part in parts)
            words = [part for part in parts if part in (bool, int, float)]
            found.append(
                Field(
                    field=item.name,
                    default=None if item.default is MISSING else item.default,
                    kind=words[0] if words else str,
                    many=many and item.metadata[_ROW]["reads"] is None,
                    **item.metadata[_ROW],
                )
            )
    return tuple(found)


def read(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields from Megatron's arguments by name.

    Missing arguments have Megatron's default.

    Raises:
        ConfigError: a string cannot be parsed.
    """
    return {r.field: r.typed(arguments.get(r.argument, r.default)) for r in rows(owner)}


def attributes(owner: type, config: Any) -> dict[str, Any]:
    """Return the values of those fields that a ``TransformerConfig`` has as attributes."""
    named = ((r, r.attribute) for r in rows(owner) if r.attribute is not None)
    return {r.field: r.typed(getattr(config, name)) for r, name in named if hasattr(config, name)}


def _whole(word: str, least: int | None, most: int) -> int:
    number = int(word) if re.fullmatch(r"[+-]?[0-9]{1,20}", word) else None
    if number is None or number > most or (least is not None and number < least):
        low = "" if least is None else f" from {least} up"
        raise ValueError(f"give a whole number{low}" + (f" to {most}" if number else ""))
    return number
