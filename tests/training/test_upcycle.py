"""``--kha-upcycle``: from a checkpoint without KHA to a run with it, once."""

import re
import shutil

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.model.recorded import kha_of, knock_weights
from kha_megatron.training.resume import checkpoint_to_upcycle
from tests.conversion.checkpoints import save_gpt
from tests.training.conftest import HEAD_DIM, MODEL, TRAINING, losses, start
from tests.training.test_resume import arguments

KHA = KHAConfig(value="mlp")

PLAIN_MEGATRON = """
import sys
from kha_megatron.mcore import cpu
cpu.install(quiet=True)
for name, value in cpu.MEGATRON_FLAGS.items():
    sys.argv += [name] if value is None else [name, value]
from kha_megatron.mcore import compat
compat.use_shipped_dataset_helpers()
compat.use_forked_checkpoint_writers()
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from kha_megatron.training.pretrain import _build_datasets, _forward_step
args = parse_and_validate_args()
config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
pretrain(config, _build_datasets, ModelType.encoder_or_decoder, _forward_step)
"""
"""Megatron's own model and arguments; only the data and the loss are ours."""


def test_upcycling_starts_at_the_loss_of_the_model_without_kha(corpus, tmp_path):
    words = [*MODEL, *TRAINING, *corpus]
    plain, run = tmp_path / "plain", tmp_path / "run"

    def tensorboard(name):
        return ["--tensorboard-dir", str(tmp_path / name)]

    trained = start([*words, "--save", str(plain), "--exit-interval", "3"], program=PLAIN_MEGATRON)
    assert trained.codes == [0], trained.output[-4000:]
    base = MegatronCheckpoint.open(plain)
    assert kha_of(base) is None
    assert not any("kha" in name for name in (*base.args, *base.keys()))

    stock = start(
        [*words, *tensorboard("stock"), "--pretrained-checkpoint", str(plain)],
        program=PLAIN_MEGATRON,
    )
    # the scheduler starts the very same command line twice
    upcycle = ["--device", "cpu", *words, "--kha-preset", "kha_mlp", "--kha-upcycle"]
    upcycle += ["--pretrained-checkpoint", str(plain), "--load", str(run), "--save", str(run)]
    first = start([*upcycle, *tensorboard("first"), "--exit-interval", "3"])
    second = start([*upcycle, *tensorboard("second")])
    for ended in (stock, first, second):
        assert ended.codes == [0], ended.output[-4000:]

    said = f"kha_megatron: a new run with the weights of {base.path}; the shared matrices start"
    assert [ended.output.count(said) for ended in (first, second)] == [1, 0]
    assert sorted(losses(tmp_path / "first")) == [1, 2, 3]
    _begins_alike_and_goes_its_own_way(tmp_path, "first", 3)  # when the matrices have moved
    assert sorted(losses(tmp_path / "second")) == [4, 5, 6, 7, 8]

    checkpoint = MegatronCheckpoint.open(run)
    assert checkpoint.iteration == 8
    assert kha_of(checkpoint) == KHA
    assert checkpoint.keys().keys() - base.keys().keys() == {
        "decoder.layers.self_attention.knock_value.weight"
    }
    for weight in knock_weights(checkpoint).values():
        assert not any(torch.equal(matrix, torch.eye(HEAD_DIM)) for matrix in weight)


def _begins_alike_and_goes_its_own_way(folder, name, iteration):
    """Models alone are the same bit for bit (``tests/mcore``); here our attention is torch's own
    on a CPU, which adds up in another order than Megatron's."""
    ours, stock = losses(folder / name), losses(folder / "stock")
    assert ours[1] == pytest.approx(stock[1], rel=1e-6)
    assert ours[iteration] != pytest.approx(stock[iteration], rel=1e-5)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Checkpoints of plain Megatron, of the baseline preset and of KHA-MLP."""
    folder = tmp_path_factory.mktemp("upcycle")
    for name, kha in (("plain", None), ("baseline", KHAConfig()), ("kha", KHA)):
        ranks(save_gpt, 1, str(folder / name), kha, {}, {"num_layers": 2}, {})
    return folder


def planned(base, run, kha=KHA, **changes):
    args = {
        "kha_upcycle": True,
        "pretrained_checkpoint": base,
        "save": run,
        "finetune": False,
        "moe_use_upcycling": False,
    }
    return checkpoint_to_upcycle(arguments(run, **args | changes), kha)


def test_a_run_starts_from_the_base_and_goes_on_from_itself(saved, tmp_path):
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


def test_what_a_restart_would_not_survive_is_refused(saved, tmp_path):
    base, run = saved / "plain", tmp_path / "run"
    cases = [
        ({"pretrained_checkpoint": None}, ConfigError, "starts from --pretrained-checkpoint"),
        ({"load": None}, ConfigError, f"add --load {run}"),
        ({"finetune": True}, ConfigError, "remove --finetune"),
        ({"pretrained_checkpoint": saved / "kha"}, CheckpointError, "remove --kha-upcycle"),
        ({"pretrained_checkpoint": tmp_path}, CheckpointError, "holds no latest_checkpointed"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)) as refusal:
            planned(base, run, **changes)
        assert "\n" not in str(refusal.value)
