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

_DECLARATION = "declaration"
"""Key in the metadata of dataclass fields."""


def as_flag(name: str) -> str:
    """Return the flag of an argument or field, e.g. ``--num-layers`` for ``num_layers``."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field declared with :func:`flag`."""

    name: str
    flag: str  # boolean flags do not take a value, they invert the default
    argument: str  # name in Megatron's ``args`` and in its checkpoints
    attribute: str | None  # name in ``TransformerConfig``, if it has this field
    hf: str | None  # key in ``config.json``, None if it depends on the architecture
    default: Any  # Megatron's default (None for required fields)
    value_type: type  # int, float, str or bool
    is_list: bool  # whether the flag takes a list of values
    minimum: int  # for integers on the command line
    maximum: int
    parser: Callable[[str], Any] | None  # raises ValueError with the expected format
    formatter: Callable[[Any], str]  # inverse of the parser

    def parse_words(self, words: tuple[str, ...]) -> Any:
        """Convert the words that follow the flag on a command line to a value."""
        if self.is_list:
            return words
        takes_value = self.value_type is not bool
        if len(words) != int(takes_value):
            expected = "1" if takes_value else "no"
            raise ConfigError(f"{self.flag} takes {expected} value, got {' '.join(words)!r}.")
        if not takes_value:
            return not self.default
        return self.convert(words[0])

    def convert(self, value: Any) -> Any:
        """Convert a string, list or enum member to the type of this field."""
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, Enum):
            value = value.value if isinstance(value.value, str) else value.name
        if not isinstance(value, str) or self.value_type is bool:
            # Megatron records 0 for some sizes that do not apply
            self._check(value, value, minimum=min(self.minimum, 0))
            return value
        if self.is_list:
            return (value,)
        parsed = self._parse(value)
        self._check(parsed, value, minimum=self.minimum)
        return parsed

    def _parse(self, text: str) -> Any:
        parse = self.parser or self.value_type
        try:
            return parse(text)
        except ValueError as error:
            expected = str(error) if self.parser else self._expected_type
            raise ConfigError(f"{self.flag} must be {expected}, got {show_value(text)}.") from error

    def _check(self, value: Any, passed: Any, minimum: int) -> None:
        """Check the type and the limits. ``passed`` is the value before it was parsed."""
        shown = show_value(passed)
        if not self._has_type(value):
            raise ConfigError(f"{self.flag} must be {self._expected_type}, got {shown}.")
        if self.value_type is not int or type(value) is not int:
            return
        if minimum <= value <= self.maximum:
            return
        raise ConfigError(
            f"{self.flag} must be an integer between {self.minimum} and {self.maximum}, got "
            f"{shown}."
        )

    @property
    def _expected_type(self) -> str:
        if self.value_type is int:
            return "an integer"
        return "a number" if self.value_type is float else "a string"

    def _has_type(self, value: Any) -> bool:
        """Whether a value that is not from a command line has the right type, or is missing."""
        if value is None or self.is_list or self.parser:
            return True
        if self.value_type is bool:
            return True
        if self.value_type is float:
            return isinstance(value, (int, float))
        return isinstance(value, self.value_type)

    def format_words(self, value: Any) -> tuple[str, ...] | None:
        """Inverse of :meth:`parse_words`. None means that we should not pass the flag at all."""
        if value is None:
            return None
        if self.value_type is bool:
            return None if value == self.default else ()
        if self.is_list:
            return tuple(map(str, value))
        return (self.formatter(value),)


@dataclass(frozen=True, kw_only=True)
class _Declaration:
    """Arguments of :func:`flag`. Names are None, or :data:`_DERIVED`, if they follow the field."""

    flag_name: str | None
    argument: str | None
    attribute: str | None
    hf: str | None
    minimum: int
    maximum: int
    parser: Callable[[str], Any] | None
    formatter: Callable[[Any], str]


_DERIVED = ""
"""Default of ``attribute``, for which None means that there is no attribute."""


def flag(
    default: Any = MISSING,
    flag_name: str | None = None,
    *,
    argument: str | None = None,
    attribute: str | None = _DERIVED,
    hf: str | None = None,
    minimum: int = 1,
    maximum: int = 2**31 - 1,
    parser: Callable[[str], Any] | None = None,
    formatter: Callable[[Any], str] = str,
) -> Any:
    """Like ``dataclasses.field``, with the metadata of :class:`Field`.

    Names are derived from the field by default, e.g. ``num_layers`` becomes ``--num-layers``. If
    you pass a different flag, ``argument`` and ``attribute`` follow the flag. Pass
    ``attribute=None`` if ``TransformerConfig`` does not have the field.
    """
    declaration = _Declaration(
        flag_name=flag_name,
        argument=argument,
        attribute=attribute,
        hf=hf,
        minimum=minimum,
        maximum=maximum,
        parser=parser,
        formatter=formatter,
    )
    return field(default=default, metadata={_DECLARATION: declaration})


@cache
def declared_fields(*owners: type) -> tuple[Field, ...]:
    """Return all fields of the given dataclasses that were declared with :func:`flag`."""
    declared = []
    for owner in owners:
        hints = get_type_hints(owner)
        for dataclass_field in fields(owner):
            declaration = dataclass_field.metadata.get(_DECLARATION)
            if declaration is not None:
                hint = hints[dataclass_field.name]
                declared.append(_build_field(dataclass_field, declaration, hint))
    return tuple(declared)


def _build_field(dataclass_field: Any, declaration: _Declaration, hint: Any) -> Field:
    """Derive everything that was not declared from the name and the type hint of the field."""
    flag_name = declaration.flag_name
    if flag_name is None:
        flag_name = as_flag(dataclass_field.name)
    argument = declaration.argument
    if argument is None:
        argument = flag_name.removeprefix("--").replace("-", "_")
    attribute = declaration.attribute
    if attribute == _DERIVED:
        attribute = argument
    default = dataclass_field.default
    return Field(
        name=dataclass_field.name,
        flag=flag_name,
        argument=argument,
        attribute=attribute,
        hf=declaration.hf,
        default=None if default is MISSING else default,
        value_type=_value_type(hint),
        is_list=_accepts_tuple(hint) and declaration.parser is None,
        minimum=declaration.minimum,
        maximum=declaration.maximum,
        parser=declaration.parser,
        formatter=declaration.formatter,
    )


def _value_type(hint: Any) -> type:
    """Return e.g. int for ``int | None``. Types other than bool, int and float are strings."""
    for alternative in (hint, *get_args(hint)):
        if alternative in (bool, int, float):
            return alternative
    return str


def _accepts_tuple(hint: Any) -> bool:
    alternatives = (hint, *get_args(hint))
    return any(get_origin(alternative) is tuple for alternative in alternatives)


def read_arguments(
    owner: type,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Read the fields of a dataclass from Megatron's arguments (or use their defaults)."""
    values = {}
    for item in declared_fields(owner):
        value = arguments.get(item.argument, item.default)
        values[item.name] = item.convert(value)
    return values


def read_attributes(owner: type, config: Any) -> dict[str, Any]:
    """Read those fields of a dataclass that a ``TransformerConfig`` has as attributes."""
    values = {}
    for item in declared_fields(owner):
        attribute = item.attribute
        if attribute is not None and hasattr(config, attribute):
            values[item.name] = item.convert(getattr(config, attribute))
    return values
