"""Test that a resumed run is bit-exact and never loads another configuration."""

import re
import shlex
import shutil
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record, TorchDistFolder
from kha_megatron.checkpoint.tracker import TRACKER
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import Knock, MixtureOfHeads, registry
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import check_same_optimizer, check_same_tensors, read_kha_config
from kha_megatron.training.arguments import add_model_arguments
from kha_megatron.training.resume import (
    Start,
    check_model_class,
    check_same_kha,
    check_same_state,
    find_start,
    loads_fp8_scales,
    restored_kha,
)
from tests.checkpoint.saved import save
from tests.training.conftest import EXPERTS, MODEL, TRAINING, losses, start

KHA = HeadsConfig(Knock(value="mlp"))
TOY = Path(__file__).parents[1] / "mechanisms" / "toy.py"
MEA = Path(__file__).parents[2] / "examples" / "mechanisms" / "mea.py"
MLP = ["knock.value=mlp"]
ASYNC = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]
SHARDED = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
MUON = [*SHARDED, "--optimizer", "muon"]
DISTRIBUTED_MUON = ["--optimizer", "dist_muon", "--bf16"]
PREDICTIONS = [*SHARDED, "--hybrid-layer-pattern", "*-*-*-*-/*-", "--mtp-num-layers", "1"]
EXPERT_PARALLEL = [
    *(*EXPERTS, "--moe-token-dispatcher-type", "allgather", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather"),
]
BALANCED = [
    *(*EXPERT_PARALLEL, "--bf16", "--moe-router-dtype", "fp32"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-bias-update-rms", "--moe-router-bias-update-rate", "0.01"),
    "--dist-ckpt-optim-fully-reshardable",
]


def assert_same_bytes(one: Path, two: Path, batch: int = 6) -> None:
    """Compare model, optimizer, random states and scheduler of two checkpoints."""
    first = TorchDistFolder(one, FileChecks(one, {}))
    second = TorchDistFolder(two, FileChecks(two, {}))
    assert first.tensors.keys() == second.tensors.keys()
    assert any("decoder." in key for key in first.tensors)
    assert any("optimizer." in key for key in first.tensors)
    for key in first.tensors:
        assert torch.equal(tensor_bytes(first, key), tensor_bytes(second, key)), key
    assert first.objects.keys() == second.objects.keys()
    assert any("rng_state" in key for key in first.objects)
    common = "common_state/shard_0_1"
    for key in first.objects.keys() - {common}:
        assert stored_bytes(first, key) == stored_bytes(second, key), key
    first_state = first.read_object(common)[0]
    second_state = second.read_object(common)[0]
    first_args = first_state.pop("args").state
    second_args = second_state.pop("args").state
    scheduler = first_state["opt_param_scheduler"]
    assert scheduler["num_steps"] == batch * first_state["iteration"]
    assert_same(first_state, second_state, common)
    assert first_args.keys() == second_args.keys()
    for name, value in first_args.items():
        assert name in COMMAND_LINE or repr(value) == repr(second_args[name]), name


COMMAND_LINE = set(
    shlex.split("""
async_save async_strategy ckpt_step exit_interval iteration kha_heads kha_preset load
num_floating_point_operations_so_far save tensorboard_dir use_checkpoint_args
use_persistent_ckpt_worker
""")
)
"""Arguments in which the runs differ on purpose."""


def tensor_bytes(folder: TorchDistFolder, key: str) -> torch.Tensor:
    return folder.read(key).contiguous().view(torch.uint8)


def stored_bytes(folder: TorchDistFolder, key: str) -> bytes:
    chunk = folder.objects[key]
    content = (folder.path / chunk.file).read_bytes()
    return content[chunk.start : chunk.start + chunk.length]


def assert_same(a, b, where: str) -> None:
    """Compare containers, tensors and unread objects."""
    if isinstance(a, Record):  # each file has classes of its own
        assert isinstance(b, Record), where
        assert_same(a.name, b.name, where)
        assert_same(a.arguments, b.arguments, where)
        assert_same(a.state, b.state, where)
        return
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key, value in a.items():
            assert_same(value, b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, value in enumerate(a):
            assert_same(value, b[i], f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert repr(a) == repr(b), where


LOG_LINE = re.compile(r"\biteration +(\d+)/.*?\|(.*?)elapsed time[^|]*\|(.*)")


def log_lines(run) -> dict[int, str]:
    """Return Megatron's log line of each iteration, without times."""
    lines = {}
    for iteration, before, after in LOG_LINE.findall(run.output):
        lines[int(iteration)] = before + after
    return lines


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kha", "heads", "layout"),
    [
        pytest.param(KHA, MLP, SHARDED, marks=pytest.mark.whole, id="dense"),
        pytest.param(KHA, MLP, [*SHARDED, "--bf16"], marks=pytest.mark.whole, id="dense, bf16"),
        pytest.param(KHA, MLP, EXPERT_PARALLEL, marks=pytest.mark.whole, id="experts"),
        pytest.param(KHA, MLP, BALANCED, marks=pytest.mark.versions, id="experts, bf16"),
        pytest.param(KHA, MLP, PREDICTIONS, marks=pytest.mark.versions, id="predictions"),
        pytest.param(KHA, MLP, MUON, marks=pytest.mark.whole, id="muon"),
        pytest.param(KHA, MLP, [*MUON, "--bf16"], id="muon, bf16"),
        pytest.param(KHA, MLP, DISTRIBUTED_MUON, marks=pytest.mark.whole, id="dist_muon"),
        pytest.param(
            HeadsConfig(MixtureOfHeads(shared=1, active=2, anneal=3)),
            ["moh.shared=1", "moh.active=2", "moh.anneal=3"],
            SHARDED,
            marks=pytest.mark.whole,
            id="moh",
        ),
        pytest.param(
            None,
            ["toy.strength=2"],
            [*SHARDED, "--heads-from", str(TOY)],
            marks=pytest.mark.whole,
            id="mechanism of a file",
        ),
        pytest.param(
            None,
            ["mea.norm=true"],
            [*SHARDED, "--heads-from", str(MEA)],
            marks=pytest.mark.whole,
            id="mea",
        ),
    ],
)
def test_resumed_training_is_bit_exact(kha, heads, layout, corpus, tmp_path, monkeypatch):
    """The interrupted run saves asynchronously while the next iteration changes the weights.

    The resumed run takes the KHA settings from its checkpoint.
    """
    monkeypatch.setenv(registry.FILES_VARIABLE, "")
    kha = kha or HeadsConfig.from_options({"heads": heads, "heads_from": layout[-1:]})

    def run(name, *options):
        words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, *layout, "--train-iters", "4"]
        words += ["--attention-dropout", "0.1", "--save-interval", "2", *options]
        words += ["--save", str(tmp_path / name)]
        words += ["--tensorboard-dir", str(tmp_path / f"{name}-tb")]
        ended = start(words, 2)
        assert ended.codes == [0, 0], ended.output[-4000:]
        assert ended.knocks.startswith(f"knocks {kha} in 4 of 4 layers")
        return ended

    whole = run("whole", "--heads", *heads)
    half = run("half", "--heads", *heads, "--exit-interval", "3", *ASYNC)
    load = ["--load", str(tmp_path / "half"), "--use-checkpoint-args", "--ckpt-step", "2"]
    rest = run("rest", *load)

    # the loss of an iteration depends on its samples, so the order of the data is the same
    expected = losses(tmp_path / "whole-tb")
    assert sorted(expected) == [1, 2, 3, 4]
    assert losses(tmp_path / "half-tb") == {i: expected[i] for i in (1, 2, 3)}
    assert losses(tmp_path / "rest-tb") == {i: expected[i] for i in (3, 4)}
    printed = log_lines(whole)
    assert all(f" lm loss: {expected[i]:.6E} |" in printed[i] for i in (1, 2, 3, 4))
    assert log_lines(half) == {i: printed[i] for i in (1, 2, 3)}
    assert log_lines(rest) == {i: printed[i] for i in (3, 4)}
    for name, iteration in (("half", 2), ("rest", 4)):
        directory = f"iter_{iteration:07d}"
        assert_same_bytes(tmp_path / "whole" / directory, tmp_path / name / directory)
        checkpoint = MegatronCheckpoint.open(tmp_path / name / directory)
        assert read_kha_config(checkpoint) == kha
        assert checkpoint.args["consumed_train_samples"] == 6 * iteration


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """Return a copy of the checkpoint with KHA."""
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
        "use_checkpoint_args": False,
        "layernorm_zero_centered_gamma": False,
        "gpt_model": False,
        "use_rope_scaling": False,
    }
    return Namespace(**args | changes)


def check(folder: Path | None, kha: HeadsConfig, **changes) -> None:
    args = arguments(folder, **changes)
    check_same_kha(find_start(args), args, kha)


def check_class(folder: Path, **changes) -> None:
    args = arguments(folder, **changes)
    check_model_class(find_start(args), args)


def test_other_rope_arguments_are_refused(copy):
    with pytest.raises(CheckpointError, match=r"--use-rope-scaling is True, but .* with False"):
        check(copy, KHA, use_rope_scaling=True, use_checkpoint_args=True)
    with pytest.raises(CheckpointError, match=r"--rotary-base is 7, .* add --finetune"):
        check(copy, KHA, rotary_base=7)
    check(copy, KHA, rotary_base=7, use_checkpoint_args=True)  # restored


@pytest.mark.parametrize("is_scaled", [False, True])
def test_rope_scaling_must_be_the_same_if_it_is_used(copy, is_scaled):
    args = arguments(copy, use_rope_scaling=is_scaled, rope_low_freq_factor=2.0)
    start_of_run = find_start(args)
    saved = {"use_rope_scaling": is_scaled, "rope_low_freq_factor": None}
    start_of_run = replace(start_of_run, arguments={**start_of_run.arguments, **saved})
    expected = nullcontext()
    if is_scaled:
        expected = pytest.raises(CheckpointError, match=r"-low-freq-factor is 2\.0.*with None")
    with expected:
        check_same_kha(start_of_run, args, KHA)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "Hugging Face model .*`kha-megatron convert to-megatron`"),
        ("adapter_config.json", "PEFT adapter .*merge_and_unload"),
    ],
)
def test_models_that_megatron_would_ignore_are_refused(tmp_path, name, message):
    assert find_start(arguments(tmp_path)).path is None
    (tmp_path / name).write_text("{}")
    for args in (arguments(tmp_path), arguments(None, pretrained_checkpoint=str(tmp_path))):
        with pytest.raises(CheckpointError, match=message):
            find_start(args)


WORDS = ["--device", "cpu", *MODEL, *TRAINING, "--mock-data", "--vocab-size", "300"]
WORDS += ["--kha-value", "mlp", "--train-iters", "1"]


EXPERT_LAYERS = {"num_experts": 4, "hybrid_layer_pattern": "*E*E*E*E"}


@pytest.fixture(scope="module")
def one_iteration(tmp_path_factory) -> Path:
    """Return a checkpoint that the entry point has saved."""
    folder = tmp_path_factory.mktemp("run")
    run = start([*WORDS, "--save", str(folder)])
    assert run.codes == [0], run.output[-4000:]
    return folder / "iter_0000001"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, "--normalization is LayerNorm, but .* with RMSNorm"),
        ({"hidden_size": 48}, "--hidden-size is 48, but .* trained with 40"),
        ({"ffn_hidden_size": 64}, "--ffn-hidden-size is 64, but .* trained with 48"),
        ({"num_attention_heads": 4}, "--num-attention-heads is 4, but .* trained with 8"),
        ({"num_query_groups": 4}, "--num-query-groups is 4, but .* trained with 2"),
        ({"group_query_attention": False}, "--num-query-groups is 8, but .* trained with 2"),
        ({"kv_channels": 8}, "--kv-channels is 8, but .* trained with 6"),
        (EXPERT_LAYERS, "--num-experts is 4, but .* trained with none"),
        ({"hybrid_layer_pattern": "*-*-*-"}, "--num-layers is 3, but .* trained with 4"),
        ({"hybrid_layer_pattern": "*-**-*-"}, r"is \*-\*\*-\*-, but .* with \*-\*-\*-\*-\."),
        ({"hybrid_layer_pattern": "+-+-+-+-"}, r"pattern is \+-\+-\+-\+-, but"),
        ({"hybrid_layer_pattern": "*-*-*E*-"}, r"pattern is \*-\*-\*E\*-, but"),
        ({"hybrid_layer_pattern": "*-*-*-*-/*-"}, "--mtp-num-layers is 1, but .* with none"),
        ({"add_bias_linear": True}, "was trained with --disable-bias-linear. Add this flag"),
        ({"add_qkv_bias": True}, "was trained without --add-qkv-bias. Remove this flag"),
        ({"qk_layernorm": False}, "was trained with --qk-layernorm. Add this flag"),
        ({"untie_embeddings_and_output_weights": True}, "trained without --untie-emb"),
        ({"moe_latent_size": 8}, "--moe-latent-size is 8, but .* trained with none"),
        ({"swiglu": False}, "trained with --swiglu. Add this flag"),
        ({"softmax_type": "learnable"}, "trained without --softmax-type learnable"),
        (
            {"position_embedding_type": "learned_absolute"},
            "--max-position-embeddings is 28, but .* trained with none",
        ),
        ({"mamba_state_dim": 7}, "--mamba-state-dim is 7, but .* trained with 128"),
        ({"padded_vocab_size": 256}, "embedding has 256 rows, but .* vocabulary of 300 tokens"),
    ],
)
def test_a_model_with_other_tensors_is_refused(one_iteration, changes, message):
    """Megatron would end in a traceback, or drop tensors silently."""
    recorded = MegatronCheckpoint.open(one_iteration).args
    with pytest.raises(CheckpointError, match=message):
        check_same_tensors(one_iteration, recorded, recorded | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "--num-experts is 8, but .* trained with 4"),
        ({"moe_ffn_hidden_size": 8}, "--moe-ffn-hidden-size is 8, but"),
        ({"moe_shared_expert_intermediate_size": 8}, "shared-expert-intermediate-size is 8"),
        ({"moe_router_enable_expert_bias": True}, "trained without --moe-router-enable-exp"),
        ({"moe_shared_expert_gate": True}, "trained without --moe-shared-expert-gate"),
    ],
)
def test_other_experts_are_refused(one_iteration, changes, message):
    recorded = MegatronCheckpoint.open(one_iteration).args | EXPERT_LAYERS
    check_same_tensors(one_iteration, recorded, recorded)
    with pytest.raises(CheckpointError, match=message):
        check_same_tensors(one_iteration, recorded, recorded | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hybrid_layer_pattern": "*-*-|*-*-"},
        {"swiglu": False, "quick_geglu": True},
        {"softmax_type": "off-by-one"},
        {"padded_vocab_size": 512},
        {"add_qkv_bias": True, "dist_ckpt_strictness": "log_all"},
        {"num_experts": 4, "moe_shared_expert_gate": True},  # without any MoE layer
        {"mla_down_proj_fusion": True, "moe_grouped_gemm": True},
    ],
)
def test_settings_that_megatron_can_change_are_accepted(one_iteration, changes):
    recorded = MegatronCheckpoint.open(one_iteration).args
    check_same_tensors(one_iteration, recorded, recorded | changes)


def test_text_of_a_checkpoint_stays_in_one_short_line(one_iteration):
    recorded = MegatronCheckpoint.open(one_iteration).args
    hostile = recorded | {"normalization": "RMS\nerror: run this " + "x" * 10**6}
    with pytest.raises(CheckpointError, match="--normalization is RMSNorm, but") as caught:
        check_same_tensors(one_iteration, hostile, recorded)
    message = str(caught.value)
    assert len(message) < 600
    assert message.isprintable()


def test_predictions_can_be_left_out(one_iteration):
    recorded = MegatronCheckpoint.open(one_iteration).args
    predicting = recorded | {"hybrid_layer_pattern": "*-*-*-*-/*-"}
    repeated = {"hybrid_layer_pattern": "*-*-*-*-/*-/*-", "mtp_use_repeated_layer": True}
    check_same_tensors(one_iteration, predicting, recorded)
    check_same_tensors(one_iteration, predicting, predicting | repeated)


DISTRIBUTED = {"use_distributed_optimizer": True}
RESHARDABLE = {**DISTRIBUTED, "dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    ("saved_with", "changes", "message"),
    [
        ({}, {"bf16": True}, "saved without --bf16 and cannot be loaded with --bf16"),
        ({}, {"fp16": True}, "saved without --fp16 and"),
        ({"bf16": True}, {"bf16": False}, "saved with --bf16 and cannot be loaded without"),
        ({}, {"optimizer": "muon"}, "with --optimizer adam and .* with --optimizer muon"),
        ({}, DISTRIBUTED, "saved without --use-distributed-optimizer"),
        (DISTRIBUTED, {"use_distributed_optimizer": False}, "saved with --use-distributed"),
        ({}, {"decoupled_lr": 0.1}, "without --decoupled-lr and .* with --decoupled-lr 0.1"),
        (DISTRIBUTED, {"bf16": True}, "saved without --bf16"),
        ({**DISTRIBUTED, "bf16": True}, {"bf16": False, "fp16": True}, "saved with --bf16"),
        (DISTRIBUTED, {"grad_reduce_in_bf16": True}, "saved without --grad-reduce-in-bf16"),
        (DISTRIBUTED, {"ddp_bucket_size": 7}, "cannot be loaded with --ddp-bucket-size 7"),
        (DISTRIBUTED, {"padded_vocab_size": 512}, "saved with --padded-vocab-size 384"),
        (DISTRIBUTED, {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 1 and"),
        (DISTRIBUTED, {"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 1"),
        (DISTRIBUTED, {"expert_model_parallel_size": 2}, "--expert-model-parallel-size 1 and"),
        (DISTRIBUTED, {"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        # Megatron converts these
        ({"bf16": True}, {"bf16": False, "fp16": True}, None),
        ({}, {"padded_vocab_size": 512, "tensor_model_parallel_size": 2}, None),
        (RESHARDABLE, {"bf16": True, "padded_vocab_size": 512}, None),
        (RESHARDABLE, {"tensor_model_parallel_size": 2, "transformer_impl": "te"}, None),
        ({"optimizer": "muon", "bf16": True}, DISTRIBUTED, None),
    ],
)
def test_optimizers_that_cannot_load_the_state_are_refused(
    one_iteration,
    saved_with,
    changes,
    message,
):
    recorded = MegatronCheckpoint.open(one_iteration).args | saved_with
    if message is None:
        check_same_optimizer(one_iteration, recorded, recorded | changes)
        return
    with pytest.raises(CheckpointError, match=message):
        check_same_optimizer(one_iteration, recorded, recorded | changes)


def test_each_checkpoint_of_a_constant_structure_can_be_loaded(tmp_path):
    """From the second save on, ``.metadata`` contains another class."""
    words = [*WORDS, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "1"]
    run = start([*words, "--ckpt-assume-constant-structure"])
    assert run.codes == [0], run.output[-4000:]
    for iteration in (1, 2):
        saved = find_start(arguments(tmp_path, ckpt_step=iteration))
        assert saved.arguments["consumed_train_samples"] == 6 * iteration


def test_buffers_of_a_gpt_model_are_not_loaded_into_a_hybrid_model(one_iteration):
    recorded = MegatronCheckpoint.open(one_iteration).args | DISTRIBUTED
    gpt_model = recorded | {"hybrid_layer_pattern": None}
    with pytest.raises(CheckpointError, match=r"into a GPTModel.* add --no-load-optim"):
        check_same_optimizer(one_iteration, gpt_model, recorded)
    check_same_optimizer(one_iteration, gpt_model, gpt_model | {"gpt_model": True})
    check_same_optimizer(one_iteration, gpt_model | RESHARDABLE, recorded | RESHARDABLE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bf16", "saved without --bf16 and cannot be loaded with --bf16"),
        ("--add-qkv-bias --finetune", "trained without --add-qkv-bias"),
        ("--no-position-embedding", "add_position_embedding is False, but .* with True"),
        ("--bf16 --no-load-optim", None),
        ("--untie-embeddings-and-output-weights --use-checkpoint-args", None),
    ],
)
def test_resuming_with_other_settings(one_iteration, words, message):
    run = start([*WORDS, *words.split(), "--load", str(one_iteration.parent)])
    if message is None:
        assert run.codes == [0], run.output[-4000:]
        return
    assert run.codes == [2], run.output[-4000:]
    assert "Traceback" not in run.output
    (error,) = run.errors
    assert re.search(message, error), error


def test_model_classes_that_megatron_cannot_load_are_refused(tmp_path):
    sizes = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_experts": 4,
    }
    gpt = save(tmp_path / "gpt", 1, {}, **sizes, moe_layer_freq=[0, 1]).parent
    for pattern, problem in (("*-*E", "mixes dense"), ("*-*-/*-", "contains MTP layers")):
        with pytest.raises(CheckpointError, match=rf"{problem}.*add --gpt-model"):
            check_class(gpt, hybrid_layer_pattern=pattern)
    check_class(gpt, gpt_model=True)
    hybrid = save(tmp_path / "hybrid", 1, {}, hybrid_layer_pattern="*-*E").parent
    with pytest.raises(CheckpointError, match="Remove --gpt-model"):
        check_class(hybrid, gpt_model=True)


def test_the_same_configuration_is_accepted(saved, tmp_path):
    check(saved / "kha", KHA)
    check(saved / "kha", HeadsConfig(Knock(value="mlp", init="random")))  # only used at the start
    check(saved / "plain", HeadsConfig())
    check(None, KHA)
    check(tmp_path, KHA)  # no tracker file: Megatron starts from scratch
    # a run with its own checkpoints ignores the pretrained one
    check(saved / "kha", KHA, pretrained_checkpoint=saved / "plain")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("folder", "asked", "message"),
    [
        ("kha", HeadsConfig(), r"value=mlp.* nothing \(baseline\)"),
        ("kha", HeadsConfig(Knock(value="gate")), "value=mlp.* value=gate"),
        ("plain", KHA, r"nothing \(baseline\).* value=mlp.*--kha-upcycle"),
    ],
)
def test_another_configuration_is_refused(saved, folder, asked, message):
    for args in ({}, {"load": None, "pretrained_checkpoint": saved / folder}):
        with pytest.raises(CheckpointError, match=f"{folder}.*was trained with KHA on {message}"):
            check(saved / folder, asked, **args)


def test_a_non_persistent_checkpoint_is_checked(saved, tmp_path):
    """Megatron prefers it to a persistent one that is not newer."""
    run = shutil.copytree(saved / "kha", tmp_path / "run")
    other = shutil.copytree(saved / "plain", tmp_path / "other")
    words = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": other}
    check(run, KHA)
    with pytest.raises(CheckpointError, match="was trained with KHA on nothing"):
        check(run, KHA, **words)
    (run / "iter_0000007").rename(run / "iter_0000008")
    (run / TRACKER).write_text("8")
    check(run, KHA, **words)


SKIPPED_STEPS = ["--fp16", "--initial-loss-scale", "4194304", "--hysteresis", "1"]


@pytest.mark.parametrize("words", [["--optimizer", "sgd"], SKIPPED_STEPS])
def test_optimizers_without_state_at_the_first_save_resume(words, tmp_path):
    words = [*WORDS, "--train-iters", "6", *words]
    uninterrupted = tmp_path / "uninterrupted"
    save = ["--save", str(uninterrupted), "--save-interval", "2"]
    run = start([*words, *save, "--tensorboard-dir", str(uninterrupted)])
    assert run.codes == [0], run.output[-4000:]
    resumed = tmp_path / "resumed"
    load = ["--load", str(uninterrupted), "--ckpt-step", "2"]
    run = start([*words, *load, "--tensorboard-dir", str(resumed)])
    assert run.codes == [0], run.output[-4000:]
    expected = losses(uninterrupted)
    assert losses(resumed) == {iteration: expected[iteration] for iteration in (3, 4, 5, 6)}
    assert expected[6] != expected[5]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"quick_geglu": None}, None),
        ({"moe_router_topk": 3}, None),  # without experts
        ({"layernorm_epsilon": 0.01}, "--norm-epsilon is 0.01, but {} was trained with 1e-05."),
        ({"window_size": (2, 0)}, "--window-size is [2, 0], but {} was trained with None."),
        ({"softmax_type": "off-by-one"}, "--softmax-type is off-by-one, but {} was trained with"),
        (
            {"num_experts": 4, "moe_router_topk": 3},
            "--moe-router-topk is 3, but {} was trained with 2.",
        ),
    ],
)
def test_other_outputs_are_announced(one_iteration, changes, warning, capsys):
    recorded = MegatronCheckpoint.open(one_iteration).args
    start_of_run = find_start(arguments(one_iteration.parent))
    check_same_state(start_of_run, Namespace(**recorded | changes))
    announced = capsys.readouterr().err
    if warning is None:
        assert "WARNING" not in announced
        return
    assert announced.count("WARNING") == 1
    assert warning.format(one_iteration) in announced


def test_a_missing_checkpoint_can_be_an_error(tmp_path):
    """Megatron would exit with code 0."""
    words = [*WORDS, "--load", str(tmp_path), "--exit-on-missing-checkpoint"]
    run = start(words)
    assert run.codes == [2], run.output[-4000:]
    assert run.errors == [
        f"error: {tmp_path} contains no checkpoint. Choose another directory for --load, or "
        "remove --exit-on-missing-checkpoint to start from scratch."
    ]


@pytest.mark.parametrize("name", ["optim", "rng"])
def test_a_state_that_was_not_saved_is_not_loaded(name):
    saved = Start(path="run/iter_0000001", arguments={f"no_save_{name}": True})
    loads = {"no_load_optim": False, "no_load_rng": False, "finetune": False}
    with pytest.raises(CheckpointError, match=f"was saved with --no-save-{name}.*--no-load-{name}"):
        check_same_state(saved, Namespace(**loads))
    check_same_state(saved, Namespace(**loads | {f"no_load_{name}": True}))
    check_same_state(saved, Namespace(**loads | {"finetune": True}))


DELAYED = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "fp8_recipe": "delayed"}


@pytest.mark.parametrize(
    ("path", "saved_with", "passed", "loads"),
    [
        ("run/iter_0000001", DELAYED, DELAYED, True),
        ("run/iter_0000001", DELAYED, {"fp8": None}, False),
        ("run/iter_0000001", DELAYED, {"fp8_recipe": "tensorwise"}, False),
        ("run/iter_0000001", DELAYED, {"transformer_impl": "local"}, False),
        ("run/iter_0000001", DELAYED | {"fp8": None}, DELAYED, False),
        ("run/iter_0000001", DELAYED | {"fp8_recipe": "blockwise"}, DELAYED, False),
        ("run/release", DELAYED, DELAYED, False),
        (None, {}, DELAYED, False),
    ],
)
def test_scales_are_loaded_if_both_runs_have_them(path, saved_with, passed, loads):
    checkpoint = Start(path=path, arguments=saved_with)
    assert loads_fp8_scales(checkpoint, Namespace(**DELAYED | passed)) == loads
    remote = Start(is_remote=True)
    assert loads_fp8_scales(remote, Namespace(**DELAYED))


def test_checkpoints_of_fsdp_are_checked(tmp_path):
    """They are in PyTorch's own format without metadata.json."""
    state = {
        "model.module.decoder.layers.0.self_attention.knock_value.weight": torch.ones(1, 2, 2),
        "args": Namespace(kha_query=None, kha_key=None, kha_value="linear"),
    }
    folder = tmp_path / "iter_0000005"
    torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    (tmp_path / TRACKER).write_text("5")
    check(tmp_path, HeadsConfig(Knock(value="linear")))
    with pytest.raises(CheckpointError, match=r"KHA on value=linear.*value=gate"):
        check(tmp_path, HeadsConfig(Knock(value="gate")))


def test_settings_are_restored_from_the_checkpoint(saved, tmp_path):
    def restored(folder, **changes):
        defaults = vars(add_model_arguments(ArgumentParser()).parse_args([]))
        args = arguments(folder, **defaults | {"use_checkpoint_args": True} | changes)
        return restored_kha(find_start(args), args)

    assert restored(saved / "kha") == KHA
    assert restored(None, pretrained_checkpoint=saved / "kha") == KHA
    assert restored(saved / "kha", use_checkpoint_args=False) is None
    assert restored(saved / "kha", kha_value="gate") is None
    assert restored(saved / "plain") is None
    assert restored(tmp_path) is None


def test_ckpt_step_is_checked_without_a_tracker_file(copy):
    (copy / TRACKER).unlink()
    check(copy, KHA, ckpt_step=7)
    with pytest.raises(CheckpointError, match="KHA on value=mlp"):
        check(copy, HeadsConfig(), ckpt_step=7)


def test_a_misleading_tracker_of_another_directory_is_refused(copy):
    """Megatron would exit with code 0, or start from random weights."""
    tracker = copy / TRACKER
    tracker.write_text("")
    with pytest.raises(CheckpointError, match="Write 7 into this"):
        check(copy, KHA)
    tracker.unlink()
    with pytest.raises(CheckpointError, match="Write 7 into this"):
        check(copy, KHA)


def test_sizes_of_a_checkpoint_that_do_not_fit_the_layout_are_refused(tmp_path):
    """With ``--use-checkpoint-args``, they are only known after the checkpoint was read."""
    sizes = ["--num-attention-heads", "12", "--num-query-groups", "3", "--hidden-size", "48"]
    words = ["--device", "cpu", *TRAINING, "--kha-preset", "kha_mlp", "--mock-data"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "51", "--train-iters", "1"]
    saved = start([*words, *MODEL, *sizes, "--save", str(tmp_path)])
    assert saved.codes == [0], saved.output[-4000:]
    words += ["--load", str(tmp_path), "--use-checkpoint-args"]
    for ranks, flags, message in (
        (2, ["--micro-batch-size", "1"], "12 query heads and 3 key/value heads over 2"),
        (3, [], "--padded-vocab-size (128) must be divisible by 3"),
        (3, ["--padded-vocab-size", "129", "--sequence-parallel"], "--seq-length (28) must be"),
    ):
        run = start([*words, "--tensor-model-parallel-size", str(ranks), *flags], ranks)
        assert run.codes == [2] * ranks, run.output[-4000:]
        (error,) = run.errors
        assert message in error
        assert "Choose a parallel layout" in error
        assert "Traceback" not in run.output
