"""Find text files and iterate over their documents.

Supported formats are plain text (one document per file), JSON Lines (one per line) and Parquet (one
per row). Text and JSON Lines can be compressed with gzip or Zstandard.
"""

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from kha_megatron.errors import DataError

SKIPPED: dict[str, str] = {
    "empty": "empty files, or documents without text",
    "unreadable": "cannot be opened, or not a regular file",
    "not_utf8": "not UTF-8 text",
    "other_name": "name does not match --glob",
    "excluded": "name matches --exclude, or the output itself (a directory counts as one)",
    "repeated": "already reached through another path or link",
}
"""Why a file can be skipped. The keys are used in ``data.json``."""

UNSUPPORTED = {
    ".json": "Write one JSON object per line to a .jsonl file.",
    ".arrow": "Convert it to .parquet.",
    **dict.fromkeys((".csv", ".tsv"), "Convert it to .jsonl or .parquet."),
    **dict.fromkeys((".tar", ".tgz", ".zip"), "Unpack it and pass the directory."),
    **dict.fromkeys((".bz2", ".xz"), "Decompress it, or use .gz or .zst."),
    **dict.fromkeys((".pdf", ".docx"), "Extract its text."),
    **dict.fromkeys((".bin", ".idx"), "Pass the prefix of a tokenized dataset to --data-path."),
}
"""Formats that we refuse to read, and what to do instead."""

_EXAMPLES = 5  # paths that a report names for each reason
_BYTES_PER_TOKEN = 64  # for read_beginning

Skipped = dict[str, dict[str, Any]]
"""Maps each key of :data:`SKIPPED` to ``{"count": n, "examples": [...]}``."""


class Source(NamedTuple):
    """A text file, the size of its uncompressed text, and its number of documents."""

    path: Path
    bytes: int
    documents: int
    is_split: bool
    """Whether any document was longer than the limit."""


class Reader:
    """Iterates over the documents in a file.

    Args:
        limit: Maximum document size in bytes (at least 4). Longer documents are split at newlines
            if possible, otherwise between two characters.
        json_key: Name of the JSON Lines field or Parquet column with the text.
    """

    def __init__(self, limit: int, json_key: str = "text") -> None:
        self.limit = limit
        self.json_key = json_key

    def documents(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Yield ``(text, continues)`` for each document in a file.

        ``continues`` is True if the text is the continuation of a document that was split.

        Raises:
            DataError: If the file isn't valid JSON Lines or Parquet, or a package is missing.
            UnicodeDecodeError: If a text file isn't valid UTF-8.
        """
        if path.suffix == ".parquet":
            texts = self._parquet(path)
        elif _format_of(path) == ".jsonl":
            texts = self._json_lines(path)
        else:
            with _open(path) as stream:
                yield from self._split(stream)
            return
        for text in texts:
            if not text:
                yield "", False
            yield from self._split(io.BytesIO(text.encode()))

    def _split(self, stream: IO[bytes]) -> Iterator[tuple[str, bool]]:
        for number, piece in enumerate(split_text(stream, self.limit)):
            yield piece.decode(), number > 0

    def _json_lines(self, path: Path) -> Iterator[str]:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[self.json_key]
                    text.encode()  # JSON can contain half of a surrogate pair
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise DataError(
                        f"{path}, line {number}: not a JSON object with a string "
                        f"{self.json_key!r} ({error}). Pass the name of the field with --json-key."
                    ) from error
                yield text

    def _parquet(self, path: Path) -> Iterator[str]:
        pyarrow = _pyarrow(path)
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=1024, columns=[self.json_key]):
                    for text in batch.column(0).to_pylist():
                        yield text or ""
        except (pyarrow.ArrowException, IndexError, AttributeError) as error:
            raise DataError(
                f"{path} has no text column {self.json_key!r}, or is damaged ({error}). Pass the "
                "name of the column with --json-key."
            ) from error

    def read(self, source: Source) -> Iterator[str]:
        """Yield the non-empty documents. Raises DataError if the file changed in the meantime."""
        size = 0
        try:
            for text, _ in self.documents(source.path):
                size += len(text.encode())
                if text:
                    yield text
            if size != source.bytes:
                raise ValueError(f"{size} bytes instead of {source.bytes}")
        except (OSError, EOFError, ValueError) as error:
            raise DataError(
                f"{printable(source.path)} changed while it was being read ({error})."
            ) from error


def printable(path: Path) -> str:
    """Format a path for messages, escaping control characters and invalid UTF-8."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def find_files(
    sources: Sequence[Path],
    *,
    globs: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    skipped: Skipped,
) -> dict[Path, int]:
    """Find all regular files in ``sources`` and return them with their sizes.

    Directories are searched recursively (in sorted order) and links are followed, but no file is
    returned twice. Note that ``globs`` and ``exclude`` only apply to names inside a directory, not
    to the sources themselves. The output directory is ignored.
    """
    files: dict[Path, int] = {}
    written = os.path.realpath(output)
    seen: set[str] = set()
    stack = [(path, True) for path in reversed(sources)]

    def matches(path: Path, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(path.name, pattern) for pattern in patterns)

    while stack:
        path, is_source = stack.pop()
        try:
            status = path.stat()
            is_folder, real = stat.S_ISDIR(status.st_mode), os.path.realpath(path)
            if real == written or (not is_source and matches(path, exclude)):
                _skip(skipped, "excluded", path)
            elif not (is_source or is_folder or matches(path, globs)):
                _skip(skipped, "other_name", path)
            elif real in seen:
                _skip(skipped, "repeated", path)
            elif is_folder:
                seen.add(real)
                stack += [(child, False) for child in sorted(path.iterdir(), reverse=True)]
            elif stat.S_ISREG(status.st_mode):
                seen.add(real)
                files[path] = status.st_size
            else:  # opening a pipe or device could wait forever
                _skip(skipped, "unreadable", path)
        except (OSError, ValueError):
            _skip(skipped, "unreadable", path)
    return files


def select_sources(
    sizes: dict[Path, int], reader: Reader, *, skipped: Skipped, advance: Callable[[int], None]
) -> list[Source]:
    """Read all files once and return those with text, in the same order.

    Other files are added to ``skipped``. ``advance`` is called with the size of each file.
    """
    found = []
    for path, size in sizes.items():
        total = documents = empty = 0
        is_split = False
        try:
            for text, continues in reader.documents(path):
                total += len(text.encode())
                documents += bool(text)
                empty += not text
                is_split |= continues
            if documents:
                found.append(Source(path, total, documents, is_split))
            for _ in range(empty or not documents):
                _skip(skipped, "empty", path)
        except UnicodeDecodeError:
            _skip(skipped, "not_utf8", path)
        except (OSError, EOFError):
            _skip(skipped, "unreadable", path)
        advance(size)
    return found


def check_format(path: Path) -> None:
    """Refuse known but unsupported file formats."""
    for suffix in (_format_of(path), path.suffix):
        if path.is_file() and (remedy := UNSUPPORTED.get(suffix)):
            raise DataError(f"{printable(path)}: {suffix} files are not supported. {remedy}")


def split_text(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    """Split a stream into chunks of at most ``limit`` bytes.

    Prefers to split after a newline. If a line is too long, we split it between two characters.
    """
    rest = b""
    while True:
        block = rest + stream.read(limit + 1 - len(rest))
        if len(block) <= limit:
            if block:
                yield block
            return
        cut = block.rfind(b"\n", 0, limit) + 1
        if not cut:  # not before a continuation byte of UTF-8
            ends = (at for at in range(limit, limit - 4, -1) if block[at] & 0xC0 != 0x80)
            cut = next(ends, limit)
        yield block[:cut]
        rest = block[cut:]


def read_beginning(file: Path, tokens: int) -> str:
    """Read enough text from a file to get ``tokens`` tokens."""
    try:
        with file.open("rb") as stream:
            text = next(split_text(stream, tokens * _BYTES_PER_TOKEN), b"").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {file} ({error}). Pass a UTF-8 text file.") from error
    if not text.strip():
        raise DataError(f"{file} contains no text.")
    return text


def _format_of(path: Path) -> str:
    """Return the file extension, e.g. ``.jsonl`` for both ``a.jsonl`` and ``a.jsonl.gz``."""
    is_compressed = path.suffix in (".gz", ".zst")
    return Path(path.stem).suffix if is_compressed else path.suffix


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and decompress it. Raises DataError if it's damaged."""
    with path.open("rb") as file:
        if path.suffix not in (".gz", ".zst"):
            yield file
            return
        try:
            if path.suffix == ".gz":
                yield cast(IO[bytes], gzip.GzipFile(fileobj=file))
            else:  # the package zstandard doesn't notice truncated files
                yield io.BufferedReader(_pyarrow(path).input_stream(file, compression="zstd"))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{printable(path)} is damaged ({error}). Copy or compress the file again."
            ) from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Reading {path} requires pyarrow. Run `pip install pyarrow`.") from error
    return pyarrow


def _skip(skipped: Skipped, reason: str, path: Path) -> None:
    entry = skipped[reason]
    entry["count"] += 1
    if len(entry["examples"]) < _EXAMPLES:
        entry["examples"].append(printable(path))
