"""Test that our reader loads what we write. ``tests.conversion`` loads the same with Megatron."""

import json
from argparse import Namespace

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter

COMMON = {
    "args": Namespace(num_layers=3),
    "iteration": 7,
    "checkpoint_version": 3.0,
}
SOURCE = {
    "format": "huggingface",
    "path": "model",
    "iteration": None,
    "sha256": "0" * 64,
}


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


@pytest.mark.fast
@pytest.mark.parametrize(("name", "tensor"), _tensors())
def test_round_trip_of_any_tensor(tmp_path, name, tensor):
    with TorchDistWriter(tmp_path) as writer:
        writer.write(name, tensor, shape=tensor.shape, offsets=(0,) * tensor.dim())
        writer.close(COMMON, SOURCE)
    checkpoint = MegatronCheckpoint.open(tmp_path)
    identity = checkpoint.identity()
    assert checkpoint.iteration == 7
    assert checkpoint.args == {"num_layers": 3}
    assert identity["format"] == "torch_dist"
    assert identity["iteration"] == 7
    assert len(identity["sha256"]) == 64
    back = checkpoint.tensor(name)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), _bytes(tensor))
    # a slice must not take the rest of its storage along
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < tensor.nbytes + 4000
    assert json.loads((tmp_path / "converted_from.json").read_text()) == {"source": SOURCE}


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
