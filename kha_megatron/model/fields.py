"""Dataclass fields that map to Megatron arguments and Hugging Face config keys.

Example::

    @dataclass
    class Config:
        num_layers: int = flag(hf="num_hidden_layers")

    read_arguments(Config, {"num_layers": 12})  # {"num_layers": 12}
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from kha_megatron.errors import ConfigError, show_value

MAX_LAYERS = 4096
"""Upper limit for layers, and for repetitions in a layer pattern."""
MAX_EXPERTS = 10**5
"""Upper limit for experts. Other sizes do not determine the length of a list."""

_ROW = "row"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field declared with :func:`flag`."""

    field: str
    flag: str  # boolean flags do not take a value, they invert the default
    argument: str  # name in Megatron's ``args`` and in its checkpoints
    attribute: str | None  # name in ``TransformerConfig``, if it has this field
    hf: str | None  # key in ``config.json``, None if it depends on the architecture
    default: Any  # Megatron's default (None for required fields)
    kind: type  # int, float, str or bool
    many: bool  # whether the flag takes a list of values
    least: int  # minimum for integers; 0 is accepted as well where Megatron records it
    most: int
    reads: Callable[[str], Any] | None  # parser that raises ValueError with the expected format
    writes: Callable[[Any], str]

    def parse_words(self, words: tuple[str, ...]) -> Any:
        if self.many:
            return words
        expected = 0 if self.kind is bool else 1
        if len(words) != expected:
            raise ConfigError(
                f"{self.flag} takes {expected or 'no'} value, got {' '.join(words)!r}."
            )
        return self.convert(words[0]) if words else not self.default

    def convert(self, value: Any) -> Any:
        """Convert a string, list or enum member to the type of this field."""
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, Enum):
            value = value.value if isinstance(value.value, str) else value.name
        is_text = isinstance(value, str) and self.kind is not bool
        if is_text and self.many:
            return (value,)
        shown = show_value(value)
        try:
            parsed = (self.reads or self.kind)(value) if is_text else value
        except ValueError as error:
            expected = str(error) if self.reads else self._expected_type
            raise ConfigError(f"{self.flag} must be {expected}, got {shown}.") from error
        if not self._has_type(parsed):
            raise ConfigError(f"{self.flag} must be {self._expected_type}, got {shown}.")
        least = self.least if is_text else min(self.least, 0)
        if self.kind is int and type(parsed) is int and not least <= parsed <= self.most:
            limits = f"between {self.least} and {self.most}"
            raise ConfigError(f"{self.flag} must be an integer {limits}, got {shown}.")
        return parsed

    @property
    def _expected_type(self) -> str:
        return {int: "an integer", float: "a number"}.get(self.kind, "a string")

    def _has_type(self, value: Any) -> bool:
        """Whether a value that is not from a command line has the right type, or is missing."""
        if value is None or self.many or self.reads or self.kind is bool:
            return True
        return isinstance(value, (int, float) if self.kind is float else self.kind)

    def format_words(self, value: Any) -> tuple[str, ...] | None:
        """Inverse of :meth:`parse_words`. None means that we should not pass the flag at all."""
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
    """Like ``dataclasses.field``, with the metadata of :class:`Field`.

    Names are derived from the field by default, e.g. ``num_layers`` becomes ``--num-layers``. If
    you pass a different flag, ``argument`` and ``attribute`` follow the flag.
    """
    names = {"flag": name, "argument": argument, "attribute": attribute, "hf": hf}
    row = names | {"least": least, "most": most, "reads": reads, "writes": writes}
    return field(default=default, metadata={_ROW: row})


@cache
def rows(*kinds: type) -> tuple[Field, ...]:
    """Return all fields of the given dataclasses that were declared with :func:`flag`."""
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
    """Read the fields of a dataclass from Megatron's arguments (or use their defaults)."""
    return {r.field: r.convert(arguments.get(r.argument, r.default)) for r in rows(owner)}


def read_attributes(owner: type, config: Any) -> dict[str, Any]:
    """Like :func:`read_arguments`, but for the attributes of a ``TransformerConfig``."""
    named = ((r, r.attribute) for r in rows(owner) if r.attribute is not None)
    return {r.field: r.convert(getattr(config, name)) for r, name in named if hasattr(config, name)}
