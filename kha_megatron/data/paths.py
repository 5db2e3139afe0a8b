"""Where training data lies: names inside a prepared folder, and what a command line points to."""

from collections.abc import Sequence
from pathlib import Path

from kha_megatron.errors import DataError

CORPUS = "corpus"
"""Prefix of a prepared folder's dataset: Megatron's ``--data-path FOLDER/corpus``."""

TOKENIZER = "tokenizer"
"""A prepared folder's tokenizer: Megatron's ``--tokenizer-model FOLDER/tokenizer``."""

BLENDS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Megatron's arguments that take dataset prefixes."""


def check_blend(flag: str, words: Sequence[str]) -> None:
    """The files of every dataset that a flag names must be on this machine.

    Object stores (``s3://``, ``msc://``) are not looked at.

    Args:
        flag: one of :data:`BLENDS`, for the message.
        words: ``prefix ...`` or ``weight prefix weight prefix ...``.

    Raises:
        DataError: a file is missing or empty.
    """
    for prefix in _prefixes(words):
        for file in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
            if "://" not in prefix and not (file.is_file() and file.stat().st_size):
                problem = "is empty" if file.is_file() else "does not exist"
                raise DataError(
                    f"{flag} {prefix}: {file} {problem}: make it with `kha-megatron data prepare`"
                )


def check_tokenizer(model: str | None) -> None:
    """A tokenizer that is named by a path must be there; another name may be one on a hub.

    Raises:
        DataError: it is not.
    """
    if model and model.startswith(("/", ".")) and not Path(model).exists():
        raise DataError(
            f"no tokenizer at {model}: name one that `kha-megatron data prepare` has made"
        )


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    def is_weight(word: str) -> bool:
        try:
            float(word)
        except ValueError:
            return False
        return True

    weighted = len(words) % 2 == 0 and all(is_weight(word) for word in words[::2])
    return words[1::2] if weighted else words
