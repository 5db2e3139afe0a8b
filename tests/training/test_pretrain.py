"""Test runs of ``python -m kha_megatron.training`` on the CPU."""

import pytest
import torch

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from tests.training.conftest import (
    EXPERTS,
    HEAD_DIM,
    LAYERS,
    MODEL,
    TRAINING,
    losses,
    scalars,
    start,
)

CPU = ["--device", "cpu"]


def train(words, corpus, folder, ranks, without=()):
    model = [word for word in MODEL if word not in without]
    words = [*CPU, *model, *TRAINING, *corpus, *words, "--save", str(folder / "save")]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    run = start(words, ranks)
    assert set(run.codes) == {0}, run.output[-4000:]
    history = losses(folder / "tensorboard")
    assert sorted(history) == list(range(1, 9))
    # a uniform guess among 384 tokens has 5.95
    assert 5.4 < history[1] < 6.6
    assert history[8] < history[1] - 0.7
    return run, MegatronCheckpoint.open(folder / "save")


def moved(weights):
    """Return for each layer whether training changed every shared matrix."""
    identity = torch.eye(HEAD_DIM)
    has_moved = []
    for weight in weights.values():
        has_moved.append(not any(torch.equal(matrix, identity) for matrix in weight))
    return has_moved


HEAD_PLACES = ("kha-attention-sink/mean", "kha-distance/value-down")


def test_experts_train_with_tensor_and_sequence_parallelism_and_are_logged(corpus, tmp_path):
    words = ["--kha-preset", "kha_mlp", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    words += [*EXPERTS, "--moe-token-dispatcher-type", "alltoall", "--kha-log-interval", "4"]
    words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    words += ["--moe-router-bias-update-rms", "--moe-router-bias-update-rate", "0.01"]
    words += ["--log-interval", "4", "--log-throughput", "--log-timers-to-tensorboard"]
    run, checkpoint = train(words, corpus, tmp_path, 2)
    added = 3 * HEAD_DIM**2 * LAYERS
    assert run.knocks == f"knocks value=mlp in 4 of 4 layers: {added} parameters added"
    assert read_kha_config(checkpoint) == HeadsConfig(Knock(value="mlp"))
    assert checkpoint.args["kha_preset"] == "kha_mlp"
    assert checkpoint.args["kha_init"] == "identity"
    weights = read_knock_weights(checkpoint)
    assert list(weights) == [(layer, "value") for layer in range(LAYERS)]
    assert all(moved(weights))

    logged = scalars(tmp_path / "tensorboard")
    for layer in range(LAYERS):
        for place in HEAD_PLACES:
            assert sorted(logged[f"{place}/layer-{2 * layer}"]) == [4, 8]
        distance = logged[f"kha-distance/value-down/layer-{2 * layer}"]
        assert 0 < distance[4] < distance[8]
    bias_steps = []
    last_violations = []
    for layer in range(1, LAYERS + 1):
        ranges = logged[f"expert-load/bias-range-layer-{layer}"]
        bias_steps += [value / 0.01 for value in ranges.values()]
        last_violations.append(logged[f"expert-load/violation-layer-{layer}"][8])
    # the sign form would move the range of biases by whole steps of 0.01
    assert any(abs(step - round(step)) > 1e-3 for step in bias_steps)
    violation = logged["expert-load/violation"]
    assert violation[8] == pytest.approx(sum(last_violations) / LAYERS, rel=1e-6)
    assert sorted(violation) == [4, 8]
    tokens = 6 * 28 / 2  # of an iteration and rank
    speeds = {}
    for iteration, seconds in logged["iteration-time"].items():
        speeds[iteration] = tokens / seconds
    assert logged["tokens-per-second-per-gpu"] == pytest.approx(speeds, rel=1e-4)
    assert "mfu" not in logged


SKIP = ["--iterations-to-skip", "2"]
RESET = ["--reset-attention-mask"]
VIRTUAL = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
MOCK = ["--mock-data", "--vocab-size", "90", "--kha-preset", "kha_mlp", "--train-iters", "3"]


@pytest.mark.parametrize("words", [SKIP, RESET])
def test_options_that_need_data_on_middle_stages_are_refused(words):
    run = start([*CPU, *MODEL, *TRAINING, *MOCK, *VIRTUAL, *words], 2)
    assert run.codes == [2, 2], run.output[-4000:]
    (error,) = run.errors
    assert f"{words[0]} supports at most 2 pipeline stages, got 4" in error


def test_iterations_are_skipped_with_tensor_parallelism(tmp_path):
    words = [*SKIP, "--tensor-model-parallel-size", "2", "--tensorboard-dir", str(tmp_path)]
    run = start([*CPU, *MODEL, *TRAINING, *MOCK, *words], 2)
    assert run.codes == [0, 0], run.output[-4000:]
    assert losses(tmp_path).keys() == {1, 3}


def test_the_batch_size_of_evaluation_does_not_change_its_loss(tmp_path):
    words = ["--tensor-model-parallel-size", "2", "--eval-iters", "1", "--eval-interval", "2"]
    words += ["--split", "50,50,0"]
    validation_losses = []
    for size in ("3", "1"):
        folder = tmp_path / size
        more = ["--eval-micro-batch-size", size, "--tensorboard-dir", str(folder)]
        run = start([*CPU, *MODEL, *TRAINING, *MOCK, *words, *more], 2)
        assert run.codes == [0, 0], run.output[-4000:]
        validation_losses.append(scalars(folder)["lm loss validation"][2])
    assert validation_losses[1] == pytest.approx(validation_losses[0], rel=1e-5)


def test_experts_that_only_predict_further_tokens_are_trained(tmp_path):
    model = [word for word in MODEL if word not in ("--num-layers", str(LAYERS))]
    words = ["--hybrid-layer-pattern", "*-*-/*E", "--num-experts", "4", "--moe-router-topk", "2"]
    words += ["--moe-ffn-hidden-size", "24", "--moe-router-load-balancing-type", "none"]
    words += ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
    run = start([*CPU, *model, *TRAINING, *MOCK, *words, "--tensorboard-dir", str(tmp_path)])
    assert run.codes == [0], run.output[-4000:]
    assert losses(tmp_path).keys() == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("", None),
    ],
)
def test_peak_of_a_gpu(name, peak):
    from kha_megatron.training.speed import find_peak

    assert find_peak(name) == peak


def _describe(asked, built, layout):
    from kha_megatron.mcore.attention import describe_model
    from kha_megatron.mcore.specs import kha_layer_spec
    from tests.distributed import models

    models.initialize(**layout)
    config = models.transformer_config(**layout)
    # only the last stage is built wrongly, and all ranks must fail
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    kha = built if last else asked
    spec = kha_layer_spec(config, kha)
    model = models.gpt_model(config, kha, layer_spec=spec, perturbed=False)
    try:
        return describe_model([model], asked)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("built", [HeadsConfig(), HeadsConfig(Knock(query="linear", value="mlp"))])
def test_a_model_that_was_built_with_another_spec_is_refused_on_every_rank(ranks, built):
    layout = {"pipeline_model_parallel_size": 2}
    for answer in ranks(_describe, 2, HeadsConfig(Knock(value="mlp")), built, layout):
        assert isinstance(answer, ConfigError)
        assert str(answer).startswith("1 of 2 layers were built without the requested KHA")


TIED = "--kha-preset kha_mlp --kha-attention gta --kv-channels 8 --rotary-percent 0.5"
GROUPED = """--kha-preset kha_linear --kha-attention gla --multi-latent-attention --rope-type rope
--q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10"""
QUERY_GROUPS = ["--group-query-attention", "--num-query-groups", "2"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "knocks", "added"),
    [
        pytest.param(TIED, "value=mlp in gta", 3 * 8**2, id="gta"),
        pytest.param(
            GROUPED,
            "query=linear key=linear value=linear in gla",
            2 * 6**2 + 10**2,
            id="gla",
        ),
    ],
)
def test_other_kinds_of_attention_train_and_are_recorded(corpus, tmp_path, words, knocks, added):
    words = [*words.split(), "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    kind = knocks[-3:]
    without = QUERY_GROUPS if kind == "gla" else []
    run, checkpoint = train(words, corpus, tmp_path, 2, without=without)
    assert run.knocks == f"knocks {knocks} in 4 of 4 layers: {added * LAYERS} parameters added"
    assert str(read_kha_config(checkpoint)) == knocks
    for weight in read_knock_weights(checkpoint).values():
        for matrix in weight:
            assert not torch.equal(matrix, torch.eye(len(matrix)))


def test_a_bf16_run_starts_with_the_loss_of_the_baseline(corpus, tmp_path):
    """KHA starts at the identity bit for bit. After a step, the losses differ."""
    first_losses = set()
    second_losses = set()
    for preset in ("baseline", "kha_mlp", "kha_linear"):
        folder = tmp_path / preset
        words = [*CPU, *MODEL, *TRAINING, *corpus, "--bf16", "--train-iters", "2"]
        words += ["--kha-preset", preset, "--tensorboard-dir", str(folder)]
        run = start(words)
        assert run.codes == [0], run.output[-4000:]
        history = losses(folder)
        first_losses.add(history[1])
        second_losses.add(history[2])
    assert len(first_losses) == 1
    assert len(second_losses) == 3
