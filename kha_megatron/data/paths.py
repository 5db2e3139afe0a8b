"""Where training data lies: names inside a prepared folder, and what a command line points to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kha_megatron.data.splits import USUAL, check_split, count_documents
from kha_megatron.errors import DataError

CORPUS = "corpus"
"""Prefix of a prepared folder's dataset: Megatron's ``--data-path FOLDER/corpus``."""

TOKENIZER = "tokenizer"
"""A prepared folder's tokenizer: Megatron's ``--tokenizer-model FOLDER/tokenizer``."""

BLENDS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Megatron's arguments that take dataset prefixes."""


def check_data(arguments: Mapping[str, Any], *, look: bool = True) -> None:
    """What Megatron's arguments name must be there, and a ``--split`` leave no part empty.

    Args:
        arguments: by name.
        look: False where the files lie on machines that this one does not see.

    Raises:
        DataError: nothing is named, a file is missing, or a part would have no documents; with the
            command that makes it, or a split that works. Mock data of an unknown vocabulary.
    """
    if lacks_vocabulary(arguments):
        raise DataError(
            "--mock-data has no tokenizer that says how many tokens there are: give --vocab-size N"
        )
    if arguments.get("mock_data"):
        return
    blends = {flag: arguments.get(flag[2:].replace("-", "_")) or () for flag in BLENDS}
    listed = arguments.get("data_args_path") or arguments.get("per_split_data_args_path")
    if not any(blends.values()) and not listed:
        raise DataError(
            "no training data: give --data-path PREFIX, or to `kha-megatron launch` --data FOLDER "
            "(`kha-megatron data prepare` makes both), or --mock-data"
        )
    for flag, words in blends.items() if look else ():
        check_blend(flag, words)
    for prefix in _prefixes(blends["--data-path"]) if look else ():
        if "://" not in prefix:
            check_split(arguments.get("split") or USUAL[0], count_documents(prefix), prefix)
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and not model:
        raise DataError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model FOLDER")
    if kind is None:
        raise DataError(
            "no tokenizer: give --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER, "
            "or to `kha-megatron launch` --data FOLDER (`kha-megatron data prepare` makes both)"
        )
    if look:
        check_tokenizer(model)


def lacks_vocabulary(arguments: Mapping[str, Any]) -> bool:
    """Whether mock data is asked for, and nothing says how many tokens there are.

    Args:
        arguments: by name.
    """
    null = arguments.get("tokenizer_type") in (None, "NullTokenizer")
    counted = arguments.get("vocab_size") or arguments.get("use_checkpoint_args")  # which knows
    return bool(arguments.get("mock_data") and null and not counted)


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
