"""``tools/bench.py cpu``: the plain loop trains what Megatron trains; how times become ratios."""

import pytest

from kha_megatron.errors import KHAError
from tests.entry import run
from tests.tools.conftest import TOOLS
from tests.training.conftest import EXPERTS, MODEL, TRAINING

STEPS = 8


def test_the_plain_loop_trains_what_megatron_trains(tool, tmp_path):
    """Knocked heads, experts whose bias moves, clipping, weight decay: the same losses."""
    words = [*MODEL, *TRAINING, *EXPERTS, "--expert-model-parallel-size", "1"]
    words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    words += ["--moe-router-bias-update-rate", "0.01", "--moe-router-dtype", "fp32"]
    words += ["--micro-batch-size", "6", "--lr-decay-style", "constant", "--weight-decay", "0.3"]
    words += ["--mock-data", "--vocab-size", "300", "--device", "cpu", "--kha-preset", "kha_mlp"]
    folder = tmp_path / "recorded"
    program = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
sys.argv += ["--record", {str(folder)!r}]
import timed_training
timed_training.main()
"""
    ended = run(words, program=program)
    assert ended.codes == [0], ended.output
    losses = tool("bench_cpu")._figures(ended.output.splitlines(), "step-loss")
    plain = [loss for loss, *_ in tool("plain_training").train(folder)]
    assert len(plain) == len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1, "it learns, so that a wrong step would show"
    # float32 sums in another order; a token between two experts may take the other
    assert plain == pytest.approx(losses, abs=2e-4)


def test_ratios_are_of_a_turn(tool):
    bench = tool("bench_cpu")
    times = {"plain/1": [1.0, 2.0], "mlp/1": [1.2, 2.2], "baseline/1": [1.0, 2.0]}
    result = bench.compared(times | {"launch": [9.0, 9.0]}, 4096)
    assert result["over_plain"]["mlp/1"].high == pytest.approx(1.175)
    assert result["targets"]["mlp/1"] == {"met": True, "decided": True}
    assert result["tokens_per_second"]["plain/1"].median == pytest.approx(3072)
    assert result["knocked_over"]["baseline/1"].median == pytest.approx(1.15)
    table = bench.rows(result)
    assert [row[0] for row in table] == ["plain/1", "mlp/1", "baseline/1", "launch"]
    assert all(len(row) == len(bench.HEADER) for row in table)


def test_a_loop_that_trains_something_else_is_refused(tool, monkeypatch, tmp_path):
    bench, plain = tool("bench_cpu"), tool("plain_training")
    monkeypatch.setattr(plain, "train", lambda folder, steps: [(5.0, 0, 0), (4.9, 0, 0)])
    bench.check_plain([5.0, 4.901], tmp_path)
    with pytest.raises(KHAError, match=r"step 2: the plain loop's loss is 4\.90000"):
        bench.check_plain([5.0, 4.8], tmp_path)
