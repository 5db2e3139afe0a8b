"""How Megatron divides a dataset's documents into training, validation and test.

A part that is asked for and gets no document makes Megatron count epochs for ever.
"""

import math
import re
import struct
from itertools import accumulate, pairwise
from pathlib import Path

from kha_megatron.errors import ConfigError, DataError

PARTS = ("training", "validation", "test")
USUAL = ("969,30,1", "99,1,0")
"""Megatron's ``--split`` where none is given, and the one of its examples."""

_HEADER = struct.Struct("<9sQBQ")
_MAGIC = b"MMIDIDX\0\0"


def count_documents(prefix: str | Path) -> int:
    """Documents of a dataset (Megatron divides its sequences), from its ``.idx`` file's header.

    Raises:
        DataError: the file cannot be read or is no index.
    """
    file = f"{prefix}.idx"
    try:
        with open(file, "rb") as stream:
            head = stream.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(
            f"{file} is no index of a dataset: make it with `kha-megatron data prepare`"
        )
    return _HEADER.unpack(head)[3]


def documents_of(split: str, documents: int) -> list[int | None]:
    """How many documents each of :data:`PARTS` gets; None for a part that is not asked for.

    Args:
        split: shares such as ``969,30,1``, of any sum.
        documents: of the dataset.

    Raises:
        ConfigError: the split holds no share, or more than three.
    """
    try:
        shares = [float(share) for share in re.findall("[.0-9]+", split)]  # as Megatron reads them
    except ValueError:
        shares = []
    if not 0 < len(shares) <= len(PARTS) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"--split {split!r} must be one to three shares, as in {USUAL[0]}")
    shares += [0.0] * (len(PARTS) - len(shares))
    ends = accumulate((share / sum(shares) for share in shares), initial=0.0)
    return [
        round(end * documents) - round(begin * documents) if end > begin else None
        for begin, end in pairwise(ends)
    ]


def check_split(split: str, documents: int, name: str) -> None:
    """Refuse a split that leaves a part without documents.

    Args:
        split: shares such as ``969,30,1``.
        documents: of the dataset that is divided.
        name: of the dataset, for the message.

    Raises:
        ConfigError: the split is none.
        DataError: a part is empty; with a split that works.
    """
    found = documents_of(split, documents)
    empty = [part for part, count in zip(PARTS, found, strict=True) if count == 0]
    if empty:
        raise DataError(
            f"--split {split} leaves no document for {' and '.join(empty)} of the {documents} in "
            f"{name}, and Megatron would wait for ever: use --split {_working(found)}"
        )


def _working(found: list[int | None]) -> str:
    """Documents as shares: one for every part that had none, from the part that has most."""
    counts = [0 if count is None else max(count, 1) for count in found]
    most = counts.index(max(counts))
    counts[most] -= sum(counts) - sum(count or 0 for count in found)
    return ",".join(map(str, counts)) if counts[most] > 0 else "1,0,0"
