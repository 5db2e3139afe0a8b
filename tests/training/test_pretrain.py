"""Whole runs of ``python -m kha_megatron.training`` on the CPU, in Megatron's layouts."""

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.checkpoint import MegatronCheckpoint
from tests.training.conftest import EXPERTS, HEAD_DIM, LAYERS, MODEL, TRAINING, losses, start

CPU = ["--device", "cpu"]


def train(words, corpus, folder, ranks, **kwargs):
    saved = ["--save", str(folder / "save"), "--tensorboard-dir", str(folder / "tensorboard")]
    run = start([*CPU, *MODEL, *TRAINING, *corpus, *words, *saved], ranks, **kwargs)
    assert set(run.codes) == {0}, run.output[-4000:]
    history = losses(folder / "tensorboard")
    assert sorted(history) == list(range(1, 9))
    # 384 tokens guessed evenly are 5.95; a few iterations learn which are frequent
    assert 5.4 < history[1] < 6.6
    assert history[8] < history[1] - 0.7
    return run, MegatronCheckpoint.open(folder / "save")


def moved(weights):
    """Whether training changed every shared matrix: its gradient arrived in every layer."""
    return [
        all(not torch.equal(matrix, torch.eye(HEAD_DIM)) for matrix in weight)
        for weight in weights.values()
    ]


def test_experts_with_tensor_and_sequence_parallelism_under_torchrun(corpus, tmp_path):
    words = ["--kha-preset", "kha_mlp", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    words += [*EXPERTS, "--moe-token-dispatcher-type", "alltoall"]
    run, checkpoint = train(words, corpus, tmp_path, 2, torchrun=True)
    added = 3 * HEAD_DIM**2 * LAYERS
    assert run.knocks == f"knocks value=mlp in 4 of 4 layers: {added} parameters added"
    assert run.output.count("a correctness device, not a fast one") == 1
    assert checkpoint.kha == KHAConfig(value="mlp")
    assert checkpoint.args["kha_preset"] == "kha_mlp"
    assert checkpoint.args["kha_init"] == "identity"
    weights = checkpoint.knock_weights()
    assert list(weights) == [(layer, "value") for layer in range(LAYERS)]
    assert all(moved(weights))


def test_pipeline_stages_are_counted_together(corpus, tmp_path):
    """Two ranks of two virtual stages: each holds half of the layers."""
    words = ["--kha-preset", "kha_linear", "--kha-value", "gate"]
    words += ["--pipeline-model-parallel-size", "2"]
    words += ["--num-layers-per-virtual-pipeline-stage", "1"]
    run, checkpoint = train(words, corpus, tmp_path, 2)
    added = 3 * HEAD_DIM**2 * LAYERS
    expected = f"query=linear key=linear value=gate in 4 of 4 layers: {added} parameters added"
    assert run.knocks == f"knocks {expected}"
    assert checkpoint.kha == KHAConfig(query="linear", key="linear", value="gate")
    assert all(moved(checkpoint.knock_weights()))


NAN_IN_ITERATION_3 = """
import sys
from kha_megatron.training.arguments import choose_device
choose_device(sys.argv)
from kha_megatron.training import pretrain
step, calls = pretrain._forward_step, []
def damaged(data, model, *rest):
    calls.append(1)
    if len(calls) == 5:  # two microbatches an iteration
        weight = next(p for n, p in model.named_parameters() if n.endswith("knock_value.weight"))
        weight.data[0, 1, 2] = float("nan")
    return step(data, model, *rest)
pretrain._forward_step = damaged
pretrain.run(0.0)
"""


def test_a_nan_stops_the_run_before_the_optimizer_moves_a_weight(corpus, tmp_path):
    """Megatron's own check, which it makes from the second iteration on."""
    words = ["--kha-preset", "kha_mlp", "--save", str(tmp_path)]
    run = start([*CPU, *MODEL, *TRAINING, *corpus, *words], program=NAN_IN_ITERATION_3)
    assert run.codes == [16]  # Megatron's code for a result that it cannot trust
    assert "found NaN in the loss of this rank" in run.output
    assert "iteration        2/" in run.output
    assert "iteration        3/" not in run.output
    # what it saves for a diagnosis is the state before the step: one step would spread the NaN
    checkpoint = MegatronCheckpoint.open(tmp_path)
    assert checkpoint.path.name == "iter_0000002"
    bad = {key: int(checkpoint.tensor(key).isnan().sum()) for key in checkpoint.keys()}  # noqa: SIM118
    assert {key: n for key, n in bad.items() if n} == {
        "decoder.layers.self_attention.knock_value.weight": 1
    }


def _describe(asked, built, layout):
    from kha_megatron.mcore.monitor import describe_model
    from kha_megatron.mcore.specs import kha_layer_spec
    from tests.distributed import models

    models.initialize(**layout)
    config = models.transformer_config(**layout)
    # the last stage only is built wrongly: all must hear of it
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    kha = built if last else asked
    spec = kha_layer_spec(config, kha)
    model = models.gpt_model(config, kha, layer_spec=spec, perturbed=False)
    try:
        return describe_model([model], asked)
    except ConfigError as error:
        return error


@pytest.mark.parametrize(
    "built",
    [KHAConfig(), KHAConfig(value="gate"), KHAConfig(query="linear", value="mlp")],
    ids=["none", "another variant", "one too many"],
)
def test_a_model_that_was_built_with_another_spec_is_refused_on_every_rank(ranks, built):
    layout = {"pipeline_model_parallel_size": 2}
    for answer in ranks(_describe, 2, KHAConfig(value="mlp"), built, layout):
        assert isinstance(answer, ConfigError)
        assert str(answer).startswith("1 of 2 layers were built without the asked-for KHA")


def test_the_baseline_counts_no_layer(ranks):
    layout = {"pipeline_model_parallel_size": 2}
    answers = ranks(_describe, 2, KHAConfig(), KHAConfig(), layout)
    assert answers == ["knocks nothing (baseline) in 0 of 2 layers: 0 parameters added"] * 2
