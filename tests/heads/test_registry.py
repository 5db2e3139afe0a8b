"""Register mechanisms from files and packages."""

import argparse
import sys
from pathlib import Path

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads import registry
from kha_megatron.heads.config import PRESETS, HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.run import Run
from kha_megatron.training.arguments import add_kha_arguments

TOY = Path(__file__).parents[1] / "mechanisms" / "toy.py"
OWN = ["collaborative", "talking", "gate", "moh"]


def test_a_file_adds_presets_settings_and_its_own_argument():
    words = ["--heads-from", str(TOY), "--kha-value", "mlp", "--heads", "toy.strength=3"]
    kha = Run.from_values().updated(words).kha
    assert str(kha) == "value=mlp toy(strength=3)"
    assert str(HeadsConfig.from_preset("toy_strong")) == "toy(strength=2.0)"
    assert PRESETS["toy_strong"] == {"toy": {"strength": 2}}
    assert HeadsConfig.from_dict(kha.to_dict()) == kha == HeadsConfig.from_entries(kha.to_entries())
    launched = Run.from_values(num_layers=1).updated(["--heads", "toy"])
    assert launched.words()[:2] == ["--heads-from", str(TOY)]


def test_a_missing_mechanism_is_named_with_its_source(monkeypatch):
    registry.use_files([TOY])
    entries = HeadsConfig.from_preset("toy").to_entries()
    monkeypatch.setenv(registry.FILES_VARIABLE, "")
    with pytest.raises(ConfigError, match=r"mechanism toy from toy\.py.*Read toy\.py first, then"):
        HeadsConfig.from_entries(entries)
    with pytest.raises(ConfigError, match="Look at the package kha-toy first"):
        HeadsConfig.from_entries(entries | {"kha_providers": {"toy": "kha-toy"}})
    sources = ("git+https://host/x", "--index-url=x", "../toy.py", "a b", "x; y", "a\nb", "", 1)
    names = ("toy. Run x", "--toy", "toy`x`", "")
    hostile_maps = [{"toy": source} for source in sources]
    hostile_maps += [{name: "kha-toy"} for name in names]
    for hostile in ("toy.py", *hostile_maps):
        with pytest.raises(ConfigError, match="kha_providers must map"):
            HeadsConfig.from_entries(entries | {"kha_providers": hostile})
    with pytest.raises(ConfigError, match="Unknown KHA preset"):
        HeadsConfig.from_preset("toy")


def test_a_package_registers_its_mechanism(tmp_path, monkeypatch):
    (tmp_path / "kha_toy.py").write_text(TOY.read_text())
    info = tmp_path / "kha_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kha-toy\nVersion: 1.0\n")
    entry = info / "entry_points.txt"
    entry.write_text("[kha_megatron.heads]\ntoy = kha_toy:Toy\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kha_toy", raising=False)
    caches = registry._from_packages, registry._register
    try:
        for cached in caches:
            cached.cache_clear()
        kha = HeadsConfig.from_preset("toy")
        assert kha.providers_entry == {"kha_providers": {"toy": "kha-toy"}}
        assert kha.files == ()
        with pytest.raises(ConfigError, match=r"'toy' in toy\.py is invalid or already in use"):
            registry.use_files([TOY])
        entry.write_text("[kha_megatron.heads]\ntoy = kha_toy:Other\n")
        for cached in caches:
            cached.cache_clear()
        with pytest.raises(ConfigError, match="mechanism toy of kha-toy cannot be imported"):
            registry.mechanism_types()
    finally:
        entry.unlink()
        for cached in caches:
            cached.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"toy"', '"moh"'), "'moh' in .* already in use"),
        (('"toy"', '"init"'), "'init' in .* already in use"),
        (("(Mechanism)", ""), "contains no subclass of Mechanism"),
        (("import Mapping", "import Nothing"), "failed: cannot import name 'Nothing'"),
        (
            ("@dataclass", "raise SystemExit(0)\n@dataclass"),
            r"own\.py must not call sys\.exit\(\)",
        ),
    ],
)
def test_invalid_files_raise_an_error_and_register_nothing(change, message, tmp_path):
    assert change[0] in TOY.read_text()
    (tmp_path / "own.py").write_text(TOY.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message):
        registry.use_files([tmp_path / "own.py"])
    assert [*registry.mechanism_types()] == OWN


def test_no_mechanism_can_have_the_name_of_an_option(tmp_path):
    """Mechanisms store their settings as ``kha_NAME``, as options and fields of models do."""
    parser = add_kha_arguments(argparse.ArgumentParser())
    names = {*vars(parser.parse_args([])), *ModelConfig.__dataclass_fields__}
    names = {name.removeprefix("kha_") for name in names if name.startswith("kha_")}
    assert {"value", "folded", "fold_linear"} <= names
    for name in names - set(OWN):
        file = tmp_path / f"{name}.py"
        file.write_text(TOY.read_text().replace('"toy"', f'"{name}"'))
        with pytest.raises(ConfigError, match=f"'{name}' in .* already in use"):
            registry.use_files([file])
