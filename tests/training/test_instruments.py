"""``--kha-log-interval`` in whole runs, down to what Megatron's writers got."""

import json
import math
import re

from tests.training.conftest import LAYERS, MODEL, TRAINING, losses, start

PROGRAM = """
import importlib.machinery, json, sys, types
wandb = types.ModuleType("wandb")
wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
wandb.config = {}
wandb.init = wandb.finish = lambda **_: None
wandb.log = lambda values, step: print("wandb", step, json.dumps(values, default=float), flush=True)
sys.modules["wandb"] = wandb
from kha_megatron.training.arguments import choose_device
choose_device(sys.argv)
from kha_megatron.training import pretrain
pretrain.run(0.0)
"""
"""The entry point, with a W&B that prints what it is given."""

HEADS = 8
PLACES = (
    {
        "kha-gate-openness/value",
        "kha-gate-spread/value",
        "kha-gate-score/output",
        "kha-gate-shut/output",
        "kha-attention-sink/mean",
    }
    | {f"kha-attention-sink/head-{head}" for head in range(HEADS)}
    | {f"kha-distance/value-{matrix}" for matrix in ("up", "gate", "down")}
)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
        if name.startswith("kha-")
    }


def test_all_layers_of_all_stages_reach_both_writers_and_training_is_the_same(corpus, tmp_path):
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--kha-preset", "kha_mlp_gate_output"]
    words += ["--pipeline-model-parallel-size", "2"]
    watching = ["--kha-log-interval", "3", "--wandb-project", "knocks", "--wandb-exp-name", "one"]
    watching += ["--wandb-save-dir", str(tmp_path / "wandb")]
    histories = []
    for name, extra in (("plain", []), ("watched", watching)):
        folder = tmp_path / name
        run = start([*words, *extra, "--tensorboard-dir", str(folder)], 2, program=PROGRAM)
        assert run.codes == [0, 0], run.output[-4000:]
        histories.append(losses(folder))
    assert sorted(histories[0]) == list(range(1, 9))
    assert histories[0] == histories[1]
    assert scalars(tmp_path / "plain") == {}

    written = scalars(tmp_path / "watched")
    assert written.keys() == {f"{p}/layer-{n}" for p in PLACES for n in range(LAYERS)}
    assert all(sorted(history) == [3, 6] for history in written.values())
    assert all(math.isfinite(value) for history in written.values() for value in history.values())
    for layer in range(LAYERS):
        history = written[f"kha-distance/value-down/layer-{layer}"]
        assert 0 < history[3] < history[6]

    lines = re.findall(r"^wandb (\d+) (.*kha-.*)$", run.output, re.MULTILINE)
    logged = {int(step): json.loads(values) for step, values in lines}
    assert sorted(logged) == [3, 6]
    for name, history in written.items():
        for step, value in history.items():  # TensorBoard keeps 32 bits
            assert math.isclose(logged[step][name], value, rel_tol=1e-6, abs_tol=1e-12)
