"""Announcements are plain lines on stderr, from rank 0; the package does not use ``print``."""

import ast
from pathlib import Path

import pytest

import kha_megatron
from kha_megatron import announcements
from kha_megatron.announcements import announce


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    announcements._logged.clear()
    yield
    announcements._logged.clear()


def test_messages_are_lines_on_stderr_once_for_each_key(capsys):
    for _ in range(2):
        announce("100% sure", once="sure")
        announce("each time")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "kha_megatron: 100% sure",
        "kha_megatron: each time",
        "kha_megatron: each time",
    ]


@pytest.mark.parametrize(
    ("every_rank", "line"),
    [(False, ""), (True, "kha_megatron: rank 5: WARNING: it\n")],
)
def test_other_ranks_print_only_messages_of_every_rank(monkeypatch, capsys, every_rank, line):
    monkeypatch.setenv("RANK", "5")
    announce("WARNING: it", every_rank=every_rank)
    assert capsys.readouterr().err == line


def test_the_package_prints_only_errors_of_entry_points():
    package = Path(kha_megatron.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
                assert ast.unparse(node).startswith("print(f'error: "), f"{path}:{node.lineno}"
