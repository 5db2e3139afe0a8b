"""`register_bridge()`, and the modules that call it when they are imported."""

import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

from kha_megatron import bridge
from kha_megatron.errors import MissingDependencyError, VersionError


def no_package(name):
    raise metadata.PackageNotFoundError(name)


def test_without_megatron_bridge(monkeypatch):
    monkeypatch.setattr(metadata, "version", no_package)
    for arguments in ((), ({"some": "settings"},)):
        with pytest.raises(MissingDependencyError, match=r"pip install '\.\[bridge\]'"):
            bridge.register_bridge(*arguments)


@pytest.mark.parametrize("version", ["0.5.1", "0.60.0"])
def test_another_version(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(VersionError, match=f"megatron-bridge {version} is not supported"):
        bridge.register_bridge()


@pytest.mark.parametrize("module", ["register", "register_hybrid"])
def test_importing_a_module_registers(monkeypatch, module):
    """Frameworks import the module by name and call nothing."""
    name = f"kha_megatron.bridge.{module}"
    monkeypatch.setattr(metadata, "version", no_package)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[bridge\]'"):
        import_module(name)


IMPORT_BY_NAME = """
from tests import transformer_engine

transformer_engine.install()
from importlib import import_module
import sys
from megatron.bridge import AutoBridge
from transformers import AutoConfig

for name in sys.argv[2:]:
    import_module(name)
    auto = AutoBridge.from_hf_pretrained(sys.argv[1])
    print(type(AutoConfig.from_pretrained(sys.argv[1])).__name__)
    print(type(auto.to_megatron_provider(load_weights=False)).__name__)
"""


def test_auto_bridge_finds_the_registered_models(bridge_ranks, folders):
    """In a new process, which has not imported anything else of this package."""
    modules = ["kha_megatron.bridge.register", "kha_megatron.bridge.register_hybrid"]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_BY_NAME, folders["dense"], *modules],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-4:] == [
        "KHAModelConfig",
        "KHAModelProvider",
        "KHAModelConfig",
        "KHAHybridModelProvider",
    ]
