"""Test that Git LFS pointers are recognised in place of the files that a model consists of.

The pointers are those that ``git lfs pointer`` prints.
"""

import shutil

import pytest

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.tokenizer_files import load_hf_tokenizer
from kha_megatron.data import load_tokenizer
from kha_megatron.errors import KHAError
from kha_megatron.lfs import is_lfs_pointer
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, make
from tests.faults import fuzz

VERSION = "version https://git-lfs.github.com/spec/v1\n"
DIGEST = "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTER = f"{VERSION}oid {DIGEST}\nsize 12345\n"
POINTERS = {
    "usual": POINTER,
    "extension": f"{VERSION}ext-0-foo {DIGEST}\noid {DIGEST}\nsize 12345\n",
    "pre-release": POINTER.replace("git-lfs.github.com", "hawser.github.com"),
}
OTHERS = {
    "empty": "",
    "another first line": f"A pointer:\n{POINTER}",
    "documentation": f"{VERSION}is the first line of every pointer.\n",
    "too long": POINTER + "x" * 1024,
}


@pytest.mark.parametrize("text", [*POINTERS.values(), *OTHERS.values()], ids=[*POINTERS, *OTHERS])
def test_pointers_are_told_from_other_files(tmp_path, text):
    file = tmp_path / "file"
    file.write_text(text)
    assert is_lfs_pointer(file) == (text in POINTERS.values())
    assert not is_lfs_pointer(tmp_path)
    assert not is_lfs_pointer(tmp_path / "missing")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return a Hugging Face directory with several shards and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make(CONFIGS["qwen3"]).save_pretrained(folder, max_shard_size="20KB")
    write_tokenizer(folder, 51)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def model(sharded, tmp_path):
    """Return a copy of the model."""
    return shutil.copytree(sharded, tmp_path / "copy")


WEIGHTS = ("config.json", "model.safetensors.index.json", "model-00002-of-")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model")


@pytest.mark.parametrize("name", [*WEIGHTS, *TOKENIZER])
def test_pointers_in_a_model_are_named(model, name):
    to_megatron.plan_import(model)
    file = next(model.glob(f"{name}*"), model / name)
    file.write_text(POINTER)
    message = rf"{file} is a Git LFS pointer, .* Run `git lfs pull`"
    for plan in (to_megatron.plan_import, to_hf.plan_export):
        with pytest.raises(KHAError, match=message):
            plan(model)
    readers = [load_hf_tokenizer, load_tokenizer] if name in TOKENIZER else [HFCheckpoint.open]
    for reader in readers:
        with pytest.raises(KHAError, match=message):
            reader(model)


def test_a_tokenizer_next_to_pointers_of_weights_is_loaded(model):
    for file in model.glob("*.safetensors"):
        file.write_text(POINTER)
    assert len(load_tokenizer(model)) == 51


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
def test_pointers_in_a_megatron_checkpoint_are_named(tmp_path, name, hashes):
    folder = tmp_path / "checkpoint"
    fuzz.torch_dist(folder)
    MegatronCheckpoint.open(folder, verify=hashes).tensor("a")
    file = next(folder.glob(name))
    file.write_text(POINTER)
    with pytest.raises(KHAError, match=rf"{file} is a Git LFS pointer, .*`git lfs pull`"):
        MegatronCheckpoint.open(folder, verify=hashes)
