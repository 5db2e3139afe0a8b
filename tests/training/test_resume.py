"""Stopping and going on: bit for bit the same run, and never from another configuration."""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError
from kha_megatron.mcore.checkpoint import MegatronCheckpoint
from kha_megatron.training.resume import check_same_kha
from tests.conversion.checkpoints import save_gpt
from tests.training.conftest import EXPERTS, MODEL, TRAINING, losses, start

KHA = KHAConfig(value="mlp")


def test_resumed_training_is_the_same_bit_for_bit(corpus, tmp_path):
    """Experts with all-gather dispatch, two data-parallel ranks, distributed optimizer, overlap."""
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--kha-preset", "kha_mlp", *EXPERTS]
    words += ["--moe-token-dispatcher-type", "allgather", "--use-distributed-optimizer"]
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]

    def folders(name):
        return ["--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}-tb")]

    whole = start([*words, *folders("whole")], 2)
    half = start([*words, *folders("half"), "--exit-interval", "4"], 2)
    rest = start([*words, *folders("rest"), "--load", str(tmp_path / "half")], 2)
    for run in (whole, half, rest):
        assert run.codes == [0, 0], run.output[-4000:]
        assert run.knocks == "knocks value=mlp in 4 of 4 layers: 432 parameters added"

    expected = losses(tmp_path / "whole-tb")
    assert sorted(expected) == list(range(1, 9))
    assert expected[8] < expected[1] - 0.7
    assert losses(tmp_path / "half-tb") == {i: expected[i] for i in range(1, 5)}
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in range(5, 9)}

    one, two = (MegatronCheckpoint.open(tmp_path / name) for name in ("whole", "rest"))
    assert one.keys() == two.keys()
    assert one.kha == two.kha == KHA
    for key in one.keys():  # noqa: SIM118, it is a method
        assert torch.equal(one.tensor(key), two.tensor(key)), key

    other = [*words, "--load", str(tmp_path / "half"), "--kha-value", "gate"]
    refused = start(other)
    assert refused.codes == [2]
    assert len(refused.errors) == 1
    assert "was trained with KHA on value=mlp" in refused.errors[0]
    assert "asks for value=gate: resume with the same --kha-* arguments" in refused.errors[0]
    assert "Traceback" not in refused.output


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint with KHA-MLP, and one of plain Megatron."""
    folder = tmp_path_factory.mktemp("resume")
    for name, kha in (("kha", KHA), ("plain", None)):
        ranks(save_gpt, 1, str(folder / name), kha, {}, {"num_layers": 2}, {})
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """The checkpoint with KHA, to be damaged."""
    return shutil.copytree(saved / "kha", tmp_path / "save")


def check(folder: Path | None, kha: KHAConfig, **changes) -> None:
    args = {"load": folder, "pretrained_checkpoint": None, "ckpt_step": None}
    check_same_kha(Namespace(**args | {"ckpt_format": "torch_dist"} | changes), kha)


def test_the_same_configuration_is_let_through(saved, tmp_path):
    check(saved / "kha", KHA)
    check(saved / "kha", KHAConfig(value="mlp", init="random"))  # only says how a run starts
    check(saved / "plain", KHAConfig())
    check(None, KHA)
    check(tmp_path, KHA)  # no tracker file: Megatron starts from scratch


def test_another_configuration_is_refused(saved):
    for folder, asked, trained in (
        ("kha", KHAConfig(), "value=mlp"),
        ("kha", KHAConfig(query="linear", value="mlp"), "value=mlp"),
        ("plain", KHA, r"nothing \(baseline\)"),
    ):
        words = f"{folder}.*was trained with KHA on {trained}, and the command line asks for "
        with pytest.raises(CheckpointError, match=words + re.escape(str(asked))):
            check(saved / folder, asked)
    with pytest.raises(CheckpointError, match="was trained with KHA on value=mlp"):
        check(None, KHAConfig(), pretrained_checkpoint=saved / "kha")


def test_an_iteration_that_is_named_is_checked_without_a_tracker_file(copy):
    """Megatron loads it then, so it must not slip through."""
    (copy / "latest_checkpointed_iteration.txt").unlink()
    check(copy, KHA, ckpt_step=7)
    with pytest.raises(CheckpointError, match="was trained with KHA on value=mlp"):
        check(copy, KHAConfig(), ckpt_step=7)
    with pytest.raises(CheckpointError, match="iter_0000008"):
        check(copy, KHA, ckpt_step=8)


def _half_written(iteration: Path) -> None:
    (iteration / "metadata.json").unlink()


def _torn_mark(iteration: Path) -> None:
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"})[:9])


def _corrupt_index(iteration: Path) -> None:
    index = iteration / ".metadata"
    index.write_bytes(index.read_bytes()[:-40])


def _missing_shard(iteration: Path) -> None:
    next(iteration.glob("*.distcp")).unlink()


def _short_shard(iteration: Path) -> None:
    shard = max(iteration.glob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_half_written, "has no metadata.json: the save never completed"),
        (_torn_mark, "metadata.json is damaged: take another checkpoint"),
        (_corrupt_index, r"\.metadata is damaged or hostile .*: take another checkpoint"),
        (_missing_shard, r"\.distcp is missing .*: copy it again"),
        (_short_shard, r"\.distcp is cut short: \d+ bytes of at least \d+: copy it again"),
    ],
)
def test_a_damaged_checkpoint_is_refused(copy, damage, message):
    damage(copy / "iter_0000007")
    with pytest.raises(CheckpointError, match=message) as refusal:
        check(copy, KHA)
    assert "\n" not in str(refusal.value)
