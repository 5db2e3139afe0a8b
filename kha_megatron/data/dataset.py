"""Prepared data directories, and the training data that a command line names.

A prepared directory contains ``corpus.bin`` and ``corpus.idx`` (Megatron's IndexedDataset),
``tokenizer/`` (Hugging Face format) and ``data.json`` (:class:`DataReport`).
"""

import math
import os
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kha_megatron.checkpoint.reading import read_json
from kha_megatron.errors import ConfigError, DataError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CORPUS = "corpus"
"""Name of the dataset: Megatron's ``--data-path DIR/corpus``."""

TOKENIZER = "tokenizer"
"""Name of the tokenizer: Megatron's ``--tokenizer-model DIR/tokenizer``."""

REPORT = "data.json"
FORMAT = 1
"""Version of ``data.json``."""

BLENDS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
"""Megatron's arguments that take dataset prefixes."""

PARTS = ("training", "validation", "test")
USUAL = ("969,30,1", "99,1,0")
"""Megatron's default ``--split``, and the one of its examples."""

_HEADER = struct.Struct("<9sQBQ")
"""Header of an ``.idx`` file: magic, version, dtype, number of sequences."""


def printable(path: Path) -> str:
    """Return ``path`` as text that can be printed, with undecodable bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Contents and origin of a prepared directory, as stored in its ``data.json``."""

    sources: list[str]
    globs: list[str]
    exclude: list[str]
    max_file_bytes: int
    """Longer files were split into several documents."""
    files: int
    split_files: int
    """Number of files that were split."""
    bytes: int
    """Bytes of UTF-8 text in the files."""
    documents: int
    tokens: int
    """Tokens in the dataset, including one end-of-document token per document."""
    altered_documents: int
    """Documents that the tokenizer does not decode to the original text."""
    dtype: str
    """NumPy dtype of the stored tokens: uint16 or int32."""
    file_bytes: dict[str, int]
    """Size of each dataset file."""
    tokenizer: str
    """``"trained"``, or the directory that the tokenizer was taken from."""
    vocab_size: int
    vocab_size_asked: int | None
    """Requested vocabulary size; larger than ``vocab_size`` if no pair was left to merge. None for
    an existing tokenizer."""
    eod_token: str
    eod_id: int
    skipped: dict[str, dict[str, Any]]
    """``{reason: {"count": n, "examples": [...]}}`` for each reason in ``prepare.SKIPPED``."""
    versions: dict[str, str | None]
    tokenizer_sample_bytes: int | None
    """Bytes that the tokenizer was trained on; None for an existing tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the format version as JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the report of a prepared directory.

        Raises:
            DataError: the report is missing or cannot be read by this version.
        """
        name = printable(folder)
        try:
            values = read_json(folder / REPORT)
            if values.pop("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            return cls(**values)
        except OSError as error:
            raise DataError(
                f"{name} contains no {REPORT}. Pass a directory made by `kha-megatron data prepare`"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{name}/{REPORT} cannot be read ({error}). Run `kha-megatron data prepare` again"
            ) from error


def verify(folder: Path) -> DataReport:
    """Open a prepared directory as training does and compare it with its report.

    Raises:
        DataError: a file is missing or damaged, or differs from ``data.json``.
    """
    report, name = DataReport.read(folder), printable(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    datasets = indexed_dataset_module()
    try:
        found: dict[str, Any] = {
            "file_bytes": {file: os.path.getsize(folder / file) for file in report.file_bytes}
        }
        if found["file_bytes"] == report.file_bytes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron warns that this process has no rank
                dataset = datasets.IndexedDataset(str(folder / CORPUS))
            found |= {
                "documents": len(dataset.document_indices) - 1,
                "tokens": int(dataset.sequence_lengths.sum(dtype="int64")),
                "dtype": dataset.index.dtype.__name__,
            }
    except (OSError, AssertionError, ValueError) as error:
        raise DataError(
            f"{name} cannot be opened ({error}). Run `kha-megatron data prepare` again"
        ) from error
    found |= {"vocab_size": vocabulary_size(tokenizer), "eod_id": tokenizer.eos_token_id}
    for what, value in found.items():
        if value != getattr(report, what):
            raise DataError(
                f"{name}: expected {what} {getattr(report, what)} as in {REPORT}, got {value}. Run "
                "`kha-megatron data prepare` again"
            )
    return report


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a local Hugging Face directory without running code from it.

    Raises:
        DataError: transformers cannot load it, it is no fast tokenizer, or it has no
            end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        if not folder.is_dir():  # transformers would take the name for one on the Hub
            raise FileNotFoundError("no such directory")
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise a dozen types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot load a tokenizer from {printable(folder)} ({reason}). Pass a directory "
            "written by save_pretrained"
        ) from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {printable(folder)} must be fast and have an end-of-sequence token. "
            "Save it with a tokenizer.json and set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return one more than the largest id, or the number of tokens if that is larger."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def indexed_dataset_module() -> Any:
    """Import ``megatron.core.datasets.indexed_dataset``, which takes seconds.

    Raises:
        MissingDependencyError: Megatron-Core is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that are not needed to write a file
        try:
            from megatron.core.datasets import indexed_dataset
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", "megatron.core"):
                raise
            raise MissingDependencyError("megatron-core", "its data format", "megatron") from error
    return indexed_dataset


def check_data(arguments: Mapping[str, Any], *, look: bool = True) -> None:
    """Check that the training data and the tokenizer of a command line exist.

    Also checks that ``--split`` leaves no part of the dataset empty. Object stores (``s3://``,
    ``msc://``) are not read.

    Args:
        arguments: Megatron's arguments by name.
        look: False if the files are on machines that this one cannot see.

    Raises:
        DataError: a file is missing or not given, or a part of the split has no documents.
    """
    if lacks_vocabulary(arguments):
        raise DataError("--mock-data needs the number of tokens. Add --vocab-size N")
    if arguments.get("mock_data"):
        return
    blends = {flag: arguments.get(flag[2:].replace("-", "_")) or () for flag in BLENDS}
    listed = arguments.get("data_args_path") or arguments.get("per_split_data_args_path")
    if not any(blends.values()) and not listed:
        raise DataError(
            "no training data given. Add --data-path PREFIX or --mock-data, or pass --data DIR to "
            "`kha-megatron launch` (`kha-megatron data prepare` makes both)"
        )
    for flag, words in blends.items() if look else ():
        for prefix in _prefixes(words):
            if "://" not in prefix:
                _check_files(flag, prefix)
                if flag == "--data-path":
                    check_split(arguments.get("split") or USUAL[0], count_documents(prefix), prefix)
    if arguments.get("tokenizer_type") is None:
        raise DataError(
            "no tokenizer given. Add --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR, "
            "or pass --data DIR to `kha-megatron launch`"
        )
    model = arguments.get("tokenizer_model")
    # another name may be one on the Hub
    if look and model and model.startswith(("/", ".")) and not Path(model).exists():
        raise DataError(
            f"--tokenizer-model {model} does not exist. Make it with `kha-megatron data prepare`"
        )


def lacks_vocabulary(arguments: Mapping[str, Any]) -> bool:
    """Return True for mock data if no argument gives the vocabulary size."""
    null = arguments.get("tokenizer_type") in (None, "NullTokenizer")
    known = arguments.get("vocab_size") or arguments.get("use_checkpoint_args")
    return bool(arguments.get("mock_data") and null and not known)


def _check_files(flag: str, prefix: str) -> None:
    for file in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        if not (file.is_file() and file.stat().st_size):
            problem = "is empty" if file.is_file() else "does not exist"
            raise DataError(
                f"{flag} {prefix}: {file} {problem}. Make it with `kha-megatron data prepare`"
            )


def _prefixes(words: Sequence[str]) -> Sequence[str]:
    """Return the prefixes of ``prefix ...`` or ``weight prefix weight prefix ...``."""

    def is_weight(word: str) -> bool:
        try:
            float(word)
        except ValueError:
            return False
        return True

    weighted = len(words) % 2 == 0 and all(is_weight(word) for word in words[::2])
    return words[1::2] if weighted else words


def count_documents(prefix: str | Path) -> int:
    """Return the number of documents of a dataset, from the header of its ``.idx`` file.

    Raises:
        DataError: the file cannot be read or is not an index.
    """
    try:
        with open(f"{prefix}.idx", "rb") as stream:
            return _HEADER.unpack(stream.read(_HEADER.size))[3]
    except (OSError, struct.error) as error:
        raise DataError(
            f"{prefix}.idx cannot be read as an index ({error}). Make it with "
            "`kha-megatron data prepare`"
        ) from error


def documents_of(split: str, documents: int) -> list[int | None]:
    """Return the number of documents of each of :data:`PARTS`; None for a part of share 0.

    Args:
        split: one to three shares such as ``969,30,1``, of any sum.
        documents: number of documents in the dataset.

    Raises:
        ConfigError: the split has no share, or more than three.
    """
    try:
        shares = [float(share) for share in re.findall("[.0-9]+", split)]  # as Megatron parses them
    except ValueError:
        shares = []
    if not 0 < len(shares) <= len(PARTS) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"--split {split!r}: expected one to three shares, as in {USUAL[0]}")
    shares += [0.0] * (len(PARTS) - len(shares))
    ends = accumulate((share / sum(shares) for share in shares), initial=0.0)
    return [
        round(end * documents) - round(begin * documents) if end > begin else None
        for begin, end in pairwise(ends)
    ]


def check_split(split: str, documents: int, name: str) -> None:
    """Refuse a split that leaves a part without documents, with which Megatron never starts.

    Args:
        split: shares such as ``969,30,1``.
        documents: number of documents in the dataset.
        name: name of the dataset, for the message.

    Raises:
        ConfigError: the split cannot be parsed.
        DataError: a part is empty; the message names a split that works.
    """
    found = documents_of(split, documents)
    empty = [part for part, count in zip(PARTS, found, strict=True) if count == 0]
    if empty:
        # one document for every part that had none, from the part that has most
        counts = [0 if count is None else max(count, 1) for count in found]
        most = counts.index(max(counts))
        counts[most] -= sum(counts) - sum(count or 0 for count in found)
        works = ",".join(map(str, counts)) if counts[most] > 0 else "1,0,0"
        raise DataError(
            f"--split {split} leaves no document for {' and '.join(empty)} of the {documents} in "
            f"{name}, and Megatron would wait forever. Use --split {works}"
        )
