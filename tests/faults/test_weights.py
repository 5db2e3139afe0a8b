"""Test that NaN weights are not saved or trained, and that the learning rate can change."""

import functools
import re
import shutil

import pytest

from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from tests.faults.fuzz import replace_value
from tests.faults.jobs import arguments, iteration_folder, resumed, until

KEY = "decoder.layers.0.self_attention.knock_value.weight"


def spoil(what, rank):
    """Spoil a shared matrix before the first step, or a state of Adam before the second."""
    from megatron.training import training

    step = training.train_step

    def spoiled(forward, data, model, optimizer, *rest, **options):
        for name, weight in model[0].named_parameters():
            if what == "weight" and name.endswith("knock_value.weight"):
                weight.data[0, 0, 0] = float("nan")
        for adam in optimizer.chained_optimizers:
            for state in adam.optimizer.state.values():
                if what == "exp_avg":
                    state["exp_avg"][0] = float("nan")
                elif what == "exp_avg_sq":
                    state["exp_avg_sq"][0] = float("inf")
        return step(forward, data, model, optimizer, *rest, **options)

    training.train_step = spoiled


@pytest.mark.parametrize(
    ("what", "words", "error"),
    [
        ("weight", ["--fp16"], r"NaN in 1 of 108 elements of parameter \S+knock_value.weight on "),
        ("weight", [], r"knock_value.weight on ranks 0, 1\. Training stopped before the optimizer"),
        (
            "nothing",
            ["--fp16", "--initial-loss-scale", "4294967296", "--min-loss-scale", "4294967296"],
            r"overflow although the loss scale is at its minimum of 4\.29497e\+09",
        ),
        ("exp_avg", [], r"NaN in .* after iteration 2\. No checkpoint was saved\. Restart from "),
        (
            "exp_avg_sq",
            ["--bf16"],
            r"^error: Inf in 1 of \d+ elements of optimizer state exp_avg_sq on .* after ",
        ),
    ],
)
def test_a_run_stops_instead_of_saving_or_skipping(entry, tmp_path, what, words, error):
    run = entry(
        [*arguments(tmp_path / "save", *until(4)), *words],
        2,
        before=functools.partial(spoil, what),
    )
    assert set(run.codes) == {17}, run.output[-3000:]
    (line,) = set(run.errors)
    assert re.search(error, line), line
    assert {path.name for path in (tmp_path / "save").glob("iter_*")} <= {"iter_0000001"}


def test_a_checkpoint_with_nan_is_not_trained(entry, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "save")
    spoiled = iteration_folder(folder, 2)
    value = MegatronCheckpoint.open(spoiled).tensor(KEY)
    value[0, 2, 3] = float("nan")
    replace_value(spoiled, KEY, value)
    write_hashes(spoiled)
    without_copies = "--no-load-optim"  # the optimizer's copies of the weights are finite
    run = entry(arguments(folder, *until(4), without_copies), 2)
    assert run.errors, run.output[-3000:]
    (line,) = set(run.errors)
    assert re.search(r"NaN in 1 of 108 elements of parameter decoder\.layers\.0\S+ on ranks", line)
    assert f"of the checkpoint in {spoiled}. " in line
    assert line.endswith("Choose one with --ckpt-step.")
    run = entry(arguments(folder, *until(2), "--ckpt-step", "1"), 2)
    assert run.codes == [0, 0], run.output[-3000:]


def test_a_checkpoint_with_inf_in_adams_state_is_not_trained(entry, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "save")
    spoiled = iteration_folder(folder, 2)
    checkpoint = MegatronCheckpoint.open(spoiled)
    key = next(key for key in checkpoint._folder.tensors if key.endswith(".exp_avg_sq"))
    state = checkpoint._folder.read(key)
    state[5] = float("inf")
    replace_value(spoiled, key, state)
    write_hashes(spoiled)
    run = entry(arguments(folder, *until(4)), 2)
    assert run.errors, run.output[-3000:]
    (line,) = set(run.errors)
    assert re.search(r"Inf in 1 of \d+ elements of optimizer state exp_avg_sq on .* of", line)
    assert line.endswith("Choose one with --ckpt-step.")


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "replicated"])
def test_a_run_resumes_with_another_learning_rate(entry, tmp_path, sharded):
    save = tmp_path / "save"

    def train(*more):
        words = [*arguments(save, *more), "--lr-decay-style", "constant"]
        if not sharded:
            words.remove("--use-distributed-optimizer")
        return entry(words, 1)

    def rates(run):
        assert run.codes == [0], run.output[-3000:]
        assert resumed(run.output) == 2
        return {float(rate) for rate in re.findall(r"learning rate: (\S+)", run.output)}

    assert train(*until(2)).codes == [0]
    slower = ["--lr", "5e-3"]
    run = train(*until(4), *slower)
    assert run.errors == [
        f"error: The learning rate is 0.005, but {save} was saved with 0.01. Add "
        "--override-opt-param-scheduler to use the new value, or "
        "--use-checkpoint-opt-param-scheduler to keep the one in the checkpoint."
    ]
    kept = shutil.copytree(save, tmp_path / "kept")
    assert rates(train(*until(4), *slower, "--override-opt-param-scheduler")) == {0.005}
    shutil.rmtree(save)
    kept.rename(save)
    assert rates(train(*until(4), *slower, "--use-checkpoint-opt-param-scheduler")) == {0.01}
