"""Test resuming a run with other flags that describe the same model."""

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.heads import Gate
from kha_megatron.heads.config import HeadsConfig
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
        whole = tmp_path / "whole"
        rest = tmp_path / "rest"
        save = ["--save", str(whole), "--save-interval", "4", "--tensorboard-dir", str(whole)]
        first_run = start([*words, *first, *save], program=program)
        assert first_run.codes == [0], first_run.output[-2000:]
        load = ["--load", str(whole), "--ckpt-step", "4", "--tensorboard-dir", str(rest)]
        second_run = start([*words, *then, *load])
        assert second_run.codes == [0], second_run.output[-2000:]
        all_losses = losses(whole)
        expected = {iteration: all_losses[iteration] for iteration in (5, 6, 7, 8)}
        saved = MegatronCheckpoint.open(whole / "iter_0000008")
        return (first_run, second_run), losses(rest), expected, saved

    return run_twice


WITH_KHA_FOLD = """
from kha_megatron.training import __main__, pretrain

add_current_arguments = pretrain.add_kha_arguments

def add_arguments(parser):
    parser.add_argument("--kha-fold", default="auto")
    return add_current_arguments(parser)

pretrain.add_kha_arguments = add_arguments
__main__.main()
"""
"""The entry point with an argument that was removed. Checkpoints of earlier versions record it."""


def test_a_checkpoint_that_records_kha_fold_resumes(resume):
    linear = [*CPU, "--kha-preset", "kha_linear", "--kha-fold", "always"]
    _, found, expected, saved = resume(
        linear,
        [*CPU, "--use-checkpoint-args"],
        program=WITH_KHA_FOLD,
    )
    assert saved.args["kha_fold"] == "always"
    assert read_kha_config(saved) == HeadsConfig.from_preset("kha_linear")
    assert found == expected


def test_a_stock_gated_checkpoint_resumes_in_our_entry_point(resume):
    flags = ["--tokenizer-type", "NullTokenizer", "--attention-output-gate"]
    _, found, expected, saved = resume(flags, [*CPU, "--kha-preset", "gate_output"], program=STOCK)
    assert read_kha_config(saved) == HeadsConfig(Gate(output="element"))
    # our attention is torch's own on a CPU, which adds up in another order
    assert found == pytest.approx(expected, rel=1e-5)
