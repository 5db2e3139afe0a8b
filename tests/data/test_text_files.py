"""Test that no file is lost, and that the pieces of a file join to the file."""

import io
import itertools
import os
import random
from collections import Counter

import pytest

from kha_megatron.documents.files import empty_skipped, find_files
from kha_megatron.documents.reader import split_text

ALPHABET = ["a", "é", "不", "🦜", "\n", "\r\n", "\t", "\0", "\ufeff", "\u2028", " "]


def test_every_path_is_used_or_counted(tmp_path):
    root = tmp_path / "root"
    for name in ("b/two.py", "a/one.py", "a/notes.txt", "__pycache__/x.py", "out/tokenizer.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "a" / "loop").symlink_to(root, target_is_directory=True)
    (root / "b" / "again.py").symlink_to(root / "a" / "one.py")
    (root / "b" / "broken.py").symlink_to(root / "gone.py")
    os.mkfifo(root / "b" / "pipe.py")  # opening it would wait for ever
    (root / os.fsdecode(b"\xff.py")).write_text("a name that is no UTF-8")

    skipped = empty_skipped()
    files = find_files(
        [root],
        globs=["*.py"],
        exclude=["__pycache__"],
        output=root / "out",
        skipped=skipped,
    )
    names = [str(path.relative_to(root)) for path in files]
    assert names == ["a/one.py", "b/two.py", "\udcff.py"]
    assert list(files.values()) == [8, 8, 23]
    counts = Counter({reason: value["count"] for reason, value in skipped.items()})
    assert +counts == {"other_name": 1, "repeated": 2, "unreadable": 2, "excluded": 2}


@pytest.mark.parametrize("limit", [4, 7])
def test_split_text_joins_to_the_whole(limit):
    rng = random.Random(limit)
    for length in range(60):
        text = "".join(rng.choices(ALPHABET, k=length))
        content = text.encode()
        pieces = list(split_text(io.BytesIO(content), limit))
        assert b"".join(pieces) == content
        assert all(0 < len(piece) <= limit for piece in pieces)
        for piece in pieces:
            piece.decode()  # never cut inside a character
        assert len(pieces) <= 1 or len(content) > limit
        for piece, following in itertools.pairwise(pieces):
            following_bytes = (piece + following)[:limit]
            assert piece.endswith(b"\n") or b"\n" not in following_bytes
