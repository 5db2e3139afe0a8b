"""Parse and render command lines of Megatron as an ordered dict from flag to words.

For example ``{"--lr": ("1e-3",), "--swiglu": (), "--data-path": ("0.5", "a", "0.5", "b")}``.
"""

import re
from collections.abc import Mapping, Sequence

from kha_megatron.errors import ConfigError

Arguments = dict[str, tuple[str, ...]]
"""Flag, with its dashes, to the words that follow it."""

REPEATED = frozenset({"--heads"})
"""Flags that may be repeated; each occurrence adds one word."""

_FLAG = re.compile(r"--[A-Za-z]")


def parse(words: Sequence[str]) -> Arguments:
    """Parse ``--flag``, ``--flag value ...`` and ``--flag=value``.

    The last occurrence of a flag counts, except for :data:`REPEATED`. A word is a flag if it begins
    with two dashes and a letter, so that ``-1e-3`` is a value.

    Raises:
        ConfigError: a word follows no flag.
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
    """Return the words that argparse parses back to ``arguments``.

    A single value that is empty or begins with a dash is written as ``--flag=value``.
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
