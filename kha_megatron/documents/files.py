"""Find the files of a dataset, and select those with text."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from kha_megatron.documents.formats import (
    Format,
    SingleValueError,
    begins_as_text,
    find_format,
    how_to_skip,
    is_named_as_rows,
    printable,
)
from kha_megatron.documents.reader import Reader, TextFile
from kha_megatron.errors import DataError, in_one_line

SKIPPED: dict[str, str] = {
    "empty": "empty files, or documents without text",
    "unreadable": "links to missing files, or not regular files",
    "not_utf8": "not UTF-8 text",
    "metadata": "metadata of a dataset, or text next to JSON Lines, Parquet or Arrow files",
    "hidden": "name starts with a dot",
    "other_name": "name does not match --glob",
    "excluded": "name matches --exclude, or the output itself (a directory counts as one)",
    "repeated": "already reached through another path or link",
}
"""Why a file can be skipped. The keys are used in ``data.json``."""

_METADATA_NAMES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "cache-*.arrow",  # results of Dataset.map
)
"""Files that the ``datasets`` library writes next to the data."""

_MAX_EXAMPLES = 5
"""Number of paths that a report names for each reason."""

Skipped = dict[str, dict[str, Any]]
"""Maps each key of :data:`SKIPPED` to ``{"count": n, "examples": [...]}``."""


def empty_skipped() -> Skipped:
    return {reason: {"count": 0, "examples": []} for reason in SKIPPED}


def find_files(
    sources: Sequence[Path],
    *,
    globs: Sequence[str] | None,
    exclude: Sequence[str],
    output: Path,
    skipped: Skipped,
) -> dict[Path, int]:
    """Find all files with text in ``sources`` and return them with their sizes.

    Directories are searched recursively (in sorted order) and links are followed, but no file is
    returned twice. Note that ``globs`` and ``exclude`` only apply to names inside a directory, not
    to the sources themselves. Hidden files, metadata of datasets and the output directory are
    ignored. If a directory contains JSON Lines, Parquet or Arrow files and ``globs`` is None, its
    other files are ignored as well.

    Raises:
        DataError: If the format of a file is not supported, or if a file or directory cannot be
            read.
    """
    search = _Search(
        globs or ("*",),
        exclude,
        output=os.path.realpath(output),
        skipped=skipped,
    )
    sizes: dict[Path, int] = {}
    for source in sources:
        files = list(search.walk(source))
        formats = _find_formats(files)
        ignored: set[Path] = set()
        if formats.have_rows and globs is None:
            ignored.update(formats.text, formats.single_values)
        elif formats.single_value_error is not None:
            raise formats.single_value_error
        for path in sorted(ignored):
            _record_skipped(skipped, "metadata", path)
        for file in files:
            if file.path not in ignored:
                sizes[file.path] = file.size
    return sizes


class _File(NamedTuple):
    path: Path
    size: int


class _Search:
    """Searches directories. Files that were found once are skipped in later calls."""

    def __init__(
        self,
        globs: Sequence[str],
        exclude: Sequence[str],
        output: str,
        skipped: Skipped,
    ) -> None:
        self.globs = globs
        self.exclude = exclude
        self.output = output
        self.skipped = skipped
        self.seen: set[str] = set()
        """Real paths of all files and directories that were found."""

    def walk(self, source: Path) -> Iterator[_File]:
        """Yield all files in ``source``, which can be a file or a directory."""
        stack = [source]
        while stack:
            path = stack.pop()
            is_source = path == source
            try:
                status = path.stat()
            except (OSError, ValueError) as error:
                self._skip_missing(path, error, is_source)
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            real_path = os.path.realpath(path)
            reason = self._reason_to_skip(path, real_path, is_folder, is_source)
            if reason is not None:
                _record_skipped(self.skipped, reason, path)
                continue
            if is_folder:
                self.seen.add(real_path)
                stack += reversed(_children(path))
            elif stat.S_ISREG(status.st_mode):
                self.seen.add(real_path)
                yield _File(path, status.st_size)
            else:  # opening a pipe or device could wait forever
                _record_skipped(self.skipped, "unreadable", path)

    def _reason_to_skip(
        self,
        path: Path,
        real_path: str,
        is_folder: bool,
        is_source: bool,
    ) -> str | None:
        """Return a key of :data:`SKIPPED`, or None if the path is not skipped."""
        if real_path == self.output:
            return "excluded"
        if not is_source:
            reason = self._reason_of_name(path.name, is_folder)
            if reason is not None:
                return reason
        if real_path in self.seen:
            return "repeated"
        return None

    def _reason_of_name(self, name: str, is_folder: bool) -> str | None:
        if name.startswith("."):
            return "hidden"
        if _matches(name, self.exclude):
            return "excluded"
        if is_folder:
            return None
        if not _matches(name, self.globs):
            return "other_name"
        if _matches(name, _METADATA_NAMES):
            return "metadata"
        return None

    def _skip_missing(self, path: Path, error: Exception, is_source: bool) -> None:
        """Skip a link to a missing file, unless it is part of a dataset."""
        reason = None
        if not is_source:
            reason = self._reason_of_name(path.name, is_folder=False)
        if reason is None and is_named_as_rows(path):
            raise DataError(
                f"{printable(path)} cannot be opened ({in_one_line(error)}). Download the dataset "
                "again. " + how_to_skip(path.name)
            ) from error
        _record_skipped(self.skipped, reason or "unreadable", path)


def _children(folder: Path) -> list[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"The directory {printable(folder)} cannot be read ({error}). Fix its permissions. "
            + how_to_skip(folder.name)
        ) from error
    if {"blobs", "snapshots"} <= {child.name for child in children}:
        raise DataError(
            f"{printable(folder)} is a cache directory of the Hugging Face Hub. Pass one of the "
            f"directories in {printable(folder / 'snapshots')}."
        )
    return children


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class _Formats:
    """Formats of the files in a source."""

    have_rows: bool = False
    """Whether there is a JSON Lines, Parquet or Arrow file that is not empty."""
    text: list[Path] = field(default_factory=list)
    single_values: list[Path] = field(default_factory=list)
    """JSON files with a single value. Next to files with rows, these are metadata."""
    single_value_error: SingleValueError | None = None
    """Why the first of ``single_values`` cannot be read as data."""


def _find_formats(files: Sequence[_File]) -> _Formats:
    """Find the formats of files. Raises DataError if a format is not supported."""
    formats = _Formats()
    for file in files:
        try:
            file_format = find_format(file.path)
        except SingleValueError as error:
            formats.single_values.append(file.path)
            formats.single_value_error = formats.single_value_error or error
        except OSError as error:
            raise _unreadable(file.path, error) from error
        else:
            if file_format is Format.TEXT:
                formats.text.append(file.path)
            elif file.size:
                formats.have_rows = True
    return formats


def select_text_files(
    sizes: dict[Path, int],
    reader: Reader,
    *,
    sources: Sequence[Path],
    skipped: Skipped,
    advance: Callable[[int], None],
) -> list[TextFile]:
    """Read all files once and return those with text, in the same order.

    Args:
        sizes: Files and their sizes, as returned by :func:`find_files`.
        sources: What the user passed: files and directories.
        skipped: Files and documents without text are added to it.
        advance: Called with the size of each file.

    Raises:
        DataError: If a file is damaged or cannot be read, or if one of the ``sources`` is not
            UTF-8. Binary files in a directory are skipped.
    """
    text_files = []
    for path, size in sizes.items():
        try:
            statistics = _read_statistics(path, reader)
        except UnicodeDecodeError as error:
            if path in sources or begins_as_text(path):
                raise DataError(
                    f"{printable(path)} is not UTF-8 ({in_one_line(error)}). Convert or repair it. "
                    + how_to_skip(path.name)
                ) from error
            _record_skipped(skipped, "not_utf8", path)
        except OSError as error:
            raise _unreadable(path, error) from error
        else:
            if statistics.documents:
                text_file = TextFile(
                    path,
                    bytes=statistics.bytes,
                    documents=statistics.documents,
                    is_split=statistics.is_split,
                )
                text_files.append(text_file)
            _record_empty(skipped, path, statistics)
        advance(size)
    return text_files


@dataclass
class _Statistics:
    """Statistics of the documents in a file."""

    bytes: int = 0
    """Size of the text in UTF-8."""
    documents: int = 0
    """Number of documents with text."""
    empty_documents: int = 0
    is_split: bool = False
    """Whether any document was longer than the limit."""


def _read_statistics(path: Path, reader: Reader) -> _Statistics:
    statistics = _Statistics()
    for document in reader.documents(path):
        if document.text:
            statistics.documents += 1
        else:
            statistics.empty_documents += 1
        statistics.bytes += len(document.text.encode())
        statistics.is_split |= document.continues
    return statistics


def _record_empty(skipped: Skipped, path: Path, statistics: _Statistics) -> None:
    """Count each empty document, and a file without any document."""
    count = statistics.empty_documents
    if statistics.documents == 0 and count == 0:
        count = 1
    for _ in range(count):
        _record_skipped(skipped, "empty", path)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{printable(path)} cannot be read ({error}). Fix its permissions or copy it again. "
        + how_to_skip(path.name)
    )


def _record_skipped(skipped: Skipped, reason: str, path: Path) -> None:
    entry = skipped[reason]
    entry["count"] += 1
    if len(entry["examples"]) < _MAX_EXAMPLES:
        entry["examples"].append(printable(path))
