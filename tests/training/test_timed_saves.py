"""Checkpoints that are saved by time, and those that are kept."""

import re
from argparse import Namespace

import pytest

from kha_megatron.checkpoint.tracker import TRACKER
from kha_megatron.training.timed_saves import keep_release
from tests.training.conftest import MODEL, TRAINING, start


@pytest.mark.parametrize(("minutes", "saved"), [("1e-4", [1, 2, 3, 4, 5, 6]), ("1000", [4, 6])])
def test_checkpoints_are_saved_by_time_and_only_some_are_kept(minutes, saved, tmp_path):
    words = ["--mock-data", "--vocab-size", "90", "--num-layers", "1", "--train-iters", "6"]
    words += ["--save", str(tmp_path), "--save-interval", "4", "--save-retain-interval", "4"]
    words += ["--save-interval-in-mins", minutes, "--kha-preset", "kha_mlp", "--device", "cpu"]
    run = start([*MODEL, *TRAINING, *words], ranks=1)
    assert run.codes == [0], run.output[-3000:]
    iterations = re.findall(r"successfully saved checkpoint from iteration +(\d+)", run.output)
    assert [int(iteration) for iteration in iterations] == saved
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000004", "iter_0000006"]


@pytest.mark.parametrize(("tracker", "interval"), [("release", None), ("7", 4)])
def test_a_release_checkpoint_is_never_deleted(tracker, interval, tmp_path):
    (tmp_path / TRACKER).write_text(tracker)
    args = Namespace(save=str(tmp_path), save_retain_interval=4)
    keep_release(args)
    assert args.save_retain_interval == interval
