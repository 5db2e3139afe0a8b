"""Test the reader of Megatron checkpoints against the parameters of the ranks."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from tests.conversion.checkpoints import ITERATION

PROJ = "self_attention.linear_proj.weight"
ITER = f"iter_{ITERATION:07d}"


def test_tensors_of_tensor_parallel_ranks_are_assembled(dense):
    folder, parameters = dense
    checkpoint = MegatronCheckpoint.open(folder)
    for layer, weight in zip(range(3), checkpoint.layer_tensors(PROJ), strict=True):
        name = f"decoder.layers.{layer}.{PROJ}"
        whole = np.concatenate([rank[name] for rank in parameters], axis=1)
        assert torch.equal(weight, torch.from_numpy(whole))
        assert torch.equal(checkpoint.tensor(f"decoder.layers.{PROJ}")[layer], torch.tensor(whole))
    words = "embedding.word_embeddings.weight"
    whole = np.concatenate([rank[words] for rank in parameters])
    assert torch.equal(checkpoint.tensor(words), torch.from_numpy(whole))


@pytest.mark.parametrize("layers", ["stacked", "separate"])
def test_knock_weights_are_read_without_megatron(dense, sparse, monkeypatch, layers):
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    folder, (parameters, _) = dense if layers == "stacked" else sparse
    weights = read_knock_weights(MegatronCheckpoint.open(folder))
    assert set(weights) == {(i, p) for i in range(3) for p in ("query", "key", "value")}
    for (layer, projection), weight in weights.items():
        name = f"decoder.layers.{layer}.self_attention.knock_{projection}.weight"
        assert torch.equal(weight, torch.from_numpy(parameters[name]))


def test_objects_are_read_by_several_threads(dense):
    checkpoints = [MegatronCheckpoint.open(dense[0]) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda checkpoint: repr(checkpoint.args), checkpoints))) == 1


def test_kha_of_checkpoints_without_kha_arguments(dense):
    checkpoint = MegatronCheckpoint.open(dense[0])
    tensors = checkpoint._folder.tensors
    for projection in ("query", "key"):
        del tensors[f"decoder.layers.self_attention.knock_{projection}.weight"]
    checkpoint.__dict__["args"] = {"spec": ["kha_megatron.mcore.specs", "kha_mlp"]}
    assert read_kha_config(checkpoint) == HeadsConfig.from_preset("kha_mlp")
    del tensors["decoder.layers.self_attention.knock_value.weight"]
    checkpoint.__dict__["args"] = {"spec": None}
    assert read_kha_config(checkpoint) is None
    with pytest.raises(CheckpointError, match="No KHA matrices found"):
        read_knock_weights(checkpoint)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"kha_query": "linear", "kha_key": None, "kha_value": "mlp"},
            r"tensor .*knock_key.weight .*query=linear value=mlp",
        ),
        ({"spec": ["other.module", "kha_mlp"]}, "tensor .*knock_key.* .nothing."),
    ],
)
def test_a_record_that_contradicts_the_tensors_is_refused(dense, args, message):
    checkpoint = MegatronCheckpoint.open(dense[0])
    checkpoint.__dict__["args"] = args
    with pytest.raises(CheckpointError, match=message):
        read_knock_weights(checkpoint)
