"""Test the reader of Hugging Face directories."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.hf_writer import HFWriter
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights

D = 7
LAYERS = 3
SHARD = "model-0000{}-of-00003.safetensors"
CONFIG = {
    "model_type": "kha",
    "num_hidden_layers": LAYERS,
    "kha_key": "linear",
    "kha_value": "mlp",
}


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
def hashed(tmp_path, tensors):
    folder = tmp_path / "hashed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    entries = [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    writer = HFWriter(folder, entries, max_shard_bytes=10**9)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close({})
    return folder


@pytest.fixture
def sharded(tmp_path, tensors):
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for shard in range(3):
        file = SHARD.format(shard + 1)
        part = dict(list(tensors.items())[shard::3])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("kind", ["hashed", "sharded"])
def test_matrices_are_transposed_and_stacked(request, tensors, kind):
    checkpoint = HFCheckpoint.open(request.getfixturevalue(kind))
    assert list(checkpoint.keys()) == sorted(tensors)
    assert read_kha_config(checkpoint) == HeadsConfig(Knock(key="linear", value="mlp"))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), tensors["model.norm.weight"])
    weights = read_knock_weights(checkpoint)
    assert set(weights) == {(i, p) for i in range(LAYERS) for p in ("key", "value")}
    x = torch.randn(2, D)
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        for row, part in enumerate(("up", "gate", "down")):
            linear = tensors[f"{attention}.v_knock.{part}_proj.weight"]
            assert torch.equal(weights[layer, "value"][row], linear.T)
        linear = tensors[f"{attention}.k_knock.proj.weight"]
        torch.testing.assert_close(
            x @ weights[layer, "key"][0],
            torch.nn.functional.linear(x, linear),
        )


def _map(change):
    def edit(folder):
        file = folder / "model.safetensors.index.json"
        weight_map = json.loads(file.read_text())["weight_map"]
        file.write_text(json.dumps({"weight_map": weight_map | change}))

    return edit


def _write(name, text):
    return lambda folder: (folder / name).write_text(text)


def _truncate(folder):
    file = folder / SHARD.format(1)
    file.write_bytes(file.read_bytes()[:-1])


def _repeat(folder):
    first, second = (folder / SHARD.format(number) for number in (1, 2))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)


def _link(folder):
    shard = folder / SHARD.format(1)
    shard.rename(folder.parent / "outside")
    shard.symlink_to("../outside")


REFUSED = {
    **{
        f"index to {name!r}": (_map({"model.norm.weight": name}), "Invalid weight_map")
        for name in ("../outside.safetensors", "..", "sub/x", 3, "a\0b")
    },
    "no shard": (lambda folder: (folder / SHARD.format(3)).unlink(), "00003.safetensors not found"),
    "deep index": (_write("model.safetensors.index.json", "[" * 99_999), "recursion depth"),
    "deep config": (_write("config.json", '{"a":' * 99_999), "recursion depth"),
    "adapter": (
        _write("adapter_config.json", "{}"),
        r"contains a PEFT adapter \(adapter_config\.json\)",
    ),
    "truncated": (_truncate, r"Could not read .*00001-of-00003\.safetensors"),
    "pickle named safetensors": (
        lambda folder: torch.save({"a": torch.zeros(3)}, folder / SHARD.format(1)),
        r"Could not read .*00001-of-00003\.safetensors",
    ),
    "no tensors": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        r"shards without model\.safetensors\.index\.json",
    ),
    "a tensor in two shards": (_repeat, r"Duplicate tensor \S+ in \S+00001-of-\S+ and \S+00002"),
    "link": (_link, r"is a symbolic link to .*outside"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    "no JSON": (_write("config.json", "{"), "Could not read .* as a JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_open_refuses_damaged_and_hostile_directories(sharded, case):
    spoil, message = REFUSED[case]
    spoil(sharded)
    with pytest.raises(CheckpointError, match=message) as caught:
        HFCheckpoint.open(sharded)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"hf download Some/Model-1 --local-dir Model-1$"):
        HFCheckpoint.open("Some/Model-1")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_hidden_layers": LAYERS + 1}, CheckpointError, "4 KHA matrices.*model.layers.3"),
        ({"num_hidden_layers": LAYERS - 1}, CheckpointError, "4 KHA matrices.*model.layers.2"),
        ({"kha_key": None}, CheckpointError, "3 KHA matrices.*k_knock"),
        ({"kha_key": None, "kha_value": None}, CheckpointError, "No KHA matrices found"),
        ({"kha_value": "swish"}, ConfigError, "got 'swish'"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(hashed, change, error, message):
    (hashed / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(error, match=message):
        read_knock_weights(HFCheckpoint.open(hashed))


@pytest.mark.parametrize(
    "edit",
    [
        lambda listed, name: listed.pop(name),
        lambda listed, name: listed.update(extra=listed[name]),
        lambda listed, name: listed[name].update(dtype="F64"),
        lambda listed, name: listed[name].update(sha256="0" * 64),
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
