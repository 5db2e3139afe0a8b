"""The code that is saved beside a model, loaded in a process without this package."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kha_megatron.hf import KHAForCausalLM
from kha_megatron.hf.modelling_files import AUTO_MAP, modelling_files
from tests.hf.conftest import (
    FAMILY,
    HIDE_PACKAGE,
    MIXED,
    MOE,
    load,
    make_config,
    make_model,
    tokens,
)

HEADS = {"kha_gate": {"output": "head"}, "kha_moh": {"shared": 1, "active": [1, 3, 2]}}

# Runs where kha_megatron cannot be imported. Only this file and test_decoding.py set
# trust_remote_code=True.
STRANGER = (
    HIDE_PACKAGE
    + """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
directory, again = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
except ValueError as error:
    print("untrusted:", str(error).splitlines()[0])
trust = {"trust_remote_code": True, "output_loading_info": True}
model, info = AutoModelForCausalLM.from_pretrained(directory, **trust)
assert not any(info.values()), info
base, info = AutoModel.from_pretrained(directory, **trust)
assert info.pop("unexpected_keys") == {"lm_head.weight"}
assert not any(info.values()), info
config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
ids = load_file(directory + "/ids.safetensors")["ids"]
with torch.no_grad():
    logits = model(ids).logits
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    new = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
save_file({"logits": logits, "new": new}, directory + "/seen.safetensors")
model.save_pretrained(again)
print("variants:", config.kha_query, config.kha_key, config.kha_value)
print("classes:", *(type(x).__module__.split(".")[0] for x in (model, base, config)))
assert not [name for name in sys.modules if name.split(".")[0] == "kha_megatron"]
"""
)


def save_and_run(model, root):
    """Save a model and run the program above, offline, with its own cache of modules."""
    directory = root / "model"
    again = root / "again"
    model.save_pretrained(directory)
    save_file({"ids": tokens()}, directory / "ids.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", STRANGER, directory, again],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "HF_MODULES_CACHE": str(root / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    return directory, again, result


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Return a model, its directory, the directory that the other process saved, and its result."""
    if Version(transformers.__version__) < Version("5.10"):
        pytest.skip("exported code needs transformers 5.10")
    torch.manual_seed(0)
    model = make_model(MIXED, initializer_range=0.5, **MOE, **HEADS)
    return model, *save_and_run(model, tmp_path_factory.mktemp("stranger"))


@pytest.mark.parametrize(("name", "other"), [("gate", "moh"), ("moh", "gate")])
def test_a_mechanism_adds_only_its_own_files(name, other):
    files = modelling_files(make_config(**{f"kha_{name}": HEADS[f"kha_{name}"]}))
    assert f"heads_{name}_kha.py" in files
    assert not [file for file in files if other in file]


def check_stranger(model, directory, result):
    """Compare the logits of the other process with those of ``model``."""
    assert result.returncode == 0, result.stderr
    ids = load_file(directory / "ids.safetensors")["ids"]
    seen = load_file(directory / "seen.safetensors")
    with torch.no_grad():
        expected = model(ids).logits
    assert expected.abs().max() > 1
    # Loaded tensors are unaligned, for which the CPU rounds products differently.
    torch.testing.assert_close(seen["logits"], expected, rtol=1e-5, atol=1e-5)
    assert seen["new"].shape == (2, ids.shape[1] + 4)


@pytest.mark.fast
@pytest.mark.versions
def test_exported_code_gives_the_same_model(stranger):
    model, directory, _, result = stranger
    check_stranger(model, directory, result)
    assert "classes:" + 3 * " transformers_modules" in result.stdout
    assert "variants: linear gate mlp" in result.stdout
    assert re.search("untrusted: .*custom code", result.stdout)


@pytest.mark.whole
def test_exported_code_gives_the_same_tied_attention(tmp_path):
    kha, sizes = FAMILY["gta"]
    model = make_model(kha, **sizes)
    directory, _, result = save_and_run(model, tmp_path)
    check_stranger(model, directory, result)


TWO_MODELS = (
    HIDE_PACKAGE
    + """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    ids = load_file(directory + "/ids.safetensors")["ids"]
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, directory + "/seen.safetensors")
"""
)


def test_models_in_directories_of_the_same_name_run_their_own_code(tmp_path):
    """In one process, as with checkpoints of two runs."""
    models = {}
    for run in ("plain", "talking"):
        directory = tmp_path / run / "final"
        settings = {"kha_talking": {}} if run == "talking" else {}
        models[directory] = make_model(MIXED, initializer_range=0.5, **settings)
        models[directory].save_pretrained(directory)
        save_file({"ids": tokens()}, directory / "ids.safetensors")
    subprocess.run(
        [sys.executable, "-c", TWO_MODELS, *models],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    for directory, model in models.items():
        with torch.no_grad():
            expected = model(load_file(directory / "ids.safetensors")["ids"]).logits
        seen = load_file(directory / "seen.safetensors")["logits"]
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def test_a_model_saved_by_exported_code_is_complete(stranger):
    model, directory, again, _ = stranger
    names = [{file.name for file in path.glob("*.py")} for path in (again, directory)]
    assert names[0] == names[1]
    assert json.loads((again / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in load_file(again / "model.safetensors")
    loaded = load(again)
    state = model.state_dict()
    assert type(loaded) is KHAForCausalLM
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_the_installed_package_takes_precedence_over_exported_code(stranger, tmp_path):
    _, directory, *_ = stranger
    copy = shutil.copytree(directory, tmp_path / "copy")
    for file in copy.glob("*.py"):
        file.write_text("raise SystemExit('executed')\n")
    assert type(AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=False)) is (
        KHAForCausalLM
    )
