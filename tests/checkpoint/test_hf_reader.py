"""Hugging Face folders: the layout of the matrices, and folders that must be refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.hf_writer import HFWriter
from kha_megatron.checkpoint.safetensors_file import TensorEntry, read_header
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.model.recorded import kha_of, knock_weights

D, LAYERS = 7, 3
CONFIG = {"model_type": "kha", "num_hidden_layers": LAYERS, "kha_key": "linear", "kha_value": "mlp"}


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(5)
    names = ["model.norm.weight"]
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        names.append(f"{attention}.k_knock.proj.weight")
        names += [f"{attention}.v_knock.{part}_proj.weight" for part in ("up", "gate", "down")]
    return {name: torch.randn(D, D, generator=generator) for name in names}


@pytest.fixture
def single(tmp_path, tensors):
    folder = tmp_path / "single"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path, tensors):
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = dict(list(tensors.items())[shard::3])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _write_map(folder, weight_map)
    return folder


def _write_map(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _read_map(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_matrices_are_transposed_and_stacked(request, tensors, kind):
    checkpoint = HFCheckpoint.open(request.getfixturevalue(kind))
    assert list(checkpoint.keys()) == sorted(tensors)
    assert kha_of(checkpoint) == KHAConfig(key="linear", value="mlp")
    assert torch.equal(checkpoint.tensor("model.norm.weight"), tensors["model.norm.weight"])
    weights = knock_weights(checkpoint)
    assert set(weights) == {(i, p) for i in range(LAYERS) for p in ("key", "value")}
    x = torch.randn(2, D)
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        for row, part in enumerate(("up", "gate", "down")):
            linear = tensors[f"{attention}.v_knock.{part}_proj.weight"]
            assert torch.equal(weights[layer, "value"][row], linear.T)
        linear = tensors[f"{attention}.k_knock.proj.weight"]
        torch.testing.assert_close(
            x @ weights[layer, "key"][0], torch.nn.functional.linear(x, linear)
        )


def test_it_reads_what_the_model_saves(tmp_path):
    from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

    config = KHAModelConfig(
        vocab_size=11,
        hidden_size=20,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        kha_query="gate",
        kha_value="mlp",
    )
    model = KHAForCausalLM(config)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for matrix in (attention.q_knock.gate_proj, attention.v_knock.down_proj):
            matrix.weight.copy_(torch.arange(16.0).view(4, 4))
    model.save_pretrained(tmp_path)
    checkpoint = HFCheckpoint.open(tmp_path)
    assert kha_of(checkpoint) == KHAConfig(query="gate", value="mlp")
    weights = knock_weights(checkpoint)
    assert torch.equal(weights[1, "query"], torch.arange(16.0).view(1, 4, 4).mT)
    assert torch.equal(weights[1, "value"][2], torch.arange(16.0).view(4, 4).T)
    assert torch.equal(weights[0, "value"][0], torch.eye(4))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", "sub/x", 3, "", "a\0b"]
)
def test_an_index_may_not_leave_its_folder(sharded, tensors, name):
    save_file(tensors, sharded.parent / "outside.safetensors")
    _write_map(sharded, _read_map(sharded) | {"model.norm.weight": name})
    with pytest.raises(CheckpointError, match=r"index\.json points to .*in the folder itself"):
        HFCheckpoint.open(sharded)


def test_an_index_that_lies_is_refused(sharded):
    weight_map = _read_map(sharded)
    _write_map(sharded, weight_map | {"model.extra": next(iter(weight_map.values()))})
    with pytest.raises(CheckpointError, match=r"does not hold model\.extra"):
        HFCheckpoint.open(sharded)
    (sharded / weight_map["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"00003\.safetensors is missing"):
        HFCheckpoint.open(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        HFCheckpoint.open(sharded)


def test_an_index_that_another_model_left_is_not_followed(sharded, tensors):
    """transformers removes the shards of the model before, and takes the one file."""
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed, sharded / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds two models: .* delete the one"):
        HFCheckpoint.open(sharded)
    for shard in sharded.glob("model-*.safetensors"):
        shard.unlink()
    checkpoint = HFCheckpoint.open(sharded)
    assert all(torch.equal(checkpoint.tensor(name), changed[name]) for name in tensors)


def test_an_index_may_name_the_one_file(single, tensors):
    _write_map(single, dict.fromkeys(tensors, "model.safetensors"))
    assert list(HFCheckpoint.open(single).keys()) == sorted(tensors)


def test_weights_under_an_adapter_are_refused(single):
    """With peft, transformers would load another model than the tensors are."""
    (single / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has adapter_config\.json: .*merge the adapter"):
        HFCheckpoint.open(single)


def test_a_truncated_file_is_named(single):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        HFCheckpoint.open(single)


def test_pickles_are_not_read(single):
    (single / "model.safetensors").unlink()
    torch.save({}, single / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin can execute code"):
        HFCheckpoint.open(single)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "has no config.json"), ("{", "no readable JSON"), ("[]", "holds a list")],
)
def test_a_bad_config_is_refused(single, text, message):
    (single / "config.json").unlink()
    if text is not None:
        (single / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        HFCheckpoint.open(single)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_hidden_layers": LAYERS + 1}, CheckpointError, "4 matrices.*model.layers.3"),
        ({"num_hidden_layers": LAYERS - 1}, CheckpointError, "4 matrices.*model.layers.2"),
        ({"num_hidden_layers": None}, CheckpointError, "num_hidden_layers=None"),
        ({"num_hidden_layers": 2**63}, CheckpointError, f"num_hidden_layers={2**63}"),
        ({"kha_query": "mlp"}, CheckpointError, "9 matrices.*q_knock"),
        ({"kha_key": None}, CheckpointError, "3 matrices.*k_knock"),
        ({"kha_key": None, "kha_value": None}, CheckpointError, "records no knocking heads"),
        ({"kha_value": "swish"}, ConfigError, "unknown KHA variant 'swish'"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(single, change, error, message):
    (single / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(error, match=message):
        knock_weights(HFCheckpoint.open(single))


def test_a_model_without_kha_and_an_unknown_key(single):
    plain = {key: value for key, value in CONFIG.items() if not key.startswith("kha_")}
    (single / "config.json").write_text(json.dumps(plain))
    checkpoint = HFCheckpoint.open(single)
    assert kha_of(checkpoint) is None
    with pytest.raises(CheckpointError, match="records no knocking heads"):
        knock_weights(checkpoint)
    with pytest.raises(CheckpointError, match="holds no tensor nothing"):
        checkpoint.tensor("nothing")


@pytest.fixture
def hashed(tmp_path, tensors):
    """A folder with the SHA-256 of every tensor in its ``manifest.json``."""
    folder = tmp_path / "hashed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    entries = [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    writer = HFWriter(folder, entries, max_shard_bytes=10**9)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close({})
    return folder


def test_one_bit_of_any_tensor_is_noticed(hashed, tensors):
    file = hashed / "model.safetensors"
    good = file.read_bytes()
    for name, place in read_header(file).items():
        for at in (place.start, place.start + place.entry.nbytes - 1):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            checkpoint = HFCheckpoint.open(hashed)
            for other in tensors.keys() - {name}:
                assert torch.equal(checkpoint.tensor(other), tensors[other])
            with pytest.raises(CheckpointError, match=rf"{name} is damaged or was changed"):
                checkpoint.tensor(name)
            (hashed / "manifest.json").rename(hashed / "aside")
            assert not torch.equal(HFCheckpoint.open(hashed).tensor(name), tensors[name])
            (hashed / "aside").rename(hashed / "manifest.json")


@pytest.mark.parametrize(
    "edit",
    [
        lambda listed, name: listed.pop(name),
        lambda listed, name: listed.update(extra=listed[name]),
        lambda listed, name: listed[name].update(dtype="F64"),
        lambda listed, name: listed[name].update(shape=[D * D]),
        lambda listed, name: listed[name].update(sha256=None),
        lambda listed, name: listed[name].update(sha256="0" * 64),
        lambda listed, name: listed[name].update(sha256=""),
        lambda listed, name: listed[name].pop("sha256"),
    ],
)
def test_a_manifest_of_other_tensors_is_refused(hashed, edit):
    name = "model.norm.weight"
    manifest = json.loads((hashed / "manifest.json").read_text())
    edit(manifest["tensors"], name)
    (hashed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        HFCheckpoint.open(hashed).tensor(name)
