"""Stopping and going on: bit for bit the same run, and never from another configuration."""

import json
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.tracker import TRACKER, judge
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.mcore import compat
from kha_megatron.model.recorded import kha_of
from kha_megatron.training import resume
from kha_megatron.training.arguments import add_model_arguments
from kha_megatron.training.resume import check_same_kha, check_saving, restored_kha
from tests.conversion.checkpoints import save_gpt
from tests.training.comparison import assert_same_bytes
from tests.training.conftest import EXPERTS, MODEL, TRAINING, losses, start

KHA = KHAConfig(value="mlp")


ASYNC = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]


def test_resumed_training_is_the_same_bit_for_bit(corpus, tmp_path):
    """Experts with all-gather dispatch, two data-parallel ranks, distributed optimizer, overlap.

    The interrupted run saves asynchronously, while the next iteration changes what is being saved,
    and goes on with the KHA settings that its checkpoint records.
    """
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, *EXPERTS, "--save-interval", "2"]
    words += ["--moe-token-dispatcher-type", "allgather", "--use-distributed-optimizer"]
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    # the default format fills the gaps between parameters with uninitialised memory
    words += ["--dist-ckpt-optim-fully-reshardable"]
    preset = ["--kha-preset", "kha_mlp"]
    recorded = ["--load", str(tmp_path / "half"), "--use-checkpoint-args"]

    def folders(name):
        return ["--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}-tb")]

    whole = start([*words, *preset, *folders("whole")], 2)
    half = start([*words, *preset, *folders("half"), "--exit-interval", "4", *ASYNC], 2)
    rest = start([*words, *recorded, *folders("rest")], 2)
    for run in (whole, half, rest):
        assert run.codes == [0, 0], run.output[-4000:]
        assert run.knocks == "knocks value=mlp in 4 of 4 layers: 432 parameters added"
    assert half.output.count("scheduled an async checkpoint save at iteration") == 2

    # the loss of an iteration depends on its very samples: the order of the data is the same
    expected = losses(tmp_path / "whole-tb")
    assert sorted(expected) == list(range(1, 9))
    assert expected[8] < expected[1] - 0.7
    assert losses(tmp_path / "half-tb") == {i: expected[i] for i in range(1, 5)}
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in range(5, 9)}

    tracker = "latest_checkpointed_iteration.txt"
    assert [(tmp_path / name / tracker).read_text() for name in ("half", "rest")] == ["4", "8"]
    for name, iteration in (("half", 2), ("half", 4), ("rest", 6), ("rest", 8)):
        folder = f"iter_{iteration:07d}"
        assert_same_bytes(tmp_path / "whole" / folder, tmp_path / name / folder)
        checkpoint = MegatronCheckpoint.open(tmp_path / name / folder)
        assert kha_of(checkpoint) == KHA
        assert checkpoint.iteration == iteration
        assert checkpoint.args["consumed_train_samples"] == 6 * iteration

    other = [*words, "--load", str(tmp_path / "half"), "--kha-value", "gate"]
    refused = start(other, 2)
    assert refused.codes == [2, 2]
    assert len(refused.errors) == 1  # both ranks are on one machine
    assert "was trained with KHA on value=mlp" in refused.errors[0]
    assert (
        "asks for value=gate (1 tensor decoder.layers.self_attention.knock_value.weight with "
        in refused.errors[0]
    )
    assert "Traceback" not in refused.output

    longer = [*words, *recorded, "--train-iters", "16"]
    refused = start(longer, 2)
    assert refused.codes == [2, 2]
    assert "total number of iterations: 48 there, 96 here" in refused.errors[0]
    assert "add --override-opt_param-scheduler" in refused.errors[0]
    on = start([*longer, "--override-opt_param-scheduler", "--exit-interval", "6"], 2)
    assert on.codes == [0, 0], on.output[-4000:]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint with KHA-MLP, and two of plain Megatron."""
    folder = tmp_path_factory.mktemp("resume")
    mixed = {"moe_layer_freq": [0, 1], "num_moe_experts": 2, "moe_ffn_hidden_size": 8}
    for name, kha, config in (("kha", KHA, {}), ("plain", None, {}), ("experts", None, mixed)):
        ranks(save_gpt, 1, str(folder / name), kha, {}, {"num_layers": 2, **config}, {})
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """The checkpoint with KHA, to be damaged."""
    return shutil.copytree(saved / "kha", tmp_path / "save")


def arguments(folder: Path | None, **changes) -> Namespace:
    args = {
        "load": folder,
        "pretrained_checkpoint": None,
        "ckpt_step": None,
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
        "use_distributed_optimizer": False,
        "use_mp_args_from_checkpoint_args": False,
        "no_load_optim": False,
        "finetune": False,
        "multi_latent_attention": False,
    }
    return Namespace(**args | changes)


def check(folder: Path | None, kha: KHAConfig, **changes) -> None:
    check_same_kha(arguments(folder, **changes), kha)


def test_a_converted_checkpoint_moves_as_it_has_no_optimizer(copy):
    moved = {"use_distributed_optimizer": True, "tensor_model_parallel_size": 2}
    with pytest.raises(CheckpointError, match="optimizer state for TP 1 and PP 1 only"):
        check(copy, KHA, **moved, transformer_impl="local")
    judge(copy).newest.rename(copy / "release")
    (copy / TRACKER).write_text("release")
    check(copy, KHA, **moved)


@pytest.mark.parametrize("distributed", [False, True])
def test_optimizers_do_not_move_between_undivided_experts_and_divided_ones(copy, distributed):
    """Megatron ends in a list of all tensors, also if the state is fully reshardable."""
    moved = {"use_distributed_optimizer": distributed, "expert_model_parallel_size": 2}
    with pytest.raises(CheckpointError, match=r"EP 1 only, and this run has EP 2.*size 1, or add"):
        check(copy, KHA, **moved)
    check(copy, KHA, **moved, no_load_optim=True)
    check(None, KHA, **moved, tensor_model_parallel_size=2, pretrained_checkpoint=copy)


def test_the_same_configuration_is_let_through(saved, tmp_path):
    assert check(saved / "kha", KHA) is None
    check(saved / "kha", KHAConfig(value="mlp", init="random"))  # only says how a run starts
    check(saved / "plain", KHAConfig())
    check(None, KHA)
    check(tmp_path, KHA)  # no tracker file: Megatron starts from scratch
    # a run with checkpoints of its own no longer looks at what it started from
    check(saved / "kha", KHA, pretrained_checkpoint=saved / "plain")


VALUE = "decoder.layers.self_attention.knock_value.weight"


@pytest.mark.parametrize(
    ("folder", "asked", "message"),
    [
        ("kha", KHAConfig(), rf"value=mlp.* nothing \(baseline\) \(1 tensor {VALUE} unexpected\)"),
        (
            "kha",
            KHAConfig(query="linear", value="mlp"),
            rf"value=mlp.* value=mlp \(1 tensor {VALUE.replace('value', 'query')} missing",
        ),
        (
            "kha",
            KHAConfig(value="gate"),
            rf"value=mlp.* value=gate \(1 tensor {VALUE} with another",
        ),
        ("plain", KHA, rf"nothing \(baseline\).* value=mlp \(1 tensor {VALUE} missing\).*--kha-up"),
        (
            "experts",
            KHAConfig(query="linear", key="linear"),
            r"nothing.*4 tensors decoder.layers.0.self_attention.knock_key.weight, .* and 1 more",
        ),
    ],
)
def test_another_configuration_is_refused_with_the_tensors(saved, folder, asked, message):
    for args in ({}, {"load": None, "pretrained_checkpoint": saved / folder}):
        with pytest.raises(CheckpointError, match=f"{folder}.*was trained with KHA on {message}"):
            check(saved / folder, asked, **args)


def test_heads_that_the_rows_do_not_fit_are_refused(saved):
    asked = {"num_layers": 2, "hidden_size": 40, "num_attention_heads": 8, "kv_channels": 6}
    asked |= {"group_query_attention": True, "num_query_groups": 4}
    check(saved / "kha", KHA, **asked)
    message = r"96 rows, and the command line asks for 8 query and 2 key/value heads .* 72: use"
    with pytest.raises(CheckpointError, match=message):
        check(saved / "kha", KHA, **asked | {"num_query_groups": 2})


@pytest.mark.parametrize("named", [True, False], ids=["in a folder of its own", "below --load"])
def test_a_non_persistent_checkpoint_does_not_slip_through(saved, tmp_path, named):
    """Megatron prefers it to a persistent one that is not newer."""
    run = shutil.copytree(saved / "kha", tmp_path / "run")
    passing = tmp_path / "passing" if named else run / "non_persistent"
    shutil.copytree(saved / "plain", passing)
    words = {"non_persistent_ckpt_type": "global"}
    if named:
        words["non_persistent_global_ckpt_dir"] = passing
    check(run, KHA)  # Megatron does not look there without the argument
    with pytest.raises(CheckpointError, match="was trained with KHA on nothing"):
        check(run, KHA, **words)
    (run / "iter_0000007").rename(run / "iter_0000008")
    (run / "latest_checkpointed_iteration.txt").write_text("8")
    check(run, KHA, **words)
    shutil.rmtree(run / "iter_0000008")
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="was trained with KHA on nothing"):
        check(run, KHA, **words)


def test_checkpoints_of_fsdp_are_checked_as_well(tmp_path):
    """They are in PyTorch's own format: no metadata.json, the arguments beside the tensors."""
    folder = tmp_path / "save" / "iter_0000005"
    layer = "model.module.decoder.layers.0.self_attention."
    state = {
        f"{layer}linear_proj.weight": torch.ones(4, 4),
        f"{layer}knock_value.weight": torch.ones(1, 2, 2),
        "args": Namespace(kha_query=None, kha_key=None, kha_value="linear"),
    }
    torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("5")
    check(tmp_path / "save", KHAConfig(value="linear"))
    for asked, tensors in (
        (KHAConfig(), rf"\(1 tensor {layer}knock_value.weight unexpected\)"),
        (KHAConfig(value="gate"), "value=gate: resume"),
    ):
        with pytest.raises(CheckpointError, match=f"KHA on value=linear.*{tensors}"):
            check(tmp_path / "save", asked)


def test_the_settings_come_from_the_checkpoint_if_the_command_line_has_none(saved, tmp_path):
    def restored(folder, **changes):
        none = vars(add_model_arguments(ArgumentParser()).parse_args([]))
        given = none | {"kha_fold": "never", "use_checkpoint_args": True}
        return restored_kha(arguments(folder, **given | changes))

    assert restored(saved / "kha") == KHA
    assert restored(saved / "kha").fold == "never"  # how a run is made is the command line's
    assert restored(None, pretrained_checkpoint=saved / "kha") == KHA
    assert restored(saved / "kha", use_checkpoint_args=False) is None
    assert restored(saved / "kha", kha_value="gate") is None  # the command line says it
    assert restored(saved / "plain") is None  # it says nothing: Megatron's own
    assert restored(tmp_path) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ckpt_format": "torch"}, "--ckpt-format torch.*use torch_dist"),
        ({"non_persistent_ckpt_type": "local"}, "use --non-persistent-ckpt-type global"),
        ({"async_save": True}, "add --use-persistent-ckpt-worker"),
        (
            {"async_save": True, "use_persistent_ckpt_worker": True},
            "which is not installed: add --async-strategy mcore",
        ),
    ],
)
def test_ways_of_saving_that_would_fail_are_refused(monkeypatch, words, message):
    args = {
        "ckpt_format": "torch_dist",
        "non_persistent_ckpt_type": None,
        "async_save": False,
        "async_strategy": "nvrx",
        "use_persistent_ckpt_worker": False,
    }
    monkeypatch.setattr(compat, "has_nvrx", lambda: False)
    with pytest.raises(ConfigError, match=message):
        check_saving(Namespace(**args | words))
    good = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
    check_saving(Namespace(**args | good))


def test_an_iteration_that_is_named_is_checked_without_a_tracker_file(copy):
    """Megatron loads it then, so it must not slip through."""
    (copy / "latest_checkpointed_iteration.txt").unlink()
    check(copy, KHA, ckpt_step=7)
    with pytest.raises(CheckpointError, match="was trained with KHA on value=mlp"):
        check(copy, KHAConfig(), ckpt_step=7)
    with pytest.raises(CheckpointError, match="iter_0000008"):
        check(copy, KHA, ckpt_step=8)


def test_a_tracker_that_megatron_would_misread_is_refused_where_it_is_not_ours(copy):
    """Megatron would exit with code 0, or start from random weights."""
    tracker = copy / "latest_checkpointed_iteration.txt"
    for spoil in (lambda: tracker.write_text(""), tracker.unlink):
        spoil()
        with pytest.raises(CheckpointError, match="is repaired: write 7 into it"):
            check(copy, KHA)


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


def test_what_lies_in_an_object_store_is_taken_at_its_word():
    """No file of it can be looked at, so a resumed training keeps the scales that it asks for."""
    where = {"load": "msc://bucket/run", "save": "msc://bucket/run", "pretrained_checkpoint": None}
    delayed = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "fp8_recipe": "delayed"}
    assert resume.object_store(Namespace(**where)) == "msc://bucket/run"
    assert resume.object_store(Namespace(load="/a", save=None, pretrained_checkpoint=None)) is None
    assert resume.goes_on_with_scales(Namespace(**where, **delayed))
    assert not resume.goes_on_with_scales(Namespace(**where, **delayed | {"fp8": None}))


def test_a_folder_that_can_be_looked_at_is_though_the_run_saves_elsewhere(tmp_path):
    where = {"load": str(tmp_path), "save": "msc://bucket/run", "pretrained_checkpoint": None}
    delayed = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "fp8_recipe": "delayed"}
    chosen = {"ckpt_step": None, "non_persistent_ckpt_type": None}
    assert not resume.goes_on_with_scales(Namespace(**where, **delayed, **chosen))
