"""Find the files of a dataset, and select those with text."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
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
from kha_megatron.documents.reader import Reader, Source
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

_METADATA = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    "cache-*.arrow",  # results of Dataset.map
)
"""Files that the ``datasets`` library writes next to the data."""

_EXAMPLES = 5  # paths that a report names for each reason

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
    files: dict[Path, int] = {}
    for source in sources:
        found_files = list(search.walk(source))
        files |= _without_metadata(
            found_files,
            skips_text=globs is None,
            skipped=skipped,
        )
    return files


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

    def walk(self, source: Path) -> Iterator[_File]:
        stack = [source]
        while stack:
            path = stack.pop()
            try:
                status = path.stat()
            except (OSError, ValueError) as error:
                self._skip_missing(path, error, path == source)
                continue
            is_folder = stat.S_ISDIR(status.st_mode)
            is_source = path == source
            real = os.path.realpath(path)
            reason = self._reason_to_skip(path, real, is_folder, is_source)
            if reason:
                skip(self.skipped, reason, path)
            elif is_folder:
                self.seen.add(real)
                stack += reversed(_children(path))
            elif not stat.S_ISREG(status.st_mode):  # opening a pipe or device could wait forever
                skip(self.skipped, "unreadable", path)
            else:
                self.seen.add(real)
                yield _File(path, status.st_size)

    def _reason_to_skip(
        self,
        path: Path,
        real: str,
        is_folder: bool,
        is_source: bool,
    ) -> str | None:
        if real == self.output:
            return "excluded"
        reason = None
        if not is_source:
            reason = self._reason_of_name(path.name, is_folder)
        if reason is None and real in self.seen:
            reason = "repeated"
        return reason

    def _reason_of_name(self, name: str, is_folder: bool) -> str | None:
        if name.startswith("."):
            return "hidden"
        if _matches(name, self.exclude):
            return "excluded"
        if is_folder:
            return None
        if not _matches(name, self.globs):
            return "other_name"
        if _matches(name, _METADATA):
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
        skip(self.skipped, reason or "unreadable", path)


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


def _without_metadata(
    files: Sequence[_File],
    skips_text: bool,
    skipped: Skipped,
) -> dict[Path, int]:
    """Check the formats of files and, if ``skips_text`` is set, skip text next to rows."""
    text: list[Path] = []
    single_values: dict[Path, SingleValueError] = {}
    has_rows = False
    for file in files:
        try:
            if find_format(file.path) is Format.TEXT:
                text.append(file.path)
            elif file.size:
                has_rows = True
        except SingleValueError as error:
            single_values[file.path] = error
        except OSError as error:
            raise _unreadable(file.path, error) from error
    metadata: set[Path] = set()
    if has_rows and skips_text:
        metadata = {*text, *single_values}
    elif single_values:
        raise next(iter(single_values.values()))
    for path in sorted(metadata):
        skip(skipped, "metadata", path)
    sizes = {}
    for file in files:
        if file.path not in metadata:
            sizes[file.path] = file.size
    return sizes


def select_sources(
    sizes: dict[Path, int],
    reader: Reader,
    *,
    given: Sequence[Path],
    skipped: Skipped,
    advance: Callable[[int], None],
) -> list[Source]:
    """Read all files once and return those with text, in the same order.

    Other files are added to ``skipped``. ``advance`` is called with the size of each file.

    Raises:
        DataError: If a file is damaged or cannot be read, or if one of the ``given`` files is not
            UTF-8. Binary files in a directory are skipped.
    """
    selected = []
    for path, size in sizes.items():
        total = 0
        documents = 0
        empty = 0
        is_split = False
        try:
            for document in reader.documents(path):
                if document.text:
                    documents += 1
                else:
                    empty += 1
                total += len(document.text.encode())
                is_split |= document.continues
        except UnicodeDecodeError as error:
            if path in given or begins_as_text(path):
                raise DataError(
                    f"{printable(path)} is not UTF-8 ({in_one_line(error)}). Convert or repair it. "
                    + how_to_skip(path.name)
                ) from error
            skip(skipped, "not_utf8", path)
        except OSError as error:
            raise _unreadable(path, error) from error
        else:
            if documents:
                selected.append(Source(path, total, documents, is_split))
            elif not empty:
                skip(skipped, "empty", path)
            for _ in range(empty):
                skip(skipped, "empty", path)
        advance(size)
    return selected


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{printable(path)} cannot be read ({error}). Fix its permissions or copy it again. "
        + how_to_skip(path.name)
    )


def skip(skipped: Skipped, reason: str, path: Path) -> None:
    entry = skipped[reason]
    entry["count"] += 1
    if len(entry["examples"]) < _EXAMPLES:
        entry["examples"].append(printable(path))
