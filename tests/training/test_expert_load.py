"""The RMS update of expert biases through the entry point, and the loads that it logs."""

import pytest
import torch

from tests.training.conftest import EXPERTS, LAYERS, MODEL, TRAINING, start

BALANCED = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
        if tag.startswith("expert-load/")
    }


def test_loads_of_every_layer_are_logged(tmp_path):
    """Two pipeline stages with experts over two ranks; the writer is on the last stage only."""
    words = ["--device", "cpu", "--mock-data", "--vocab-size", "90", "--kha-preset", "kha_mlp"]
    words += ["--pipeline-model-parallel-size", "2", "--tensorboard-dir", str(tmp_path / "tb")]
    words += ["--save", str(tmp_path / "save"), "--train-iters", "4"]
    words += ["--moe-router-bias-update-rms", "--moe-router-bias-update-rate", "0.01"]
    experts = [*EXPERTS, "--expert-model-parallel-size", "1"]
    run = start([*MODEL, *TRAINING, *experts, *BALANCED, *words], ranks=2)
    assert run.codes == [0, 0], run.output[-3000:]
    logged = scalars(tmp_path / "tb")
    names = {f"expert-load/{n}-layer-{i}" for i in range(1, LAYERS + 1) for n in ("violation",)}
    assert names <= set(logged)
    for values in logged.values():
        assert list(values) == [1, 2, 3, 4]
    mean = [sum(logged[name][step] for name in names) / LAYERS for step in (1, 2, 3, 4)]
    assert list(logged["expert-load/violation"].values()) == pytest.approx(mean, rel=1e-6)
    # RMS steps of 0.01: the biases' range grows by more than one step, and by no whole number of
    # them, as the sign form's would
    spread = torch.tensor([logged[f"expert-load/bias-range-layer-{i}"][1] for i in (1, 2, 3, 4)])
    assert (spread > 0.01).all()
    assert ((spread / 0.01 - (spread / 0.01).round()).abs() > 1e-3).any()


def test_an_update_without_a_bias_is_refused():
    words = ["--device", "cpu", "--mock-data", "--kha-preset", "kha_mlp"]
    run = start([*MODEL, *TRAINING, *EXPERTS, *words, "--moe-router-bias-update-rms"])
    assert run.codes == [2]
    assert "add --moe-router-enable-expert-bias" in run.errors[0]
