"""Test that a resumed run is bit-exact and never loads another configuration."""

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.tracker import TRACKER, select_checkpoint
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import CollaborativeHeads, MixtureOfHeads, TalkingHeads
from kha_megatron.model.recorded import kha_of
from kha_megatron.training import resume
from kha_megatron.training.arguments import add_model_arguments
from kha_megatron.training.resume import check_same_kha, restored_kha
from tests.conversion.checkpoints import save_gpt
from tests.training.comparison import assert_same_bytes
from tests.training.conftest import EXPERTS, MODEL, TRAINING, losses, start

KHA = KHAConfig(value="mlp")


ASYNC = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]


# the default format fills the gaps between parameters with uninitialised memory
DISTRIBUTED = [
    *("--moe-token-dispatcher-type", "allgather", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--dist-ckpt-optim-fully-reshardable"),
]
SHARDED = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.mark.parametrize(
    ("kha", "words"),
    [
        pytest.param(KHA, ["--kha-preset", "kha_mlp", *EXPERTS, *DISTRIBUTED], id="experts"),
        pytest.param(
            KHAConfig(moh=MixtureOfHeads(shared=1, active=2, anneal=6)),
            ["--heads", "moh.shared=1", "moh.active=2", "moh.anneal=6", *SHARDED],
            marks=pytest.mark.whole,
            id="moh",
        ),
        pytest.param(
            KHAConfig(
                value="mlp",
                talking=TalkingHeads(),
                collaborative=CollaborativeHeads(dim=16, start="ones"),
            ),
            [
                *("--heads", "knock.value=mlp", "talking", "collaborative.dim=16"),
                *("collaborative.start=ones", "--attention-dropout", "0.1", *SHARDED),
            ],
            marks=pytest.mark.whole,
            id="talking and collaborative",
        ),
    ],
)
def test_resumed_training_is_bit_exact(kha, words, corpus, tmp_path):
    """The interrupted run saves asynchronously, while the next iteration changes the weights.

    The resumed run takes the KHA settings from its checkpoint.
    """
    common = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--save-interval", "2"]
    recorded = [w for w in words if w in {*EXPERTS, *DISTRIBUTED, *SHARDED}]
    recorded += ["--load", str(tmp_path / "half"), "--use-checkpoint-args"]

    def folders(name):
        return ["--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}-tb")]

    whole = start([*common, *words, *folders("whole")], 2)
    half = start([*common, *words, *folders("half"), "--exit-interval", "4", *ASYNC], 2)
    rest = start([*common, *recorded, *folders("rest")], 2)
    for run in (whole, half, rest):
        assert run.codes == [0, 0], run.output[-4000:]
        assert run.knocks.startswith(f"knocks {kha} in 4 of 4 layers")
    assert half.output.count("scheduled an async checkpoint save at iteration") == 2

    # the loss of an iteration depends on its samples: the order of the data is the same
    expected = losses(tmp_path / "whole-tb")
    assert sorted(expected) == list(range(1, 9))
    assert expected[8] < expected[1] - 0.1
    assert losses(tmp_path / "half-tb") == {i: expected[i] for i in range(1, 5)}
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in range(5, 9)}

    tracker = "latest_checkpointed_iteration.txt"
    assert [(tmp_path / name / tracker).read_text() for name in ("half", "rest")] == ["4", "8"]
    for name, iteration in (("half", 2), ("half", 4), ("rest", 6), ("rest", 8)):
        folder = f"iter_{iteration:07d}"
        assert_same_bytes(tmp_path / "whole" / folder, tmp_path / name / folder)
        checkpoint = MegatronCheckpoint.open(tmp_path / name / folder)
        assert kha_of(checkpoint) == kha
        assert checkpoint.iteration == iteration
        assert checkpoint.args["consumed_train_samples"] == 6 * iteration

    if kha != KHA:
        return
    refused = start([*common, *recorded, "--train-iters", "16"], 2)
    assert refused.codes == [2, 2]
    assert "total number of iterations: 48 there, 96 here" in refused.errors[0]
    assert "add --override-opt_param-scheduler" in refused.errors[0]


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
    select_checkpoint(copy).newest.rename(copy / "release")
    (copy / TRACKER).write_text("release")
    check(copy, KHA, **moved)


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


@pytest.mark.parametrize("named", [True, False], ids=["own directory", "below --load"])
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


def test_a_damaged_checkpoint_is_refused(copy):
    shard = max((copy / "iter_0000007").glob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"\.distcp is missing or cut short"):
        check(copy, KHA)


def test_what_lies_in_an_object_store_is_taken_at_its_word():
    """No file of it can be looked at, so a resumed training keeps the scales that it asks for."""
    where = {"load": "msc://bucket/run", "save": "msc://bucket/run", "pretrained_checkpoint": None}
    delayed = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "fp8_recipe": "delayed"}
    assert resume.object_store(Namespace(**where)) == "msc://bucket/run"
    assert resume.object_store(Namespace(load="/a", save=None, pretrained_checkpoint=None)) is None
    assert resume.goes_on_with_scales(Namespace(**where, **delayed))
    assert not resume.goes_on_with_scales(Namespace(**where, **delayed | {"fp8": None}))
