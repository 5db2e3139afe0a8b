"""Recognize file formats, and open compressed files."""

import codecs
import enum
import gzip
import io
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from kha_megatron.errors import DataError
from kha_megatron.lfs import refuse_lfs_pointer


class Format(enum.Enum):
    TEXT = "text"
    JSON_LINES = "JSON Lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson", ".jl"), Format.JSON_LINES),
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
}

UNSUPPORTED = {
    **dict.fromkeys((".csv", ".tsv", ".xls", ".xlsx"), "Convert it to .jsonl or .parquet"),
    **dict.fromkeys((".feather", ".orc", ".avro"), "Convert it to .parquet"),
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z", ".rar"), "Unpack it and pass the directory"),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".lzma", ".br", ".gzip", ".zstd"), "Use .gz or .zst"),
    **dict.fromkeys((".pdf", ".docx", ".warc", ".wet", ".wat"), "Extract its text"),
    **dict.fromkeys((".bin", ".idx"), "Pass the prefix of a tokenized dataset to --data-path"),
}
"""Formats that we refuse to read, and what to do instead."""

_COMPRESSED = (".gz", ".zst")
_MAGIC = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_ARRAY_OF_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]")
_BEGINNING = 1 << 20  # bytes; how much of a file is read to recognize its format
_BEGINNING_OF_TEXT = 1 << 13  # bytes


class SingleValueError(DataError):
    """A ``.json`` file contains one value, such as the metadata of a dataset, instead of rows."""


def find_format(path: Path) -> Format:
    """Find out the format of a file by its name and, if that does not decide it, its content.

    Raises:
        DataError: If the format is not supported, or if the file is a Git LFS pointer.
        SingleValueError: For a small ``.json`` file that does not contain rows.
    """
    suffix = data_suffix(path)
    last_suffix = path.suffix.lower()
    for name in (suffix, last_suffix):
        if name in UNSUPPORTED:
            pattern = f"*{path.suffix}" if name == last_suffix else path.name
            raise DataError(
                f"{printable(path)}: {name} files are not supported. {UNSUPPORTED[name]}. "
                + how_to_skip(pattern)
            )
    refuse_lfs_pointer(path, DataError)
    if suffix == ".json":
        return _format_of_json(path)
    if suffix not in _SUFFIXES:
        _refuse_rows_with_another_name(path)
        return Format.TEXT
    if suffix in _MAGIC.values() and last_suffix in _COMPRESSED:
        raise DataError(
            f"{printable(path)}: compressed {suffix} files are not supported. Decompress it."
        )
    return _SUFFIXES[suffix]


def is_named_as_rows(path: Path) -> bool:
    suffix = data_suffix(path)
    return suffix in _SUFFIXES or suffix == ".json"


def data_suffix(path: Path) -> str:
    """Return the lower-case file extension without compression: ``.jsonl`` for ``A.JSONL.gz``."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = Path(path.stem).suffix.lower()
    return suffix


def _format_of_json(path: Path) -> Format:
    with open_file(path) as stream:
        beginning = stream.read(_BEGINNING)
        is_whole_file = len(beginning) < _BEGINNING
        if _ARRAY_OF_OBJECTS.match(beginning):
            raise DataError(
                f"{printable(path)} contains a JSON array. Write one JSON object per line, e.g. "
                "with `jq -c '.[]'`."
            )
        first_line, newline, _ = beginning.lstrip().partition(b"\n")
        if not newline and not is_whole_file:
            first_line += stream.readline()
    if not beginning.strip() or isinstance(_parse(first_line), dict):
        return Format.JSON_LINES
    is_single_value = is_whole_file and _parse(beginning) is not None
    raise (SingleValueError if is_single_value else DataError)(
        f"{printable(path)} does not contain JSON Lines. Write one JSON object per line, e.g. with "
        "`jq -c .`. " + how_to_skip("*.json" if is_single_value else path.name)
    )


def _refuse_rows_with_another_name(path: Path) -> None:
    """Raise DataError if the rows of a dataset would be read as text because of a file's name."""
    with open_file(path) as stream:
        beginning = stream.read(_BEGINNING)
    suffix = ".jsonl" if _begins_with_two_objects(beginning) else None
    for magic, suffix_of_magic in _MAGIC.items():
        if beginning.startswith(magic):
            suffix = suffix_of_magic
    if suffix is not None:
        format_name = _SUFFIXES[suffix].value
        raise DataError(
            f"{printable(path)} contains {format_name}, but its name does not end in {suffix}. "
            "Rename it. " + how_to_skip(path.name)
        )


def _begins_with_two_objects(beginning: bytes) -> bool:
    """Return True if the first two lines are JSON objects."""
    if not beginning.startswith(b"{"):
        return False
    first_line, newline, rest = beginning.partition(b"\n")
    second_line, _, _ = rest.partition(b"\n")
    if not newline:
        return False
    is_first_object = isinstance(_parse(first_line), dict)
    is_second_object = isinstance(_parse(second_line), dict)
    return is_first_object and is_second_object


def how_to_skip(pattern: str) -> str:
    quoted = shlex.quote(printable(Path(pattern)))
    return f"To skip such files in a directory, pass --exclude {quoted}."


def _parse(content: bytes) -> Any:
    """Parse JSON. Returns None if it is invalid."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def begins_as_text(path: Path) -> bool:
    """Return False if a file is binary, or text in another encoding than UTF-8."""
    with open_file(path) as stream:
        beginning = stream.read(_BEGINNING_OF_TEXT)
    is_whole_file = len(beginning) < _BEGINNING_OF_TEXT
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(beginning, final=is_whole_file)
    except UnicodeDecodeError:
        return False
    return b"\0" not in beginning


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. Raises DataError if it is damaged."""
    compression = path.suffix.lower()
    with path.open("rb") as file:
        if compression not in _COMPRESSED:
            yield file
            return
        try:
            if not os.fstat(file.fileno()).st_size:
                raise EOFError("the file is empty")
            if compression == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=file))
            else:  # the package zstandard does not notice truncated files
                pyarrow = import_pyarrow(path)
                yield io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{printable(path)} is damaged ({error}). Copy or compress the file again."
            ) from error


def import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Reading {path} requires pyarrow. Run `pip install pyarrow`.") from error
    return pyarrow


def printable(path: Path) -> str:
    """Format a path for messages, escaping control characters and invalid UTF-8."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)
