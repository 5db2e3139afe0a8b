"""What is announced: once, from rank 0, as a plain line on stderr; and nothing by ``print``."""

import ast
import logging
from pathlib import Path

import pytest

import kha_megatron
from kha_megatron import announcements
from kha_megatron.announcements import announce


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    announcements.forget()
    yield
    announcements.forget()


def test_a_plain_line_on_stderr_once_for_each_key(capsys):
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


def test_other_ranks_are_silent(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    announce("it")
    assert capsys.readouterr().err == ""


def test_what_befalls_another_rank_alone_is_said_by_it(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "5")
    announce("WARNING: it", every_rank=True)
    assert capsys.readouterr().err == "kha_megatron: rank 5: WARNING: it\n"


def test_a_handler_of_the_program_gets_them_instead(monkeypatch, capsys):
    heard = logging.Handler()
    records = []
    monkeypatch.setattr(heard, "emit", records.append)
    monkeypatch.setattr(announcements.LOGGER, "handlers", [heard])
    announce("it")
    assert [record.getMessage() for record in records] == ["it"]
    assert capsys.readouterr().err == ""


def test_nothing_else_prints_notices():
    """``print`` is left for errors of entry points, on stderr."""
    package = Path(kha_megatron.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
                assert ast.unparse(node).startswith("print(f'error: "), f"{path}:{node.lineno}"
