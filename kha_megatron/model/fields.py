"""How Megatron and Hugging Face name what describes a run: one row a field, declared at the field.

``num_layers: int | None = said("--num-layers", hf="num_hidden_layers")`` in a dataclass says the
flag, the argument that Megatron parses it into (``num_layers``), the attribute of its
``TransformerConfig`` (as the argument, unless another or None is named), the key of ``config.json``
and, as the field's own default, Megatron's. What reads or writes one of those forms loops over
:func:`rows`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from kha_megatron.errors import ConfigError

MOST_LAYERS = 4096
"""Of a model, and times that something may be repeated in what describes its layers."""

_ROW = "said"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field and what others call it."""

    field: str
    flag: str
    """Megatron's, with its dashes. A truth's flag stands alone, and says what the default is not:
    ``--swiglu`` of False, ``--disable-bias-linear`` of True."""
    argument: str
    """Of Megatron's parsed arguments, which its checkpoints record."""
    attribute: str | None
    """Of ``TransformerConfig``; None where it has none."""
    hf: str | None
    """Key of ``config.json``, where most architectures agree on one."""
    default: Any
    """Megatron's. None as well where a model cannot do without."""
    kind: type
    """Of a word: int, float, str or bool."""
    many: bool
    """Whether the flag takes several words."""
    least: int | None
    """The smallest whole number that is allowed."""
    most: int
    """The largest one."""
    reads: Callable[[str], Any] | None
    """Reads text that says more than a number; ``ValueError`` says what is wrong with it."""
    writes: Callable[[Any], str]

    def value_of(self, words: tuple[str, ...]) -> Any:
        """The typed value of the words behind the flag.

        Raises:
            ConfigError: too many words or too few, or one that is no such value.
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
        """A parsed argument as this table's value: text read, lists as tuples.

        Raises:
            ConfigError: text that is no such value.
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
        """The words behind the flag that say ``value``, or None where leaving it out does."""
        if value is None or (self.kind is bool and value == self.default):
            return None
        if self.kind is bool:
            return ()
        return tuple(map(str, value)) if self.many else (self.writes(value),)


def said(
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
    """A dataclass field with its row.

    Args:
        flag: Megatron's.
        default: Megatron's; required where it is left out.
        argument: as the flag, with underscores, if None.
        attribute: as the argument if empty.
        hf: key of ``config.json``.
        least: the smallest whole number allowed; None for any.
        most: the largest one.
        reads: what makes a value of a word that is more than a number; raises ``ValueError``.
        writes: its way back.
    """
    argument = argument or flag.removeprefix("--").replace("-", "_")
    names = {"flag": flag, "argument": argument, "hf": hf, "least": least, "most": most}
    names |= {"attribute": argument if attribute == "" else attribute}
    row = names | {"reads": reads, "writes": writes}
    return field(default=default, metadata={_ROW: row})


@cache
def rows(*kinds: type) -> tuple[Field, ...]:
    """The rows of dataclasses, in the order of their fields; fields made otherwise have none."""
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
    """Values of a dataclass's fields from parsed arguments; what is absent is Megatron's default.

    Args:
        arguments: by their names: ``vars`` of Megatron's, all or only some, or what a checkpoint
            recorded.

    Raises:
        ConfigError: text that is no value of its row.
    """
    return {r.field: r.typed(arguments.get(r.argument, r.default)) for r in rows(owner)}


def attributes(owner: type, config: Any) -> dict[str, Any]:
    """Values of those of a dataclass's fields that an object of Megatron's has as attributes.

    Args:
        config: a ``TransformerConfig``, or what has its names.
    """
    named = ((r, r.attribute) for r in rows(owner) if r.attribute is not None)
    return {r.field: r.typed(getattr(config, name)) for r, name in named if hasattr(config, name)}


def _whole(word: str, least: int | None, most: int) -> int:
    number = int(word) if re.fullmatch(r"[+-]?[0-9]{1,20}", word) else None
    if number is None or number > most or (least is not None and number < least):
        low = "" if least is None else f" from {least} up"
        raise ValueError(f"give a whole number{low}" + (f" to {most}" if number else ""))
    return number
