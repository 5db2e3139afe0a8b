"""Finding text files, and reading them in pieces that can be told apart from anything else.

Every path that is met is either used or counted under one of :data:`SKIPPED`; none disappears.
"""

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kha_megatron.errors import DataError

SKIPPED: dict[str, str] = {
    "empty": "no bytes in it",
    "unreadable": "cannot be opened, or not a regular file",
    "not_utf8": "bytes that are not UTF-8 text",
    "other_name": "name matches no --glob",
    "excluded": "name matches --exclude, or the output itself (a folder counts as one)",
    "repeated": "already reached by another path or link",
}
"""Why a path was not used: the key in reports, and the words for a person."""

EXAMPLES = 5
"""Paths that a report names for each reason."""

BYTES_PER_TOKEN = 64
"""That are read for each token of a text's beginning."""


class Skips:
    """Counts of the paths that were not used, by reason, with the first few of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = defaultdict(list)

    def add(self, reason: str, path: Path) -> None:
        """Count ``path`` under ``reason``, a key of :data:`SKIPPED`."""
        self._counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES:
            self._examples[reason].append(printable(path))

    def to_dict(self) -> dict[str, dict]:
        """``{reason: {"count": n, "examples": [...]}}`` with every reason present."""
        return {r: {"count": self._counts[r], "examples": self._examples[r]} for r in SKIPPED}

    def __str__(self) -> str:
        words = [f"{count} {reason}" for reason, count in sorted(self._counts.items())]
        return ", ".join(words) or "no files at all"


@dataclass(frozen=True)
class TextFile:
    """A file that is UTF-8 text from its first byte to its last."""

    path: Path
    bytes: int
    pieces: int
    """Documents it gives: 1, or more if it is longer than the limit it was checked with."""


def printable(path: Path) -> str:
    """``path`` as text that can always be printed: undecodable bytes are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find_files(
    sources: Sequence[Path],
    *,
    globs: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    skips: Skips,
) -> dict[Path, int]:
    """Regular files under ``sources`` and their sizes in bytes, each real file once.

    Folders are walked in sorted order. Links are followed; what is reached a second time (a loop
    of links, overlapping sources) is counted as repeated. ``globs`` (file names) and ``exclude``
    (names of files and folders) apply to what is found inside a source, not to a source itself:
    naming it is asking for it. ``output`` is never walked into.
    """
    files: dict[Path, int] = {}
    written = os.path.realpath(output)
    seen: set[str] = set()
    stack = [(path, True) for path in reversed(sources)]
    while stack:
        path, named = stack.pop()
        try:
            status = path.stat()
        except (OSError, ValueError):
            skips.add("unreadable", path)
            continue
        folder = stat.S_ISDIR(status.st_mode)
        real = os.path.realpath(path)
        if real == written or (not named and _matches(path.name, exclude)):
            skips.add("excluded", path)
        elif not (named or folder or _matches(path.name, globs)):
            skips.add("other_name", path)
        elif real in seen:
            skips.add("repeated", path)
        elif folder:
            seen.add(real)
            try:
                stack += [(child, False) for child in sorted(path.iterdir(), reverse=True)]
            except OSError:
                skips.add("unreadable", path)
        elif stat.S_ISREG(status.st_mode):
            seen.add(real)
            files[path] = status.st_size
        else:  # a pipe, a socket, a device: opening one could wait for ever
            skips.add("unreadable", path)
    return files


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_files(
    sizes: Mapping[Path, int], limit: int, *, skips: Skips, advance: Callable[[int], None]
) -> list[TextFile]:
    """Read every file once and keep those that are text, in the given order.

    Args:
        sizes: files and the sizes that :func:`find_files` saw, bytes.
        limit: longest piece, bytes (see :func:`read_pieces`).
        skips: receives the files that are not kept.
        advance: called with the seen size of each file once it was read.
    """
    files = []
    for path, seen_size in sizes.items():
        size = pieces = 0
        try:
            for piece in read_pieces(path, limit):
                piece.decode()
                size += len(piece)
                pieces += 1
        except UnicodeDecodeError:
            skips.add("not_utf8", path)
        except OSError:
            skips.add("unreadable", path)
        else:
            if size:
                files.append(TextFile(path, size, pieces))
            else:
                skips.add("empty", path)
        advance(seen_size)
    return files


def read_pieces(path: Path, limit: int) -> Iterator[bytes]:
    """The bytes of a file in pieces of at most ``limit`` (>= 4), never all in memory.

    A piece ends after the last line end that fits, or between two characters where one line alone
    is longer than the limit. Joined, the pieces are the file; a file within the limit is one piece.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        rest = b""
        while True:
            block = rest + stream.read(limit + 1 - len(rest))
            if len(block) <= limit:
                if block:
                    yield block
                return
            cut = block.rfind(b"\n", 0, limit) + 1 or _between_characters(block, limit)
            yield block[:cut]
            rest = block[cut:]


def read_beginning(file: Path, tokens: int) -> str:
    """The beginning of a text file, enough for so many tokens.

    Raises:
        DataError: it is no file, or not UTF-8, or empty.
    """
    if not file.is_file():
        raise DataError(f"{file} is no file: name a text file")
    try:
        text = next(read_pieces(file, tokens * BYTES_PER_TOKEN), b"").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}: name a text file") from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    if not text.strip():
        raise DataError(f"{file} holds no text")
    return text


def _between_characters(block: bytes, cut: int) -> int:
    """The last place at or before ``cut`` that is not inside a UTF-8 character of valid text."""
    for place in range(cut, cut - 4, -1):
        if block[place] & 0xC0 != 0x80:  # not a continuation byte
            return place
    return cut
