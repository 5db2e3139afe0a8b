"""The doctor on this environment, and on broken ones that are made up in a folder."""

import json
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from kha_megatron import cli
from kha_megatron.cli import doctor, installation
from kha_megatron.config import PRESETS


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine needs minutes for an import."""
    monkeypatch.setattr(installation, "PROBE_SECONDS", 500)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder first on the module path, and a function that puts packages into it."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(files=(), distribution=None, version="1.0", lines=()):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        if distribution:
            folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            head = [f"Name: {distribution}", f"Version: {version}", *lines]
            (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *head, ""]))

    return add


@pytest.fixture
def hide(monkeypatch):
    """Make distributions and modules of these names look as if they were not installed."""
    real_version = metadata.version
    real_find = installation.find_module

    def hidden(*names):
        def without(function):
            def look(name):
                if name in names:
                    raise metadata.PackageNotFoundError(name)
                return function(name)

            return look

        monkeypatch.setattr(metadata, "version", without(real_version))
        monkeypatch.setattr(metadata, "metadata", without(metadata.metadata))
        monkeypatch.setattr(
            doctor,
            "find_module",
            lambda name: None if name.partition(".")[0] in names else real_find(name),
        )

    return hidden


def check(name, *, deep=False):
    """The findings of one check, by their names."""
    return {finding.name: finding for finding in doctor.findings_of(name, deep=deep)}


def run(monkeypatch, capsys, *options):
    monkeypatch.setattr("sys.argv", ["kha-megatron", "doctor", *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, capsys.readouterr().out


def test_this_environment(monkeypatch, capsys):
    code, stdout = run(monkeypatch, capsys, "--json", "--deep")
    report = json.loads(stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert code == (0 if report["ok"] else 1)
    assert report["ok"] == (not any(finding["blocks"] for finding in found.values()))
    for name in ("torch", "transformers", "megatron-core", "tokenizers"):
        assert found[name]["found"] == metadata.version(name)
        assert found[name]["status"] == "ok"
    assert found["megatron.training"]["status"] == "ok"
    for finding in found.values():
        assert finding["effect"] or finding["status"] == "ok"
    # without an import, less is seen and none of it differs
    monkeypatch.setattr(doctor, "probe", lambda code: pytest.fail("imports something"))
    quick = json.loads(run(monkeypatch, capsys, "--json")[1])["findings"]
    assert {row["name"] for row in quick} == set(found) - {"--spec"}
    assert all(row == found[row["name"]] for row in quick if row["name"] != "CUDA device")


def test_looking_imports_nothing():
    code = """
    import sys
    from kha_megatron.cli.doctor import examine
    examine()
    heavy = {"torch", "megatron.core", "transformers", "nemo_run", "triton", "matplotlib"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    answer = installation.probe(textwrap.dedent(code) + "\nprint('{}')")
    assert answer == {}


def test_a_blocking_finding_makes_exit_code_1(monkeypatch, capsys, site):
    site({"apex/__init__.py": ""})
    code, stdout = run(monkeypatch, capsys)
    assert code == 1
    assert "needed, apex: rename or remove" in stdout
    code, stdout = run(monkeypatch, capsys, "--json")
    assert code == 1
    assert json.loads(stdout)["ok"] is False


def test_megatrons_own_spec_lookup_finds_every_name():
    finding = check("--spec", deep=True)["--spec"]
    assert (finding.status, finding.blocks) == ("ok", False), finding
    assert f"all {2 * len(PRESETS) + 2} names" in finding.effect


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ({"names": ["kha_mlp"], "lost": ["kha_mlp"]}, "not found: kha_mlp"),
        ({"error": "ConfigError: does not fit", "kinds": []}, "ConfigError: does not fit"),
    ],
)
def test_a_spec_that_megatron_cannot_find_blocks(monkeypatch, seen, found):
    monkeypatch.setattr(doctor, "probe", lambda code: seen)
    finding = check("--spec", deep=True)["--spec"]
    assert (finding.status, finding.blocks, finding.found) == ("wrong", True, found)


@pytest.mark.parametrize("installed", [True, False])
def test_apex_that_is_not_nvidias(site, installed):
    # what is on PyPI under this name; importing it would be a mistake
    files = {"apex/__init__.py": "raise SystemExit('imported')", "apex/lib.py": ""}
    site(files, distribution="apex" if installed else None, version="0.9.10.dev0")
    finding = check("apex")["apex"]
    assert (finding.status, finding.blocks) == ("wrong", True)
    assert "not NVIDIA's" in finding.found
    assert (finding.remedy == "pip uninstall apex") == installed


def test_apex_as_an_empty_folder(tmp_path, site):
    (tmp_path / "apex").mkdir()  # importable, as a namespace package
    assert check("apex")["apex"].blocks


@pytest.mark.parametrize("fused", [True, False])
def test_apex_of_nvidia(site, fused):
    parts = ("optimizers", "normalization", "multi_tensor_apply")
    files = {f"apex/{part}/__init__.py": "raise SystemExit" for part in parts}
    if fused:
        files["fused_weight_gradient_mlp_cuda.py"] = ""
    site({"apex/__init__.py": "raise SystemExit", **files}, distribution="apex", version="0.1")
    finding = check("apex")["apex"]
    assert (finding.status, finding.found, finding.blocks) == ("ok", "0.1", False)
    assert ("--no-gradient-accumulation-fusion" in finding.effect) != fused
    assert ("our entry point turns gradient accumulation fusion off" in finding.effect) != fused


@pytest.mark.parametrize(
    ("error", "blocks", "remedy"),
    [
        (
            'FileNotFoundError("Could not find shared object file for Transformer Engine torch")',
            True,
            "pip install --no-build-isolation transformer-engine-torch==2.20.2",
        ),
        ('ImportError("two\\nlines")', False, "kha-megatron[te]"),  # Megatron falls back
        ('AssertionError("version mismatch")', True, "kha-megatron[te]"),
    ],
)
def test_transformer_engine_that_does_not_import(site, monkeypatch, error, blocks, remedy):
    monkeypatch.setattr(doctor, "_devices_of_the_driver", lambda: ["H100"])
    files = {
        "torch/__init__.py": "",  # the real one takes seconds
        "transformer_engine/__init__.py": "",
        "transformer_engine/pytorch.py": f"raise {error}",
    }
    site(files, distribution="transformer-engine", version="2.20.2")
    finding = check("transformer-engine", deep=True)["transformer-engine"]
    assert (finding.status, finding.blocks) == ("wrong", blocks)
    assert finding.found.startswith("2.20.2")
    assert error.partition("(")[0] in finding.effect
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("devices", "found"), [([], "2.20.2, its Python alone"), (["H100"], "2.20.2")]
)
def test_transformer_engines_python_alone_is_for_the_cpu(site, monkeypatch, devices, found):
    monkeypatch.setattr(doctor, "_devices_of_the_driver", lambda: devices)
    site(
        {"transformer_engine/__init__.py": ""}, distribution="transformer-engine", version="2.20.2"
    )
    finding = check("transformer-engine")["transformer-engine"]
    assert (finding.status, finding.found, finding.blocks) == ("ok", found, False)
    assert ("cpu.install()" in finding.effect) == (not devices)


@pytest.mark.parametrize(("version", "status"), [("2.20.2", "ok"), ("1.9", "wrong")])
def test_transformer_engine_that_imports(site, version, status):
    files = {
        "torch/__init__.py": "",
        "transformer_engine/__init__.py": "",
        "transformer_engine/pytorch.py": "print('noise on stdout')",
        "transformer_engine/transformer_engine_torch.so": "",
    }
    site(files, distribution="transformer-engine", version=version)
    assert check("transformer-engine", deep=True)["transformer-engine"].status == status


def test_torch_that_dies_on_import(site):
    site({"torch/__init__.py": "import os; os.abort()"}, distribution="torch", version="2.11.0")
    assert check("torch")["torch"].status == "ok"
    findings = check("torch", deep=True)
    assert findings["torch"].status == "wrong"
    assert findings["torch"].blocks
    assert "ended with code -6" in findings["torch"].effect
    assert findings["CUDA device"].status == "missing"


def test_torch_with_devices(site, tmp_path, monkeypatch):
    stub = """
    is_available = lambda: True
    device_count = lambda: 3
    get_device_name = lambda index: "NVIDIA H200"
    """
    site({"torch/__init__.py": "", "torch/cuda.py": stub})
    site({"torch/version.py": "cuda: Optional[str] = '12.8'"})
    site(distribution="torch", version="2.7.0a0+7c8ec84dab.nv25.03")
    findings = check("torch", deep=True)
    assert findings["torch"].status == "ok"  # NVIDIA's name for a build after 2.6
    assert findings["torch"].effect == "built for CUDA 12.8"
    assert findings["CUDA device"].found == "3 x NVIDIA H200"

    told = "printf 'NVIDIA H200, 143771 MiB, 9.0\\nNVIDIA H200, 143771 MiB, 9.0\\n'"
    site({"nvidia-smi": f"#!/bin/sh\n{told}\n"})
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert check("torch")["CUDA device"].found == "2 x NVIDIA H200 (140 GiB, sm_90)"
    site({"torch/cuda.py": stub.replace("True", "False")})
    device = check("torch", deep=True)["CUDA device"]
    assert device.status == "missing"
    assert "2 x NVIDIA H200" in device.remedy


def test_torch_too_old_and_missing(site, hide):
    site(distribution="torch", version="2.3.1")
    torch = check("torch")["torch"]
    assert (torch.status, torch.found, torch.blocks) == ("wrong", "2.3.1", True)
    hide("torch")
    torch = check("torch", deep=True)["torch"]
    assert (torch.status, torch.found, torch.blocks) == ("missing", "-", True)
    assert "pip install 'torch" in torch.remedy


@pytest.mark.parametrize(
    ("minor", "status", "blocks"),
    [(19, "ok", False), (17, "ok", False), (16, "wrong", True), (20, "wrong", False)],
)
def test_megatron_source_tree_hides_the_wheel(site, tmp_path, minor, status, blocks):
    package_info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = 7\n"
    files = {"megatron/__init__.py": "", "megatron/core/__init__.py": "raise SystemExit"}
    site({**files, "megatron/core/package_info.py": package_info})
    findings = check("megatron-core")
    core = findings["megatron-core"]
    assert (core.found, core.status, core.blocks) == (f"0.{minor}.7", status, blocks)
    assert str(tmp_path) in core.effect
    assert ("newer than what was tested" in core.effect) == (minor == 20)
    assert findings["megatron.training"].status == "missing"  # 0.16's wheel had none either
    assert findings["megatron.training"].blocks


@pytest.mark.parametrize(("minor", "status"), [(17, "wrong"), (18, "wrong"), (19, "ok")])
def test_the_plug_in_takes_versions_that_the_entry_point_does_not(site, minor, status):
    files = {f"megatron/{part}/__init__.py": "raise SystemExit" for part in ("core", "training")}
    package_info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = 7\n"
    site({**files, "megatron/__init__.py": "", "megatron/core/package_info.py": package_info})
    findings = check("megatron-core")
    assert findings["megatron-core"].status == "ok"
    training = findings["megatron.training"]
    assert (training.status, training.blocks) == (status, False)
    if status == "wrong":
        assert training.supported == ">=0.19"
        assert "pip install 'megatron-core>=0.19,<0.20'" in training.remedy
        assert "--spec" in training.effect


def test_megatron_missing(hide):
    hide("megatron", "megatron-core")
    (finding,) = check("megatron-core").values()
    assert (finding.status, finding.blocks) == ("missing", True)


def test_leptonai_without_what_nemo_run_imports(site):
    site({"leptonai/__init__.py": "raise SystemExit", "leptonai/api/v2.py": ""})
    site(distribution="nemo-run", version="0.11.1")
    site(distribution="leptonai", version="0.47.0")
    finding = check("nemo-run")["nemo-run"]
    assert (finding.status, finding.blocks) == ("wrong", False)
    assert "0.47.0" in finding.effect
    assert finding.remedy == "pip install 'leptonai<0.47'"


def test_torchrun_is_looked_for_as_launch_does(monkeypatch, tmp_path):
    """Beside this Python too: NeMo-Run is given that folder, whether or not it is on PATH."""
    monkeypatch.setenv("PATH", "/nowhere")
    finding = check("nemo-run")["torchrun"]
    assert (finding.status, finding.found) == ("ok", str(Path(sys.executable).parent / "torchrun"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = check("nemo-run")["torchrun"]
    assert (finding.status, finding.blocks) == ("missing", False)
    assert "torch" in finding.remedy


def test_flash_attention_range(site):
    assert check("flash-attn")["flash-attn"].status == "missing"
    site(distribution="flash-attn", version="2.8.4")
    assert check("flash-attn")["flash-attn"].status == "wrong"


def test_ranges_come_from_the_installed_package(site):
    lines = ["Requires-Python: >=3.99", "Requires-Dist: Torch (>=99)", "Requires-Dist: numpy"]
    site(distribution="kha-megatron", version="7", lines=lines)
    assert installation.supported_range("torch") == ">=99"
    assert installation.supported_range("numpy") == ""
    assert check("numpy")["numpy"].status == "ok"
    python = check("python")["python"]
    assert (python.status, python.supported, python.blocks) == ("wrong", ">=3.99", True)


def test_a_source_tree_asks_for_what_its_installation_asks_for(hide):
    def asked():
        python, packages = installation.requirements()
        return python, {(r.name, str(r.specifier)) for r in packages if r.name != "kha-megatron"}

    installed = asked()
    hide("kha-megatron")
    assert asked() == installed
    for name in ("megatron-core", "torch", "transformers", "nemo-run", "transformer-engine"):
        assert installation.supported_range(name)


@pytest.mark.parametrize("name", doctor.CHECKS)
def test_no_check_raises_whatever_it_finds(name, site, monkeypatch):
    site(distribution=name, version="not a version")
    monkeypatch.setattr(doctor, "probe", lambda code: {"devices": []})
    for finding in check(name, deep=True).values():
        assert finding.status in ("ok", "missing", "wrong")


def test_a_check_that_raises_is_a_finding(monkeypatch):
    def broken(name):
        import no_such_module  # noqa: F401

    monkeypatch.setattr(doctor, "CHECKS", {"numpy": broken, "triton": broken})
    numpy, triton = doctor.examine()
    assert (numpy.status, numpy.blocks, triton.blocks) == ("wrong", True, False)
    assert "no_such_module" in numpy.found
    assert numpy.remedy == "pip install no_such_module"


def test_probe_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(installation, "PROBE_SECONDS", 0.5)
    assert "0.5 s" in installation.probe("import time; time.sleep(60)")["error"]
