"""Megatron command lines as data: an ordered mapping from flag to the words that follow it.

``{"--lr": ("1e-3",), "--swiglu": (), "--data-path": ("0.5", "a", "0.5", "b")}``. Two of them merge
with ``|``: the right one's words replace the left one's, and no flag appears twice.
"""

import re
from collections.abc import Mapping, Sequence

from kha_megatron.errors import ConfigError

Arguments = dict[str, tuple[str, ...]]
"""Flag, with its dashes, to its words; no words for a flag that only switches something on."""

REPEATED = frozenset({"--heads"})
"""Flags that take one word each time they are given, and are given as often as there are words."""

_FLAG = re.compile(r"--[A-Za-z]")


def parse(words: Sequence[str]) -> Arguments:
    """Read ``--flag``, ``--flag value ...``, ``--flag=value``; the last of a repeated flag counts,
    unless it is one of :data:`REPEATED`.

    A word is a flag if it begins with two dashes and a letter: ``-1e-3`` is a value.

    Raises:
        ConfigError: a word belongs to no flag.
    """
    arguments: Arguments = {}
    flag, closed = None, True
    for word in words:
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            closed = bool(equals)  # argparse gives --flag=value exactly that one value
            before = arguments.get(flag, ()) if flag in REPEATED else ()
            arguments[flag] = (*before, value) if closed else before
        elif closed or flag is None:
            raise ConfigError(
                f"unexpected argument {word!r}: Megatron's arguments begin with --, "
                "as in --lr 1e-3 or --lr=1e-3"
            )
        else:
            arguments[flag] += (word,)
    return arguments


def render(arguments: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Inverse of :func:`parse`, in words that argparse reads back unchanged.

    A single empty or dash-led value is written ``--flag=value``: argparse takes ``-1e-3`` alone for
    an option.
    """
    words: list[str] = []
    for flag, values in arguments.items():
        if flag in REPEATED:
            words += [word for value in values for word in (flag, value)]
        elif len(values) == 1 and (not values[0] or values[0].startswith("-")):
            words.append(f"{flag}={values[0]}")
        else:
            words += [flag, *values]
    return words
