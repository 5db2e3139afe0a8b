"""Test ``--kha-upcycle``."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from kha_megatron.training.resume import find_start, is_upcycled
from tests.training.conftest import HEAD_DIM, LAYERS, MODEL, TRAINING, losses, start
from tests.training.test_resume import arguments
from tests.training.test_stock_script import STOCK

KHA = HeadsConfig(Knock(value="mlp"))


def test_upcycling_starts_at_the_loss_of_the_model_without_kha(corpus, tmp_path):
    words = [*MODEL, *TRAINING, *corpus]
    plain = tmp_path / "plain"
    run = tmp_path / "run"

    def tensorboard(name):
        return ["--tensorboard-dir", str(tmp_path / name)]

    trained = start([*words, "--save", str(plain), "--exit-interval", "3"], program=STOCK)
    assert trained.codes == [0], trained.output[-4000:]
    base = MegatronCheckpoint.open(plain)
    assert read_kha_config(base) is None
    assert not any("kha" in name for name in (*base.args, *base.keys()))

    stock = start(
        [*words, *tensorboard("stock"), "--pretrained-checkpoint", str(plain)],
        program=STOCK,
    )
    upcycle = ["--device", "cpu", *words, "--kha-preset", "kha_mlp", "--kha-upcycle"]
    upcycle += ["--pretrained-checkpoint", str(plain), "--load", str(run), "--save", str(run)]
    first = start([*upcycle, *tensorboard("first"), "--exit-interval", "3"])
    second = start([*upcycle, *tensorboard("second")])
    for ended in (stock, first, second):
        assert ended.codes == [0], ended.output[-4000:]

    log = f"kha_megatron: Starting a new run with the weights of {base.path}."
    assert first.output.count(log) == 1
    assert second.output.count(log) == 0
    ours = losses(tmp_path / "first")
    expected = losses(tmp_path / "stock")
    # PyTorch's attention on the CPU sums in another order than Megatron's
    assert ours[1] == pytest.approx(expected[1], rel=1e-6)
    assert ours[3] != pytest.approx(expected[3], rel=1e-5)  # the matrices have moved
    assert sorted(losses(tmp_path / "second")) == [4, 5, 6, 7, 8]

    checkpoint = MegatronCheckpoint.open(run)
    assert checkpoint.iteration == 8
    assert read_kha_config(checkpoint) == KHA
    added = [key for key in checkpoint.keys() if "knock" in key]  # noqa: SIM118
    expected_names = set()
    for n in range(LAYERS):
        expected_names.add(f"decoder.layers.{2 * n}.self_attention.knock_value.weight")
    assert set(added) == expected_names
    for weight in read_knock_weights(checkpoint).values():
        for matrix in weight:
            assert not torch.equal(matrix, torch.eye(HEAD_DIM))


def planned(base, run, kha=KHA, **changes):
    args = {"kha_upcycle": True, "pretrained_checkpoint": base, "save": run}
    namespace = arguments(run, **args | changes)
    start = find_start(namespace)
    return Path(start.path) if is_upcycled(start, namespace, kha) else None


def test_a_run_starts_from_the_base_and_resumes_from_itself(saved, tmp_path):
    run = tmp_path / "run"
    for name in ("plain", "baseline"):
        assert planned(saved / name, run) == saved / name / "iter_0000007"
        assert planned(saved / name, None) == saved / name / "iter_0000007"  # nothing is saved
    assert planned(saved / "plain", run, kha_upcycle=False) is None
    shutil.copytree(saved / "kha", run)
    assert planned(saved / "plain", run) is None
    # the first save was killed: nothing is lost by starting from the base again
    (run / "latest_checkpointed_iteration.txt").unlink()
    (run / "iter_0000007" / "metadata.json").unlink()
    assert planned(saved / "plain", run) == saved / "plain" / "iter_0000007"


def test_upcycling_that_a_restart_would_repeat_is_refused(saved, tmp_path):
    base = saved / "plain"
    run = tmp_path / "run"
    cases = [
        ({"pretrained_checkpoint": None}, ConfigError, "requires --pretrained-checkpoint"),
        ({"load": None}, ConfigError, f"same directory for --load and --save. Got {base}, None"),
        ({"pretrained_checkpoint": saved / "kha"}, CheckpointError, "Remove --kha-upcycle"),
        ({"pretrained_checkpoint": tmp_path}, CheckpointError, "has no latest_checkpointed"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            planned(base, run, **changes)
