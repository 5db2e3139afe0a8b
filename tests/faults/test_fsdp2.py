"""Test saving and resuming with ``--use-torch-fsdp2`` and the paper's dense recipe.

FSDP2 shards the three matrices of KHA-MLP unevenly over two ranks and leaves some of four ranks
without any, which stock Megatron cannot save.
"""

import shlex

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.heads.knock import MATRICES
from kha_megatron.recipes import get_recipe
from tests.faults.jobs import resumed
from tests.training.test_resume import assert_same_bytes

SMALL = shlex.split("""
--device cpu --num-layers 2 --hidden-size 24 --ffn-hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --kv-channels 8 --seq-length 12 --max-position-embeddings 12 --vocab-size 56
--micro-batch-size 1 --global-batch-size 4 --train-iters 5 --save-interval 2 --log-interval 1
--lr 1e-2 --mock-data --num-workers 0 --no-gradient-accumulation-fusion
--untie-embeddings-and-output-weights --save-retain-interval 2
""")


def words(folder, *more, preset="kha_mlp"):
    more = [*more, "--kha-preset", preset, "--save", str(folder), "--load", str(folder)]
    more += ["--heads", "gate.dense=element", "gate.key=shared"] if preset == "kha_mlp" else []
    return get_recipe("dense-0.6b").run.updated([*SMALL, *more]).words()


@pytest.mark.versions
@pytest.mark.parametrize(
    ("preset", "ranks"),
    [("kha_mlp", 2), pytest.param("kha_linear", 4, marks=pytest.mark.whole)],
)
def test_a_recipe_resumes_and_converts(entry, run, tmp_path, preset, ranks):
    whole = tmp_path / "whole"
    rest = tmp_path / "rest"
    fsdp = words(whole, "--use-torch-fsdp2", "--exit-interval", "4", preset=preset)
    for more, start in ((["--save", whole], 0), (["--save", rest, "--ckpt-step", "2"], 2)):
        trained = entry([*fsdp, *map(str, more)], ranks)
        assert trained.codes == [0] * ranks, trained.output[-4000:]
        assert resumed(trained.output) == start
    assert_same_bytes(whole / "iter_0000004", rest / "iter_0000004", batch=4)
    keys = MegatronCheckpoint.open(rest).keys()
    matrices = len(MATRICES["mlp" if preset == "kha_mlp" else "linear"])
    shapes = [info.shape for key, info in keys.items() if "knock_value" in key]
    assert shapes == [(matrices, 8, 8)] * 2
    code, _, stderr = run("convert", "to-hf", rest, tmp_path / "hf")
    assert code == 0, stderr[-4000:]


@pytest.mark.whole
def test_a_checkpoint_loads_without_fsdp2(entry, tmp_path):
    for more, start in (
        (["--use-torch-fsdp2", "--exit-interval", "2"], 0),
        (["--no-load-optim"], 2),
    ):
        trained = entry(words(tmp_path, *more), 2)
        assert trained.codes == [0, 0], trained.output[-4000:]
        assert resumed(trained.output) == start
