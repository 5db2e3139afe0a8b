"""Checkpoints and folders that commit cf5b721 wrote load, convert, fold and resume.

What is expected was computed by that commit (``tests/fixtures/cf5b721/README.md``).
"""

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kha_megatron.hf  # noqa: F401  registers the classes
from kha_megatron import cli
from tests.training.conftest import losses
from tests.versions import needs_attention_family, needs_training_package

FIXTURES = Path(__file__).parents[1] / "fixtures" / "cf5b721"
KINDS = ("dense", "moe", "mla", "gta")
FOLDED = {"moe": "qwen3_moe", "mla": "deepseek_v3"}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """``old(kind)``: the unpacked folder of that kind; nobody writes into it."""
    folder = tmp_path_factory.mktemp("cf5b721")

    def unpacked(kind):
        if kind != "dense":
            needs_attention_family()
        if not (folder / kind).exists():
            with tarfile.open(FIXTURES / f"{kind}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
        return folder / kind

    return unpacked


@pytest.fixture
def command(monkeypatch):
    """``command(*words)`` runs ``kha-megatron`` in this process, to success."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, words

    return run


def tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_tensors(folder, other):
    ours, theirs = tensors(folder), tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_logits(folder, expected):
    """Of the model that transformers loads, against Megatron's of the time."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        ours = model.eval()(torch.from_numpy(expected["tokens"])).logits
    theirs = torch.from_numpy(expected["logits"])[..., : ours.shape[-1]]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_loads_and_goes_to_megatron_and_back(old, command, tmp_path, kind):
    folder = old(kind)
    assert_logits(folder / "hf", np.load(folder / "expected.npz"))
    there, back = tmp_path / "megatron", tmp_path / "hf"
    command("convert", "to-megatron", folder / "hf", there, "--no-verify")
    command("convert", "to-hf", there, back, "--no-verify")
    assert_same_tensors(back, folder / "hf")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_converts(old, command, tmp_path, kind):
    folder = old(kind)
    command("convert", "to-hf", folder / "save", tmp_path / "hf", "--no-verify")
    assert_same_tensors(tmp_path / "hf", folder / "hf")
    assert_logits(tmp_path / "hf", np.load(folder / "expected.npz"))


def test_a_converted_checkpoint_converts(old, command, tmp_path):
    folder = old("dense")
    command("convert", "to-hf", folder / "megatron", tmp_path / "hf", "--no-verify")
    assert_same_tensors(tmp_path / "hf", folder / "hf")


@pytest.mark.parametrize("kind", FOLDED)
def test_a_checkpoint_folds(old, command, tmp_path, kind):
    folder = old(kind)
    command("convert", "fold", folder / "save", tmp_path / "hf", "--no-verify")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == FOLDED[kind]
    assert_logits(tmp_path / "hf", np.load(folder / "expected.npz"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on(old, entry, tmp_path, kind):
    """The fourth loss is right only if the optimizer's state was loaded too."""
    needs_training_package()
    folder = old(kind)
    job = json.loads((folder / "arguments.json").read_text())
    words = ["--device", "cpu", "--load", str(folder / "save"), "--tensorboard-dir", str(tmp_path)]
    run = entry([*job["arguments"], *words], job["ranks"])
    assert run.codes == [0] * job["ranks"], run.output[-4000:]
    found = losses(tmp_path)
    assert min(found) == 3
    expected = np.load(folder / "expected.npz")["losses"]
    np.testing.assert_allclose([found[3], found[4]], expected, rtol=1e-5)
