"""``kha-megatron doctor``: versions, missing packages and the exit code."""

import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import kha_megatron
from kha_megatron.cli import doctor

ROOT = Path(kha_megatron.__file__).parents[1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that adds files and distributions in front of the module path."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(files=(), distribution=None, version=None, requires=()):
        for name in files:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("raise SystemExit('imported')")
        if distribution:
            folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
            lines += [f"Requires-Dist: {requirement}" for requirement in requires]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return add


def check(name):
    return next(finding for finding in doctor.inspect_components() if finding.name == name)


@pytest.mark.fast
@pytest.mark.versions
def test_this_environment_can_train(run):
    code, stdout, _ = run("doctor", "--json")
    report = json.loads(stdout)
    assert code == 0
    assert report["ok"]
    findings = {finding["name"]: finding for finding in report["findings"]}
    for name in ("torch", "transformers", "megatron-core", "tokenizers"):
        finding = findings[name]
        assert finding["found"] == metadata.version(name)
        assert finding["status"] == "ok"


def test_an_unsupported_version_blocks(site, run):
    site(distribution="torch", version="2.3.1")
    torch = check("torch")
    assert torch.status == "wrong"
    assert torch.found == "2.3.1"
    assert torch.blocks
    code, stdout, _ = run("doctor")
    assert code == 1
    assert "torch: run `pip install 'torch<" in stdout


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.8.0", "ok"), ("2.20.2", "ok"), ("2.7.0", "wrong"), ("3.0", "wrong")],
)
def test_pins_for_developers_are_not_bounds_for_users(site, monkeypatch, version, status):
    monkeypatch.setattr(doctor, "lacks_te_extension", lambda: False)
    pins = ['transformer-engine==2.20.2; extra == "dev"', "torch<2.16,>=2.9"]  # sorted by extra
    ours = [*pins, 'transformer-engine[pytorch]<2.21,>=2.8; extra == "te"']
    site(distribution="kha-megatron", version="0.1.0", requires=ours)
    site(distribution="transformer-engine", version=version)
    engine = check("transformer-engine")
    assert engine.status == status
    assert engine.supported == "<2.21,>=2.8"


@pytest.mark.versions
def test_bounds_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in ("megatron", "launch", "plots", "te", "flash"):
        lines += project["optional-dependencies"][extra]
    bounds = {}
    for line in lines:
        requirement = Requirement(line)
        bounds[requirement.name] = requirement.specifier
    for finding in doctor.inspect_components():
        name = finding.name
        if name in bounds:
            supported = SpecifierSet(finding.supported)
            assert supported == bounds[name], f"{name}: the environment is older: run make setup"


@pytest.mark.parametrize(("minor", "status"), [(19, "ok"), (16, "wrong")])
def test_a_megatron_source_tree_hides_the_wheel(tmp_path, monkeypatch, minor, status):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core.parent / "__init__.py").touch()
    (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 7\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    finding = check("megatron-core")
    assert finding.found == f"0.{minor}.7"
    assert finding.status == status


@pytest.mark.parametrize("module", ["lib", "optimizers"])
def test_only_nvidias_apex_is_accepted(site, module):
    site(["apex/__init__.py", f"apex/{module}/__init__.py"])
    blocking = {finding.name for finding in doctor.inspect_components() if finding.blocks}
    assert blocking == ({"apex"} if module == "lib" else set())


@pytest.mark.parametrize("extension", [True, False])
def test_transformer_engine_needs_its_extension(site, extension, monkeypatch):
    monkeypatch.setattr(doctor, "lacks_te_extension", doctor.lacks_te_extension.__wrapped__)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)  # may be hidden
    files = ["transformer_engine/__init__.py"]
    if extension:
        files.append("transformer_engine/transformer_engine_torch.so")
    site(files, distribution="transformer-engine", version="2.20.2")
    assert check("transformer-engine").status == ("ok" if extension else "wrong")


def test_devices_of_the_driver_are_listed(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert check("CUDA device").found == "2 x NVIDIA H200"
    monkeypatch.setenv("PATH", "/nowhere")
    assert check("CUDA device").status == "missing"
