"""What travels with the tensors comes out of the model's own folder, or is refused."""

import os

import pytest

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.errors import CheckpointError
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, make

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
    """A Hugging Face folder with a tokenizer, and a secret beside it."""
    folder = tmp_path / "model"
    make(CONFIGS["qwen3"]).save_pretrained(folder)
    for file in write_tokenizer(tmp_path / "tokenizer", 51).iterdir():
        file.rename(folder / file.name)
    (tmp_path / "secret").write_text("{}")
    return folder


def _replace(folder, name):
    """Room for another file of that name."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    return file


@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_the_folder_is_refused(model, tmp_path, name, faults_table):
    _replace(model, name).symlink_to(tmp_path / "secret")
    for plan in (to_hf.plan, to_megatron.plan):
        with pytest.raises(CheckpointError, match=rf"{name} is a link to .*secret") as caught:
            plan(model)
        assert "\n" not in str(caught.value)
    faults_table("Hostile inputs", f"`{name}`, a link out", "its target is published", "refused")


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_is_refused(model, name):
    os.mkfifo(_replace(model, name))
    with pytest.raises(CheckpointError, match=rf"{name} is no regular file"):
        to_hf.plan(model)


def test_a_tokenizer_named_for_a_megatron_run_is_looked_at_as_well(sparse, tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", 51)
    (tmp_path / "secret").write_text("{{ bos_token }}")
    _replace(folder, "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is a link to .*secret"):
        to_hf.plan(sparse[0], tokenizer=folder)


def test_links_inside_of_the_folder_and_into_the_hubs_cache_are_copied(model, tmp_path):
    (model / "tokenizer.json").rename(model / "real.json")
    (model / "tokenizer.json").symlink_to("real.json")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    text = (model / "tokenizer_config.json").read_bytes()
    (model / "tokenizer_config.json").rename(blobs / "1")
    (model / "tokenizer_config.json").symlink_to("../../blobs/1")
    model.rename(snapshot)
    to_hf.plan(snapshot).write(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == text
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
