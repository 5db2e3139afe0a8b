"""Which Megatron is taken, which is refused, and that nothing of it ends in plain attention."""

import ast
import importlib
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import kha_megatron
from kha_megatron.errors import VersionError
from kha_megatron.mcore import compat, symbols

PACKAGE = Path(kha_megatron.__file__).parent
PYPROJECT = PACKAGE.parent / "pyproject.toml"
KNOCKING = "megatron.core.tensor_parallel:copy_to_tensor_model_parallel_region"


def checked(monkeypatch, version):
    """``check_version`` on a Megatron that says it is ``version`` and has every symbol."""
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    monkeypatch.setattr(compat, "missing_symbols", lambda table: [])
    return compat.check_version.__wrapped__()


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.0", "0.19.2+gabcdef"])
def test_a_known_version_passes_quietly(monkeypatch, version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked(monkeypatch, version) == version


@pytest.mark.parametrize("version", ["0.16.1", "0.9.0"])
def test_an_older_version_is_refused(monkeypatch, version):
    with pytest.raises(VersionError, match=r"^megatron-core .* is not supported \(0\.17 to 0\.19"):
        checked(monkeypatch, version)


@pytest.mark.parametrize("version", ["0.20.0", "0.20.0rc1", "1.0.3"])
def test_a_newer_version_warns_on_rank_0_in_one_line(monkeypatch, version):
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(RuntimeWarning, match=r"tested with megatron-core 0\.17 to 0\.19") as caught:
        checked(monkeypatch, version)
    (message,) = {str(warning.message) for warning in caught}
    assert version in message
    assert len(message) < 160
    assert "\n" not in message
    pointer = re.search(r"\((\S+)\)", message)[1]
    assert importlib.import_module(pointer).PLUG_IN is symbols.PLUG_IN
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked(monkeypatch, version)


@pytest.mark.parametrize(
    ("version", "refused"), [("0.17.1", True), ("0.18.2", True), ("0.19.2", False), ("1.0", False)]
)
def test_the_entry_point_needs_a_newer_version_than_the_plug_in(monkeypatch, version, refused):
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    if not refused:
        assert compat.check_training_version() == version
        return
    with pytest.raises(VersionError, match=rf"{version}.*>=0\.19,<0\.20.*--spec") as caught:
        compat.check_training_version()
    assert "\n" not in str(caught.value)


def test_the_version_is_that_of_the_tree_which_would_be_imported(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemExit('imported')")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 23\nPATCH = 4\n")
    (tmp_path / "megatron" / "__init__.py").write_text("")  # a wheel of it has none
    monkeypatch.syspath_prepend(tmp_path)
    assert compat.installed_version() == "0.23.4"
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing")])
    sys.modules.pop("megatron")
    with pytest.raises(VersionError, match=r"not installed: `pip install 'megatron-core>=0\.17"):
        compat.installed_version()


def megatron_imports(*files):
    """``module:name`` of every import from Megatron in these files."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


def test_the_tables_hold_only_names_that_are_used():
    files = (*(PACKAGE / "mcore").glob("*.py"), PACKAGE / "conversion" / "megatron_model.py")
    imported = set(megatron_imports(*files, PACKAGE / "training" / "pretrain.py"))
    for symbol in (*symbols.PLUG_IN, *symbols.TRAINING_PACKAGE):
        module, _, path = symbol.partition(":")
        assert f"{module}:{path.partition('.')[0]}" in imported, f"no longer used: {symbol}"


def test_dependencies_are_the_supported_versions():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    major, newest = compat.NEWEST
    oldest = ".".join(map(str, compat.OLDEST))
    wanted = f"megatron-core>={oldest},<{major}.{newest + 1}"
    assert project["optional-dependencies"]["megatron"] == [wanted]


def symbols_of_this_megatron():
    """What the installed Megatron lacks of the plug-in's table, and of one with mistakes."""
    wrong = {
        "megatron.core.no_such_module:name": "",
        "megatron.core.utils:no_such_name": "",
        KNOCKING: "group no_such_parameter",
    }
    return symbols.missing_symbols(symbols.PLUG_IN), symbols.missing_symbols(wrong)


def test_every_symbol_is_really_looked_for(ranks):
    lacking, wrong = ranks(symbols_of_this_megatron, 1)[0]
    assert lacking == []
    assert wrong == [
        "megatron.core.no_such_module:name",
        "megatron.core.utils:no_such_name",
        f"{KNOCKING}(no_such_parameter)",
    ]


def spec_by_name_without(module, name, listed):
    """What Megatron's ``--spec`` answers when Megatron itself has lost a name."""
    from megatron.core.transformer.spec_utils import import_module

    from kha_megatron import mcore

    home = importlib.import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(home, name)
        if not listed:  # what the table does not know must not end in silence either
            patch.setattr(compat, "missing_symbols", lambda table: [])
        for loaded in [n for n in sys.modules if n.startswith("kha_megatron.mcore.")]:
            if not loaded.endswith((".compat", ".symbols")):
                patch.delitem(sys.modules, loaded)
                patch.delattr(mcore, loaded.rpartition(".")[2])
        compat.check_version.cache_clear()
        try:
            return repr(import_module(("kha_megatron.mcore.specs", "kha_mlp")))
        except VersionError as error:
            return str(error)
        finally:
            compat.check_version.cache_clear()


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    "symbol", [KNOCKING, "megatron.core.transformer.attention:SelfAttention"], ids=["ours", "specs"]
)
def test_a_named_spec_without_its_megatron_raises(ranks, symbol, listed):
    module, name = symbol.split(":")
    message = ranks(spec_by_name_without, 1, module, name, listed)[0]
    assert message.startswith(f"megatron-core {compat.installed_version()} lacks what kha_megatron")
    assert name in message
    assert "pip install 'megatron-core>=0.17,<0.20'" in message
