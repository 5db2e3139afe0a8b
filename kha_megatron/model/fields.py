"""The table that maps each field of a run to Megatron's and Hugging Face's names.

Each dataclass field is declared with :func:`flag`, for example
``num_layers: int | None = flag(hf="num_hidden_layers")``. The row contains the flag, Megatron's
parsed argument, the attribute of its ``TransformerConfig``, the key of ``config.json`` and
Megatron's default.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from kha_megatron.errors import ConfigError

MAX_LAYERS = 4096
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
    least: int
    """Smallest integer allowed on a command line."""
    most: int
    """Largest integer allowed."""
    reads: Callable[[str], Any] | None
    """Parses values that are not just a number; raises ``ValueError`` with what it expects."""
    writes: Callable[[Any], str]

    def parse_words(self, words: tuple[str, ...]) -> Any:
        """Return the typed value of the words after the flag.

        Raises:
            ConfigError: the words cannot be parsed.
        """
        if self.many:
            return words
        expected = 0 if self.kind is bool else 1
        if len(words) != expected:
            raise ConfigError(
                f"Expected {expected} values after {self.flag}, got {len(words)}: "
                f"{' '.join(words)!r}."
            )
        return self.convert(words[0]) if words else not self.default

    def convert(self, value: Any) -> Any:
        """Convert a parsed argument to a typed value; lists become tuples.

        Raises:
            ConfigError: a string cannot be parsed.
        """
        if isinstance(value, list):
            return tuple(value)
        if isinstance(value, Enum):
            value = value.value if isinstance(value.value, str) else value.name
        is_text = isinstance(value, str) and self.kind is not bool
        if is_text and self.many:
            return (value,)
        whole = f"a whole number from {self.least}"
        whole += f" to {self.most}" if self.most == MAX_LAYERS else ""
        try:
            parsed = (self.reads or self.kind)(value) if is_text else value
            is_whole = self.kind is int and type(parsed) is int
            if is_whole and (parsed > self.most or (is_text and parsed < self.least)):
                raise ValueError(whole)
            return parsed
        except ValueError as error:
            number = whole if self.kind is int else "a number"
            expected = error if self.reads else number
            raise ConfigError(f"Expected {self.flag} as {expected}, got {value}.") from None

    def format_words(self, value: Any) -> tuple[str, ...] | None:
        """Return the words after the flag for ``value``; None if the flag is to be omitted."""
        if value is None or (self.kind is bool and value == self.default):
            return None
        if self.kind is bool:
            return ()
        return tuple(map(str, value)) if self.many else (self.writes(value),)


def flag(
    default: Any = MISSING,
    name: str | None = None,
    *,
    argument: str | None = None,
    attribute: str | None = "",
    hf: str | None = None,
    least: int = 1,
    most: int = 2**31 - 1,
    reads: Callable[[str], Any] | None = None,
    writes: Callable[[Any], str] = str,
) -> Any:
    """Declare a dataclass field with its row; see :class:`Field`.

    Args:
        default: Megatron's default; omitted for a required field.
        name: Megatron's flag; None for the field's name with dashes.
        argument: None for the flag's name with underscores.
        attribute: "" for the same name as the argument.
    """
    names = {"flag": name, "argument": argument, "attribute": attribute, "hf": hf}
    row = names | {"least": least, "most": most, "reads": reads, "writes": writes}
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
            row = dict(item.metadata[_ROW])
            row["flag"] = row["flag"] or "--" + item.name.replace("_", "-")
            row["argument"] = row["argument"] or row["flag"].removeprefix("--").replace("-", "_")
            if row["attribute"] == "":
                row["attribute"] = row["argument"]
            parts = [hints[item.name], *get_args(hints[item.name])]
            kind = next((part for part in parts if part in (bool, int, float)), str)
            many = row["reads"] is None and any(get_origin(part) is tuple for part in parts)
            default = None if item.default is MISSING else item.default
            found.append(Field(field=item.name, default=default, kind=kind, many=many, **row))
    return tuple(found)


def read_arguments(owner: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields from Megatron's arguments by name.

    Missing arguments have Megatron's default.

    Raises:
        ConfigError: a string cannot be parsed.
    """
    return {r.field: r.convert(arguments.get(r.argument, r.default)) for r in rows(owner)}


def read_attributes(owner: type, config: Any) -> dict[str, Any]:
    """Return the values of those fields that a ``TransformerConfig`` has as attributes."""
    named = ((r, r.attribute) for r in rows(owner) if r.attribute is not None)
    return {r.field: r.convert(getattr(config, name)) for r, name in named if hasattr(config, name)}
