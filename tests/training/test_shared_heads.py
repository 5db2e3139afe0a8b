"""Talking and collaborative heads through the entry point: trained, saved, gone on with."""

import shutil

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.heads import CollaborativeHeads, TalkingHeads
from kha_megatron.model.recorded import kha_of
from tests.training.comparison import assert_same_bytes
from tests.training.conftest import MODEL, TRAINING, losses, start

KHA = KHAConfig(
    value="mlp", talking=TalkingHeads(), collaborative=CollaborativeHeads(dim=16, start="ones")
)
HEADS = ["--heads", "talking", "collaborative.dim=16", "collaborative.start=ones"]


def test_resumed_training_is_the_same_bit_for_bit(corpus, tmp_path):
    """On two ranks that share the sequence, with dropout of the weights that heads have mixed."""
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, *HEADS, "knock.value=mlp"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    words += ["--attention-dropout", "0.1", "--train-iters", "4", "--save-interval", "2"]

    def folders(name):
        return ["--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}-tb")]

    whole = start([*words, *folders("whole")], 2)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole" / "iter_0000002", half / "iter_0000002")
    (half / "latest_checkpointed_iteration.txt").write_text("2")
    rest = start([*words, *folders("rest"), "--load", str(half)], 2)
    for run in (whole, rest):
        assert run.codes == [0, 0], run.output[-4000:]
        assert "in 4 of 4 layers" in run.knocks
    expected = losses(tmp_path / "whole-tb")
    assert expected[4] < expected[1] - 0.1
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in (3, 4)}
    assert_same_bytes(tmp_path / "whole" / "iter_0000004", tmp_path / "rest" / "iter_0000004")
    assert kha_of(MegatronCheckpoint.open(tmp_path / "rest")) == KHA

    refused = start([*words, "--load", str(tmp_path / "whole"), "--heads", "talking.pre=false"], 2)
    assert refused.codes == [2, 2]
    assert "asks for" in refused.errors[0]
    assert "talking_pre" in refused.errors[0]


def test_a_sequence_beyond_the_limit_is_refused_before_anything_starts(corpus):
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--heads", "talking.max_tokens=27"]
    refused = start(words)
    assert refused.codes == [2]
    assert "28 tokens, more than talking.max_tokens=27" in refused.errors[0]
    assert "Traceback" not in refused.output
