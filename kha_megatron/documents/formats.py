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
"""The first bytes of files, with the suffix that they should have."""
_ARRAY_OF_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]")
"""A JSON array that is empty or contains objects, after an optional byte order mark."""
_BEGINNING_BYTES = 1 << 20
"""How much of a file is read to recognize its format."""
_TEXT_CHECK_BYTES = 1 << 13
"""How much of a file is read to distinguish text from binary data."""


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
    if suffix in UNSUPPORTED:
        is_compressed = suffix != last_suffix
        pattern = path.name if is_compressed else f"*{path.suffix}"
        raise DataError(
            f"{printable(path)}: {suffix} files are not supported. {UNSUPPORTED[suffix]}. "
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
    """Check that a ``.json`` file contains JSON Lines. The first line decides."""
    with open_file(path) as stream:
        beginning = stream.read(_BEGINNING_BYTES)
        is_whole_file = len(beginning) < _BEGINNING_BYTES
        first_line, newline, _ = beginning.lstrip().partition(b"\n")
        is_line_incomplete = not newline and not is_whole_file
        is_array = _ARRAY_OF_OBJECTS.match(beginning) is not None
        if is_line_incomplete and not is_array:
            first_line += stream.readline()
    if is_array:
        raise DataError(
            f"{printable(path)} contains a JSON array. Write one JSON object per line, e.g. "
            "with `jq -c '.[]'`."
        )
    is_blank = not beginning.strip()
    if is_blank or isinstance(_parse(first_line), dict):
        return Format.JSON_LINES
    mistake = (
        f"{printable(path)} does not contain JSON Lines. Write one JSON object per line, e.g. with "
        "`jq -c .`."
    )
    if is_whole_file and _parse(beginning) is not None:
        raise SingleValueError(f"{mistake} {how_to_skip('*.json')}")
    raise DataError(f"{mistake} {how_to_skip(path.name)}")


def _refuse_rows_with_another_name(path: Path) -> None:
    """Raise DataError if the rows of a dataset would be read as text because of a file's name."""
    suffix = _suffix_of_rows(path)
    if suffix is not None:
        format_name = _SUFFIXES[suffix].value
        raise DataError(
            f"{printable(path)} contains {format_name}, but its name does not end in {suffix}. "
            "Rename it. " + how_to_skip(path.name)
        )


def _suffix_of_rows(path: Path) -> str | None:
    """Return the suffix that a file with rows should have, or None if it seems to be text."""
    with open_file(path) as stream:
        beginning = stream.read(_BEGINNING_BYTES)
    for magic, suffix in _MAGIC.items():
        if beginning.startswith(magic):
            return suffix
    if _begins_with_two_objects(beginning):
        return ".jsonl"
    return None


def _begins_with_two_objects(beginning: bytes) -> bool:
    """Return True if the first two lines are JSON objects."""
    if not beginning.startswith(b"{"):
        return False
    first_line, newline, next_lines = beginning.partition(b"\n")
    if not newline:
        return False
    second_line, _, _ = next_lines.partition(b"\n")
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
        beginning = stream.read(_TEXT_CHECK_BYTES)
    is_whole_file = len(beginning) < _TEXT_CHECK_BYTES
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
