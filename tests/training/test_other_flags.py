"""Test resuming a run with other flags that describe the same model."""

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.model.recorded import read_kha_config
from tests.training.conftest import MODEL, TRAINING, losses, start
from tests.training.test_stock_script import STOCK

pytestmark = pytest.mark.whole

CPU = ["--device", "cpu"]


@pytest.fixture
def resume(tmp_path):
    """Train eight iterations with the first flags, and the last four again with other flags.

    Return the two runs, the losses of the last four iterations in both, and the checkpoint.
    """

    def run_twice(first, then, program=None):
        words = [*MODEL, *TRAINING, "--mock-data", "--vocab-size", "64"]
        whole, rest = tmp_path / "whole", tmp_path / "rest"
        save = ["--save", str(whole), "--save-interval", "4", "--tensorboard-dir", str(whole)]
        load = ["--load", str(whole), "--ckpt-step", "4", "--tensorboard-dir", str(rest)]
        runs = start([*words, *first, *save], program=program), start([*words, *then, *load])
        for run in runs:
            assert run.codes == [0], run.output[-2000:]
        expected = losses(whole)
        saved = MegatronCheckpoint.open(whole / "iter_0000008")
        return runs, losses(rest), {i: expected[i] for i in (5, 6, 7, 8)}, saved

    return run_twice


def test_folding_may_change(resume):
    linear = [*CPU, "--kha-preset", "kha_linear", "--kha-fold"]
    runs, found, expected, _ = resume([*linear, "never"], [*linear, "always"])
    line = "kha_megatron: KHA-Linear on query, key, value is folded into the QKV weight"
    assert [run.output.count(line) for run in runs] == [0, 1]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_stock_gated_checkpoint_resumes_in_our_entry_point(resume):
    flags = ["--tokenizer-type", "NullTokenizer", "--attention-output-gate"]
    _, found, expected, saved = resume(flags, [*CPU, "--kha-preset", "gate_output"], program=STOCK)
    assert read_kha_config(saved) == KHAConfig(gate=Gate(output="element"))
    # our attention is torch's own on a CPU, which adds up in another order
    assert found == pytest.approx(expected, rel=1e-5)
