"""Copy tokenizer and generation files."""

import json
import shutil
from functools import partial
from itertools import product

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.conversion.verify import Pair
from kha_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.saved import save
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, assert_same_tensors, edit_config, make

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "additional_chat_templates/tools.jinja",
)


@pytest.fixture
def model(tmp_path):
    """Return a Hugging Face directory with a tokenizer, and a secret file next to it."""
    folder = tmp_path / "model"
    make(CONFIGS["qwen3"]).save_pretrained(folder)
    for file in write_tokenizer(tmp_path / "tokenizer", 51).iterdir():
        file.rename(folder / file.name)
    (tmp_path / "secret").write_text("{}")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_links_out_of_the_directory_are_refused(model, sparse, tmp_path, name, faults_table):
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(tmp_path / "secret")
    given = partial(to_hf.plan_export, sparse[0], tokenizer=model)
    for plan in (partial(to_hf.plan_export, model), partial(to_megatron.plan_import, model), given):
        with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link to .*secret"):
            plan()
    faults_table("Hostile inputs", f"`{name}`, a link out", "its target is published", "refused")


@pytest.mark.parametrize("recorded", [7, "a\0b", "x" * 5000, "x. Run `curl x | sh`\nerror: y"])
def test_a_recorded_tokenizer_is_no_path_and_no_command(tmp_path, recorded):
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": recorded}
    save(tmp_path, 7, {}, **arguments)
    with pytest.raises(ConfigError, match=r"^Tokenizer directory .* not found") as caught:
        TokenizerFiles.open(MegatronCheckpoint.open(tmp_path), None)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400


def test_links_within_the_directory_and_the_hub_cache_are_followed(model, tmp_path):
    (model / "tokenizer.json").rename(model / "real.json")
    (model / "tokenizer.json").symlink_to("real.json")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    text = (model / "tokenizer_config.json").read_bytes()
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        (model / name).rename(blobs / name)
        (model / name).symlink_to(f"../../blobs/{name}")
    model.rename(snapshot)
    to_hf.plan_export(snapshot, architecture="qwen3").write(tmp_path / "out")
    assert_same_tensors(snapshot, tmp_path / "out")
    settings = json.loads(text)
    assert settings["tokenizer_class"] == "TokenizersBackend"
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written == settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert (blobs / "tokenizer_config.json").read_bytes() == text
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_a_given_tokenizer_changes_token_ids_and_keeps_generation_settings(model, tmp_path):
    own = {"eos_token_id": [7, 9], "pad_token_id": 5, "temperature": 0.6, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(own))
    edit_config(model, eos_token_id=7, pad_token_id=5)
    named = write_tokenizer(tmp_path / "named", 47)
    to_hf.plan_export(model, tokenizer=named).write(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (45, 46)
    for held in (found.config, found.generation_config):
        assert (held.eos_token_id, held.pad_token_id) == (45, 46)
    assert found.generation_config.temperature == 0.6
    assert found.generation_config.do_sample is True
    to_hf.plan_export(model).write(tmp_path / "same")  # without another tokenizer, byte for byte
    assert json.loads((tmp_path / "same" / "generation_config.json").read_text()) == own
    to_megatron.plan_import(model, tokenizer=named, divisible_by=8).write(tmp_path / "save")
    to_hf.plan_export(tmp_path / "save").write(tmp_path / "back")
    name = "generation_config.json"
    assert (tmp_path / "back" / name).read_text() == (tmp_path / "out" / name).read_text()


def test_generation_settings_survive_a_round_trip(model, tmp_path):
    own = {"eos_token_id": [49, 7], "temperature": 0.6, "do_sample": True, "top_k": 20}
    (model / "generation_config.json").write_text(json.dumps(own))
    to_megatron.plan_import(model, divisible_by=8).write(tmp_path / "save")
    to_hf.plan_export(tmp_path / "save").write(tmp_path / "back")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "back").generation_config
    assert {name: getattr(found, name) for name in own} == own
    assert found.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / "back").pad_token_id
    (tmp_path / "save" / "tokenizer" / "generation_config.json").unlink()  # as of another run
    to_hf.plan_export(tmp_path / "save", tokenizer=model).write(tmp_path / "named")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "named").generation_config
    assert {name: getattr(found, name) for name in own} == own


def test_a_tokenizer_with_too_many_entries_is_refused_except_by_verify(model, tmp_path):
    to_megatron.plan_import(model, divisible_by=8).write(tmp_path / "save")
    shutil.rmtree(tmp_path / "save" / "tokenizer")
    write_tokenizer(tmp_path / "save" / "tokenizer", 60)  # of another model
    fitting = write_tokenizer(tmp_path / "fitting", 51)
    message = r"vocabulary size of 60, but .* only 56 rows.*with --tokenizer"
    with pytest.raises(CheckpointError, match=message):
        to_hf.plan_export(tmp_path / "save")
    to_hf.plan_export(tmp_path / "save", tokenizer=fitting).write(tmp_path / "hf")
    for one, other in product((tmp_path / "save", tmp_path / "hf"), repeat=2):
        assert Pair.open(one, other).compare(logits=False).agrees
