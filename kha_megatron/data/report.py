"""What a prepared folder holds, and whether it still does."""

import os
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_origin, get_type_hints

from kha_megatron.checkpoint.reading import read_json
from kha_megatron.data import tokenization
from kha_megatron.data.paths import CORPUS, TOKENIZER
from kha_megatron.data.text_files import SKIPPED, printable
from kha_megatron.errors import DataError

REPORT = "data.json"
FORMAT = 1
"""Version of ``data.json``."""

_AGAIN = "prepare it again"


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What went into a prepared folder, as its ``data.json`` says."""

    sources: list[str]
    globs: list[str]
    exclude: list[str]
    max_file_bytes: int
    """Files longer than this were split into several documents."""
    files: int
    """Files used."""
    split_files: int
    """Those of them that were split."""
    bytes: int
    """Bytes of UTF-8 text in the files used."""
    documents: int
    tokens: int
    """Tokens in the dataset, one end-of-document token per document included."""
    altered_documents: int
    """Documents that the tokenizer does not give back as they were: 0 with a tokenizer trained
    here, more with one that normalises text or lacks characters."""
    dtype: str
    """NumPy name of the type that the tokens are stored in."""
    file_bytes: dict[str, int]
    """Size of each of the dataset's files."""
    tokenizer: str
    """``"trained"``, or the folder that it was taken from."""
    vocab_size: int
    vocab_size_asked: int | None
    """Larger than ``vocab_size`` if the text ran out of pairs to merge; None for a reused one."""
    eod_token: str
    eod_id: int
    skipped: dict[str, dict[str, Any]]
    """``{reason: {"count": n, "examples": [...]}}``, reasons as in ``text_files.SKIPPED``."""
    versions: dict[str, str | None]
    tokenizer_sample_bytes: int | None = None
    """Bytes that the tokenizer was trained on; None for a reused one, and where it was all of them
    (before samples were taken)."""

    def to_dict(self) -> dict[str, Any]:
        """All fields and the format's version as plain JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The report of a prepared folder.

        Raises:
            DataError: it has none, or one that this version cannot read.
        """
        name = printable(folder)
        try:
            values = read_json(folder / REPORT)
        except OSError as error:
            raise DataError(
                f"{name} holds no {REPORT}: name a folder made by `kha-megatron data prepare`"
            ) from error
        except ValueError as error:
            raise DataError(f"{name}/{REPORT} is damaged ({error}): {_AGAIN}") from error
        keys = {"format", *(field.name for field in fields(cls))}
        if isinstance(values, dict):
            values.setdefault("tokenizer_sample_bytes")
        if not isinstance(values, dict) or set(values) != keys or values["format"] != FORMAT:
            raise DataError(
                f"{name}/{REPORT} is not of format {FORMAT}: written by another version of "
                f"kha-megatron; {_AGAIN}"
            )
        wrong = [n for n, kind in get_type_hints(cls).items() if not _is(values[n], kind)]
        if not wrong and not all(_is_skip(values["skipped"].get(reason)) for reason in SKIPPED):
            wrong = ["skipped"]
        if wrong:
            raise DataError(f"{name}/{REPORT} is damaged ({wrong[0]}): {_AGAIN}")
        return cls(**{key: value for key, value in values.items() if key != "format"})


def _is(value: object, kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(value, kind if origin in (None, UnionType) else origin)


def _is_skip(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("count"), int)
        and isinstance(entry.get("examples"), list)
    )


def verify(folder: Path) -> DataReport:
    """Open a prepared folder the way training does, and compare it with its report.

    Raises:
        DataError: something is missing, damaged, or not what ``data.json`` says.
    """
    report, name = DataReport.read(folder), printable(folder)
    tokenizer = tokenization.load_tokenizer(folder / TOKENIZER)
    datasets = tokenization.indexed_dataset_module()
    for file, expected in report.file_bytes.items():
        try:
            size = os.path.getsize(folder / file)
        except OSError as error:
            raise DataError(f"{name}/{file} cannot be opened ({error}): {_AGAIN}") from error
        if size != expected:
            raise DataError(f"{name}/{file} has {size} bytes, not {expected}: {_AGAIN}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process has no rank
            dataset = datasets.IndexedDataset(str(folder / CORPUS))
    except (OSError, AssertionError, ValueError) as error:
        raise DataError(f"{name}/{CORPUS}.idx cannot be opened ({error}): {_AGAIN}") from error
    found = {
        "documents": len(dataset.document_indices) - 1,
        "tokens": int(dataset.sequence_lengths.sum(dtype="int64")),
        "dtype": dataset.index.dtype.__name__,
        "vocab_size": tokenization.vocabulary_size(tokenizer),
        "eod_id": tokenizer.eos_token_id,
    }
    for what, value in found.items():
        expected = getattr(report, what)
        if value != expected:
            raise DataError(f"{name} has {what} {value}, {REPORT} says {expected}: {_AGAIN}")
    return report
