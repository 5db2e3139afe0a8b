"""Mixture-of-head attention through the entry point, as a user types it."""

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.model.recorded import kha_of
from tests.training.comparison import assert_same_bytes
from tests.training.conftest import LAYERS, MODEL, TRAINING, losses, start
from tests.training.test_instruments import scalars

HEADS = ["--heads", "moh.shared=1", "moh.active=2", "moh.anneal=3"]
KHA = KHAConfig(moh=MixtureOfHeads(shared=1, active=2, anneal=3))
ROUTER = (8 + 2) * 40 * LAYERS


def test_a_resumed_run_is_the_same_bit_for_bit_while_heads_are_turned_off(corpus, tmp_path):
    """Between iterations 2 and 3 of 4, when a token has 5 of the 8 heads that it began with.

    Two tensor-parallel ranks with sequence parallelism, stopped and going on with what the
    checkpoint records.
    """
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--train-iters", "4"]
    words += ["--kha-log-interval", "1"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--save-interval", "2"]
    recorded = ["--load", str(tmp_path / "half"), "--use-checkpoint-args"]

    def folders(name):
        return ["--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}-tb")]

    whole = start([*words, *HEADS, *folders("whole")], 2)
    half = start([*words, *HEADS, *folders("half"), "--exit-interval", "2"], 2)
    rest = start([*words, *recorded, *folders("rest")], 2)
    for run in (whole, half, rest):
        assert run.codes == [0, 0], run.output[-4000:]
        said = f"{KHA} in 4 of 4 layers: {ROUTER:,} parameters added"
        assert run.knocks == f"knocks {said}"
    expected = losses(tmp_path / "whole-tb")
    assert sorted(expected) == [1, 2, 3, 4]
    assert expected[4] < expected[1]
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in (3, 4)}
    for name, iterations in (("whole", (1, 2, 3, 4)), ("rest", (3, 4))):
        written = scalars(tmp_path / f"{name}-tb")
        for layer in range(LAYERS):
            load = [written[f"kha-moh-load/head-{head}/layer-{layer}"] for head in range(8)]
            assert load[0] == dict.fromkeys(iterations, 1.0)  # the shared head
            for step in iterations:
                assert sum(of[step] for of in load) == pytest.approx((8, 7, 5, 3)[step - 1], 1e-6)
            for figure in ("kha-moh-balance-loss", "kha-moh-entropy"):
                assert sorted(written[f"{figure}/layer-{layer}"]) == list(iterations)
    for name, iteration in (("half", 2), ("rest", 4)):
        folder = f"iter_{iteration:07d}"
        assert_same_bytes(tmp_path / "whole" / folder, tmp_path / name / folder)
        assert kha_of(MegatronCheckpoint.open(tmp_path / name / folder)) == KHA

    another = ["--load", str(tmp_path / "half"), "--heads", "moh.share=0.75"]
    other = start([*words, *another, *folders("other")], 2)
    assert other.codes == [2, 2]
    assert f"was trained with KHA on {KHA}" in other.errors[0]
