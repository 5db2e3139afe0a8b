"""Test that the shards equal those of safetensors and transformers byte for byte."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.hf_writer import HFWriter, TensorEntry
from kha_megatron.checkpoint.safetensors_file import DTYPES

SOURCE = {
    "format": "torch_dist",
    "path": "iter_0000007",
    "iteration": 7,
    "sha256": "0" * 64,
}


def _entries(tensors):
    return [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def _write(folder, tensors, max_shard_bytes=10**9, threads=1):
    writer = HFWriter(folder, _entries(tensors), max_shard_bytes=max_shard_bytes)
    with ThreadPoolExecutor(threads) as pool:
        names = list(reversed(tensors))
        backwards = [tensors[name] for name in names]
        list(pool.map(writer.write, names, backwards))
        return writer.close(SOURCE)


def _bytes(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def every_dtype():
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, dtype in DTYPES.items():
        for part in ("b", "a"):
            values = torch.randint(0, 2, (3, 5), generator=generator)
            tensors[f"{part}.{name}"] = values.to(dtype)
        tensors[f"empty.{name}"] = torch.empty(0, 4, dtype=dtype)
    return tensors | {"scalar": torch.tensor(2.5), "name with ü and \\": torch.zeros(7)}


@pytest.mark.fast
def test_a_file_equals_that_of_save_file(tmp_path, every_dtype):
    assert _write(tmp_path, every_dtype, threads=3) == 1
    save_file(every_dtype, tmp_path / "reference", metadata={"format": "pt"})
    written = tmp_path / "model.safetensors"
    reference = tmp_path / "reference"
    assert written.read_bytes() == reference.read_bytes()
    with safe_open(written, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("limit", [1, 700, 10**9])
def test_shards_and_index_equal_those_of_save_pretrained(tmp_path, limit):
    from transformers.core_model_loading import dot_natural_key

    from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

    config = KHAModelConfig(
        vocab_size=11,
        hidden_size=10,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        kha_value="mlp",
    )
    model = KHAForCausalLM(config)
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size=limit)
    ours = tmp_path / "ours"
    ours.mkdir()
    state = model.state_dict()
    in_their_order = {name: state[name] for name in sorted(state, key=dot_natural_key)}
    _write(ours, in_their_order, limit, threads=2)
    names = sorted(file.name for file in theirs.glob("model[.-]*"))
    assert sorted(file.name for file in ours.iterdir()) == ["manifest.json", *names]
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    shutil.copy(theirs / "config.json", ours)
    loaded = KHAForCausalLM.from_pretrained(ours).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.fast
def test_the_manifest_lists_every_tensor(tmp_path, every_dtype):
    wide = torch.arange(48.0).view(2, 3, 4, 2)
    tensors = every_dtype | {
        "transposed": wide.transpose(0, -1),
        "every second": wide[..., 1],
        "expanded": wide[:, :1].expand(2, 3, 4, 2),
        "slice": wide[1:],
        "parameter": torch.nn.Parameter(wide[0, 0].T),
    }
    _write(tmp_path, tensors, 100)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["source"] == SOURCE
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {name: entry["file"] for name, entry in manifest["tensors"].items()}
    assert files == index["weight_map"]
    for name, tensor in tensors.items():
        entry = manifest["tensors"][name]
        assert entry["sha256"] == hashlib.sha256(_bytes(tensor)).hexdigest()
        assert DTYPES[entry["dtype"]] == tensor.dtype
        assert entry["shape"] == list(tensor.shape)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = HFCheckpoint.open(tmp_path)
    for name, tensor in tensors.items():
        assert checkpoint.keys()[name] == (name, tensor.dtype, tuple(tensor.shape))
        assert _bytes(checkpoint.tensor(name)) == _bytes(tensor)
