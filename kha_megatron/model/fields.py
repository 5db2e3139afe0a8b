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
    least: int  # minimum for integers; 0 is accepted as well where Megatron records it
    most: int
    reads: Callable[[str], Any] | None  # parser that raises ValueError with the expected format
    writes: Callable[[Any], str]

    def parse_words(self, words: tuple[str, ...]) -> Any:
        if self.is_list:
            return words
        is_flag = self.value_type is bool
        if len(words) != (0 if is_flag else 1):
            expected = "no" if is_flag else "1"
            raise ConfigError(f"{self.flag} takes {expected} value, got {' '.join(words)!r}.")
        if is_flag:
            return not self.default
        return self.convert(words[0])

    def convert(self, value: Any) -> Any:
        """Convert a string, list or enum member to the type of this field."""
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, Enum):
            value = value.value if isinstance(value.value, str) else value.name
        if not isinstance(value, str) or self.value_type is bool:
            self._check(value, value, least=min(self.least, 0))
            return value
        if self.is_list:
            return (value,)
        parsed = self._parse(value)
        self._check(parsed, value, least=self.least)
        return parsed

    def _parse(self, text: str) -> Any:
        parse = self.reads or self.value_type
        try:
            return parse(text)
        except ValueError as error:
            expected = str(error) if self.reads else self._expected_type
            raise ConfigError(f"{self.flag} must be {expected}, got {show_value(text)}.") from error

    def _check(self, value: Any, passed: Any, least: int) -> None:
        """Check the type and the limits. ``passed`` is the value before it was parsed."""
        shown = show_value(passed)
        if not self._has_type(value):
            raise ConfigError(f"{self.flag} must be {self._expected_type}, got {shown}.")
        if self.value_type is not int or type(value) is not int:
            return
        if least <= value <= self.most:
            return
        raise ConfigError(
            f"{self.flag} must be an integer between {self.least} and {self.most}, got {shown}."
        )

    @property
    def _expected_type(self) -> str:
        if self.value_type is int:
            return "an integer"
        return "a number" if self.value_type is float else "a string"

    def _has_type(self, value: Any) -> bool:
        """Whether a value that is not from a command line has the right type, or is missing."""
        if value is None or self.is_list or self.reads:
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
        return (self.writes(value),)


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
    you pass a different flag, ``argument`` and ``attribute`` follow the flag. Pass
    ``attribute=None`` if ``TransformerConfig`` does not have the field.
    """
    declaration = {
        "flag": name,
        "argument": argument,
        "attribute": attribute,
        "hf": hf,
        "least": least,
        "most": most,
        "reads": reads,
        "writes": writes,
    }
    return field(default=default, metadata={_DECLARATION: declaration})


@cache
def declared_fields(*owners: type) -> tuple[Field, ...]:
    """Return all fields of the given dataclasses that were declared with :func:`flag`."""
    declared = []
    for owner in owners:
        hints = get_type_hints(owner)
        for item in fields(owner):
            if _DECLARATION in item.metadata:
                declared.append(_complete(item, hints[item.name]))
    return tuple(declared)


def _complete(item: Any, hint: Any) -> Field:
    """Derive everything that :func:`flag` was not given from a field's name and type hint."""
    declaration = dict(item.metadata[_DECLARATION])
    flag_name = declaration.pop("flag")
    if flag_name is None:
        flag_name = "--" + item.name.replace("_", "-")
    argument = declaration.pop("argument")
    if argument is None:
        argument = flag_name.removeprefix("--").replace("-", "_")
    attribute = declaration.pop("attribute")
    if attribute == "":
        attribute = argument
    return Field(
        name=item.name,
        flag=flag_name,
        argument=argument,
        attribute=attribute,
        default=None if item.default is MISSING else item.default,
        value_type=_value_type(hint),
        is_list=_accepts_tuple(hint) and declaration["reads"] is None,
        **declaration,
    )


def _value_type(hint: Any) -> type:
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
    for declared in declared_fields(owner):
        value = arguments.get(declared.argument, declared.default)
        values[declared.name] = declared.convert(value)
    return values


def read_attributes(owner: type, config: Any) -> dict[str, Any]:
    """Like :func:`read_arguments`, but for the attributes of a ``TransformerConfig``."""
    values = {}
    for declared in declared_fields(owner):
        attribute = declared.attribute
        if attribute is not None and hasattr(config, attribute):
            values[declared.name] = declared.convert(getattr(config, attribute))
    return values
