"""Test that no file is lost, and that the pieces of a file join to the file."""

import itertools
import os
import random

import pytest

from kha_megatron.data import SKIPPED, find_files, read_pieces

ALPHABET = ["a", "é", "不", "🦜", "\n", "\r\n", "\t", "\0", "\ufeff", "\u2028", " "]


def nothing_skipped():
    return {reason: {"count": 0, "examples": []} for reason in SKIPPED}


def walk(*sources, globs=("*",), exclude=(), output="nowhere"):
    skipped = nothing_skipped()
    found = find_files(sources, globs=globs, exclude=exclude, output=output, skipped=skipped)
    return found, {reason: value["count"] for reason, value in skipped.items()}


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

    found, counts = walk(root, globs=["*.py"], exclude=["__pycache__"], output=root / "out")

    names = [str(path.relative_to(root)) for path in found]
    assert names == ["a/one.py", "b/two.py", "\udcff.py"]
    assert list(found.values()) == [8, 8, 23]
    expected = {"other_name": 1, "repeated": 2, "unreadable": 2, "excluded": 2}
    assert counts == {reason: expected.get(reason, 0) for reason in SKIPPED}


@pytest.mark.parametrize("limit", [4, 7])
def test_pieces_join_to_the_file(tmp_path, limit):
    rng = random.Random(limit)
    for length in range(60):
        content = "".join(rng.choices(ALPHABET, k=length)).encode()
        (tmp_path / "file").write_bytes(content)
        pieces = list(read_pieces(tmp_path / "file", limit))
        assert b"".join(pieces) == content
        assert all(0 < len(piece) <= limit for piece in pieces)
        for piece in pieces:
            piece.decode()  # never cut inside a character
        assert len(pieces) <= 1 or len(content) > limit
        for piece, following in itertools.pairwise(pieces):
            assert piece.endswith(b"\n") or b"\n" not in (piece + following)[:limit]
