"""Test that Megatron and our reader load the checkpoints that we write without Megatron."""

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.model.recorded import kha_of
from tests.conversion.checkpoints import ITERATION
from tests.conversion.fixtures import KHA

COMMON = {"args": Namespace(num_layers=3), "iteration": ITERATION, "checkpoint_version": 3.0}
SOURCE = {"format": "huggingface", "path": "model", "iteration": None, "sha256": "0" * 64}


def _rewrite(save, folder, threads=1):
    """Copy the model of a checkpoint, chunk by chunk."""
    original = MegatronCheckpoint.open(save)
    stored = original._folder
    folder.mkdir()
    writer = TorchDistWriter(folder)

    def write(item):
        key, chunk = item
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        shape = stored.tensors[key].shape
        writer.write(key, stored.read(key)[box], shape=shape, offsets=chunk.offsets)

    chunks = [(key, c) for key in original.keys() for c in stored.tensors[key].chunks]  # noqa: SIM118
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, chunks))
    for name in (name for name in stored.objects if "_extra_state" in name):
        key, _, place = name.rpartition("/shard_")
        offsets, shape = (tuple(map(int, part.split("."))) for part in place.split("_"))
        writer.write_object(key, None, shape=shape, offsets=offsets)
    args = {k: v for k, v in original.args.items() if not isinstance(v, Record)}
    writer.close(COMMON | {"args": Namespace(**args)}, SOURCE)
    return original


def load_both(original, copy, kha, layout, config):
    """Load both with Megatron. Return the keys that differ, and the number of loaded tensors."""
    from megatron.core import dist_checkpointing, parallel_state

    from tests.distributed import models

    models.initialize(**layout)
    model = models.gpt_model(
        models.transformer_config(**layout, **config),
        kha,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )

    def load(folder, **how):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, folder, **how)
        tensors = {k: v for k, v in loaded["model"].items() if isinstance(v, torch.Tensor)}
        return {key: tensor.clone() for key, tensor in tensors.items()}, loaded

    theirs, _ = load(original)
    ours, loaded = load(copy, strict="raise_all", verify_integrity=True)
    assert (loaded["iteration"], loaded["checkpoint_version"]) == (ITERATION, 3.0)
    assert loaded["args"].num_layers == config["num_layers"]
    assert theirs.keys() == ours.keys()
    held = sum(not bool((tensor == 9).all()) for tensor in theirs.values())
    return [key for key in theirs if not torch.equal(theirs[key], ours[key])], held


@pytest.fixture(scope="module")
def four(ranks, tmp_path_factory):
    """A model of four layers, for two stages, and its copy."""
    from tests.conversion.checkpoints import save_gpt

    folder = tmp_path_factory.mktemp("four")
    layout = {"tensor_model_parallel_size": 2}
    ranks(save_gpt, 2, str(folder / "save"), KHA, layout, {"num_layers": 4}, {"spec": None})
    _rewrite(folder / "save", folder / "copy", threads=3)
    return folder / "save" / f"iter_{ITERATION:07d}", folder / "copy"


def test_megatron_loads_the_copy_under_another_layout(ranks, four):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    for different, held in ranks(load_both, 4, *map(str, four), KHA, sizes, {"num_layers": 4}):
        assert different == []
        assert held > 20


def test_identity_and_converted_from(four):
    checkpoint = MegatronCheckpoint.open(four[1])
    assert (checkpoint.iteration, kha_of(checkpoint)) == (ITERATION, KHA)
    identity = checkpoint.identity()
    assert identity["format"] == "torch_dist"
    assert (identity["iteration"], len(identity["sha256"])) == (ITERATION, 64)
    manifest = json.loads((four[1] / "converted_from.json").read_text())
    assert manifest["source"] == SOURCE
    assert manifest["tensors"]["embedding.word_embeddings.weight"] == {
        "dtype": "float32",
        "shape": [56, 40],
    }
    assert manifest["tensors"].keys() == checkpoint.keys().keys()


def _tensors():
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(7, 3, 5, generator=generator)
    tensors = {
        "transposed": wide.transpose(0, 2),
        "slice of a larger one": wide[2:4],
        "every second": wide[::2],
        "expanded": wide[:, :1].expand(7, 4, 5),
        "empty": wide[:, :0],
        "empty slice": torch.zeros(4)[2:2],
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(wide[1]),
        **{
            str(dtype): (wide * 3).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
        },
        "uint16": torch.arange(5).to(torch.uint16),
        "fp8": wide.to(torch.float8_e4m3fn),
    }
    return list(tensors.items())


@pytest.mark.parametrize(("name", "tensor"), _tensors())
def test_round_trip_of_any_tensor(tmp_path, name, tensor):
    with TorchDistWriter(tmp_path) as writer:
        writer.write(name, tensor, shape=tensor.shape, offsets=(0,) * tensor.dim())
        writer.close(COMMON, SOURCE)
    back = MegatronCheckpoint.open(tmp_path).tensor(name)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), _bytes(tensor))
    # a slice must not take the rest of its storage along
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < tensor.nbytes + 4000


def _bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_missing_and_mismatched_chunks_are_errors(tmp_path):
    writer = TorchDistWriter(tmp_path)
    tensor = torch.zeros(2, 3)
    writer.write("a", tensor, shape=(4, 3), offsets=(0, 0))
    with pytest.raises(AssertionError, match="a"):
        writer.write("a", tensor.half(), shape=(4, 3), offsets=(2, 0))
    with pytest.raises(AssertionError, match="a: 6 elements of"):
        writer.close(COMMON, SOURCE)
    assert not (tmp_path / "metadata.json").exists()
