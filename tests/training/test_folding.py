"""Test resuming with another ``--kha-fold``."""

import pytest

from tests.training.conftest import MODEL, TRAINING, losses, start


@pytest.mark.whole
def test_a_run_may_change_between_folding_and_not(tmp_path):
    common = [*MODEL, *TRAINING, "--mock-data", "--vocab-size", "64", "--device", "cpu"]
    common += ["--kha-preset", "kha_linear"]
    direct, folded = tmp_path / "direct", tmp_path / "folded"
    first = start(
        [
            *(*common, "--kha-fold", "never", "--tensorboard-dir", str(direct)),
            *("--save", str(direct), "--save-interval", "4"),
        ]
    )
    then = start(
        [
            *(*common, "--kha-fold", "always", "--tensorboard-dir", str(folded)),
            *("--load", str(direct), "--ckpt-step", "4"),
        ]
    )
    for run in (first, then):
        assert run.codes == [0], run.output[-2000:]
    said = "kha_megatron: KHA-Linear on query, key, value is folded into the QKV weight"
    assert (first.output.count(said), then.output.count(said)) == (0, 1)
    expected = losses(direct)
    assert losses(folded) == pytest.approx({i: expected[i] for i in (5, 6, 7, 8)}, rel=1e-5)
