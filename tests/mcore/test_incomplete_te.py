"""Detect a missing extension of Transformer Engine, wherever it is installed."""

import importlib.util
import sys
import sysconfig

import pytest

from kha_megatron.mcore import compat

EXTENSION = "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"


@pytest.fixture
def directories(tmp_path, monkeypatch):
    """Python modules as a source tree on the path, and the directory into which pip installs."""
    tree, installed = tmp_path / "tree", tmp_path / "site-packages"
    for directory in (tree, installed):
        (directory / "transformer_engine").mkdir(parents=True)
    (tree / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tree)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(installed)})
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    importlib.invalidate_caches()
    return tree, installed


@pytest.mark.parametrize("place", [".", "transformer_engine", "transformer_engine/wheel_lib"])
@pytest.mark.parametrize("where", [0, 1], ids=["beside its Python", "where pip installs"])
def test_the_extension_is_found_where_transformer_engine_finds_it(directories, where, place):
    assert compat.lacks_te_extension.__wrapped__()
    directory = directories[where] / place
    directory.mkdir(exist_ok=True)
    (directory / EXTENSION).touch()
    assert not compat.lacks_te_extension.__wrapped__()
