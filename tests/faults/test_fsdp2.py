"""Test saving and resuming with ``--use-torch-fsdp2`` and the paper's dense recipe.

FSDP2 shards the three matrices of KHA-MLP unevenly over two ranks and leaves some of four ranks
without any, which stock Megatron cannot save.
"""

import shlex

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.heads.knock import MATRICES
from kha_megatron.recipes import get_recipe
from tests.faults.jobs import resumed

SMALL = shlex.split("""
--device cpu --num-layers 2 --hidden-size 24 --ffn-hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --kv-channels 8 --seq-length 12 --max-position-embeddings 12 --vocab-size 56
--global-batch-size 4 --train-iters 5 --save-interval 2 --log-interval 1 --lr 1e-2 --mock-data
--num-workers 0 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights
""")


def words(folder, *more, preset="kha_mlp"):
    more = [*more, "--kha-preset", preset, "--save", str(folder), "--load", str(folder)]
    more += ["--heads", "gate.dense=element", "gate.key=shared"] if preset == "kha_mlp" else []
    return get_recipe("dense-0.6b").run.updated([*SMALL, *more]).words()


@pytest.mark.whole
@pytest.mark.parametrize(("preset", "ranks"), [("kha_mlp", 2), ("kha_linear", 4)])
def test_a_recipe_resumes(entry, tmp_path, preset, ranks):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder, stop, start in ((stopped, "2", 0), (stopped, "4", 2), (whole, "4", 0)):
        more = ["--use-torch-fsdp2", "--exit-interval", stop]
        run = entry(words(folder, *more, preset=preset), ranks)
        assert run.codes == [0] * ranks, run.output[-4000:]
        assert resumed(run.output) == start
    one, two = (MegatronCheckpoint.open(folder) for folder in (stopped, whole))
    keys = one.keys()
    assert keys.keys() == two.keys().keys()
    matrices = len(MATRICES["mlp" if preset == "kha_mlp" else "linear"])
    shapes = {key: info.shape for key, info in keys.items() if "knock_value" in key}
    assert set(shapes.values()) == {(2, matrices, 8, 8)}
    for key in keys:
        assert torch.equal(one.tensor(key), two.tensor(key)), key
    plain = entry(words(stopped, "--no-load-optim", preset=preset), 2)
    assert plain.codes == [0, 0], plain.output[-4000:]
    assert resumed(plain.output) == 4
