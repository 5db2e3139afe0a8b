"""Test resuming runs with Megatron's output gate."""

from dataclasses import replace

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.model.recorded import kha_of
from tests.training.conftest import MODEL, TRAINING, losses, start
from tests.training.test_stock_script import STOCK

pytestmark = pytest.mark.whole

KHA = KHAConfig(value="mlp", gate=Gate(output="element"))


def test_a_run_resumes_with_the_other_flag_of_its_gate(tmp_path):
    words = [*MODEL, *TRAINING, "--mock-data", "--vocab-size", "64", "--device", "cpu"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    first = start(
        [
            *(*words, "--kha-preset", "kha_mlp_gate_output", "--tensorboard-dir", str(whole)),
            *("--save", str(whole), "--save-interval", "4"),
        ]
    )
    load = ["--load", str(whole), "--ckpt-step", "4"]
    flagged = ["--kha-preset", "kha_mlp", "--attention-output-gate"]
    then = start([*words, *flagged, *load, "--tensorboard-dir", str(rest)])
    for run in (first, then):
        assert run.codes == [0], run.output[-2000:]
        assert run.knocks.startswith("knocks value=mlp gate(output=element) in 4 of 4 layers")
    expected = losses(whole)
    assert losses(rest) == {i: expected[i] for i in (5, 6, 7, 8)}

    saved = MegatronCheckpoint.open(whole / "iter_0000008")
    assert kha_of(saved) == KHA
    assert saved.args["attention_output_gate"] is True
    assert saved.args["kha_gate"]["output"] == "element"


def test_a_stock_gated_checkpoint_resumes_in_our_entry_point(tmp_path):
    words = [*MODEL, *TRAINING, "--mock-data", "--vocab-size", "64"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    first = start(
        [
            *(*words, "--tokenizer-type", "NullTokenizer", "--attention-output-gate"),
            *("--tensorboard-dir", str(whole), "--save", str(whole), "--save-interval", "4"),
        ],
        program=STOCK,
    )
    assert first.codes == [0], first.output[-2000:]
    assert kha_of(MegatronCheckpoint.open(whole)) == replace(KHA, value=None)
    then = start(
        [
            *(*words, "--device", "cpu", "--kha-preset", "gate_output"),
            *("--load", str(whole), "--ckpt-step", "4", "--tensorboard-dir", str(rest)),
        ]
    )
    assert then.codes == [0], then.output[-2000:]
    expected = losses(whole)
    # our attention is torch's own on a CPU, which adds up in another order
    assert losses(rest) == pytest.approx({i: expected[i] for i in (5, 6, 7, 8)}, rel=1e-5)
