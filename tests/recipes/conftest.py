"""Fixtures for tests of recipes and of ``kha-megatron launch``."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kha_megatron.recipes import Recipe, get_recipe, megatron_check
from tests import entry

CHECK = """
import json, os, runpy, sys
os.environ.update(json.loads(sys.argv.pop(1)))
runpy.run_module("kha_megatron.training.check", run_name="__main__")
"""


@pytest.fixture
def nemorun_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """Return a new home of NeMo-Run for this process and its children."""
    home = tmp_path_factory.mktemp("nemorun")
    monkeypatch.setenv("NEMORUN_HOME", str(home))  # read once, at import
    config = pytest.importorskip("nemo_run.config", reason="needs the launch extra")
    monkeypatch.setattr(config, "_NEMORUN_HOME", str(home))
    return home


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a fake directory of ``data prepare``, in a path with a space."""
    folder = tmp_path / "my data"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("corpus.bin", "tokenizer/tokenizer.json"):
        (folder / name).write_text("something")
    index = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, 4, 1000)  # 1000 documents
    (folder / "corpus.idx").write_bytes(index)
    return folder


@pytest.fixture
def scripted(tmp_path: Path):
    """Return a function that makes a recipe whose ranks run the given Python source."""

    def make(source: str, **changes) -> Recipe:
        script = tmp_path / "rank.py"
        script.write_text(source)
        return replace(
            get_recipe("quickstart"),
            name="scripted",
            entry=str(script),
            **changes,
        )

    return make


@pytest.fixture
def forked_megatron_check(monkeypatch) -> None:
    """Check the arguments of jobs in a fork of a process that has imported Megatron."""

    def run_check(words, environment):
        run = entry.run([json.dumps(environment), *words], program=CHECK)
        return run.codes[0], run.output

    monkeypatch.setattr(megatron_check, "_run_check", run_check)
