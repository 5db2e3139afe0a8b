"""KHA-Linear that is folded once per training step.

``tests/distributed/test_parallelism.py`` compares gradients and training with an unsharded run that
does not fold.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from tests.distributed.cases import LINEAR, OVERLAP_ALL, case
from tests.distributed.launcher import RankError
from tests.distributed.parallelism import train
from tests.distributed.test_engine import beyond_one_process

STOCK = HeadsConfig()
VALUE = HeadsConfig(Knock(value="linear"))
LAYERS = 2
STEP_OPERATORS = 11
"""Most operators per step, layer and matrix."""


class Operators(TorchDispatchMode):
    """Counts all operators but views, which run no kernel."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:
            self.counts[str(function)] += 1
        return function(*args, **kwargs or {})


def data_parallel_model(kha, *, fold):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from kha_megatron.mcore.step_folding import fold_once_per_step
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config()
    model = models.gpt_model(config, kha)
    if fold:
        fold_once_per_step([model], kha)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp_config, model)


def count_operators(kha, fold):
    """Return the operators of three microbatches, and those at the end of the step."""
    from tests.distributed import models

    model = data_parallel_model(kha, fold=fold)
    tokens, positions, mask = models.batch()
    microbatches = []
    for _ in range(3):
        with Operators() as operators:
            losses = model(tokens, positions, mask, labels=tokens)
            losses.mean().backward()
        microbatches.append(operators.counts)
    with Operators() as operators:
        model.finish_grad_sync()
    return microbatches, operators.counts


@pytest.mark.fast
@pytest.mark.parametrize("kha", [LINEAR, VALUE], ids=str)
def test_a_microbatch_runs_the_operators_of_a_model_without_kha(ranks, kha):
    stock, stock_end = ranks(count_operators, 1, STOCK, False)[0]
    folded, folded_end = ranks(count_operators, 1, kha, True)[0]
    unfolded, _ = ranks(count_operators, 1, kha, False)[0]
    assert folded[1:] == stock[1:]
    assert unfolded[1].total() > stock[1].total()
    added = folded[0] - stock[0] + (folded_end - stock_end)
    print(f"{kha}: {added.total()} per step, not folded {unfolded[1] - stock[1]} per microbatch")
    assert 0 < added.total() <= STEP_OPERATORS * len(kha.variants) * LAYERS


def states_around_a_step():
    """Return the QKV weight before, in and after a step, and outputs in evaluation mode."""
    from tests.distributed import models

    tokens, positions, mask = models.batch()

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            losses = model(tokens, positions, mask, labels=tokens)
        model.train()
        return losses

    unfolded_model = data_parallel_model(LINEAR, fold=False)
    model = data_parallel_model(LINEAR, fold=True)
    weight = model.module.decoder.layers[0].self_attention.linear_qkv.weight
    weights = [weight.detach().clone()]
    outputs = [evaluate(unfolded_model), evaluate(model)]

    loss = model(tokens, positions, mask, labels=tokens).mean()
    weights.append(weight.detach().clone())
    loss.backward()
    model.finish_grad_sync()
    weights.append(weight.detach().clone())
    outputs.append(evaluate(model))

    model(tokens, positions, mask, labels=tokens)  # without a backward pass
    outputs.append(evaluate(model))
    weights.append(weight.detach().clone())
    return weights, outputs


def test_only_training_steps_use_the_folded_weight(ranks):
    weights, outputs = ranks(states_around_a_step, 1)[0]
    before, folded, after, after_evaluation = weights
    assert (folded - before).norm() > 0.1 * before.norm()
    assert torch.equal(after, before)
    assert torch.equal(after_evaluation, before)
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("sizes", [{"dp": 2, "ddp": OVERLAP_ALL}, {"tp": 2, "sp": True}])
def test_bfloat16_is_as_far_from_float32_as_without_folding(ranks, sizes):
    """Folding rounds the weight, and an unfolded model rounds the heads instead."""
    folded = case(khas=(LINEAR,), fold=True, bf16=True, steps=1, **sizes)
    assert not beyond_one_process(ranks, ranks, folded)


def refusal(kha, overrides, sizes):
    from kha_megatron.errors import ConfigError
    from kha_megatron.mcore.step_folding import fold_once_per_step
    from tests.distributed import models

    models.initialize(**sizes)
    config = models.transformer_config(**sizes | overrides)
    model = models.gpt_model(config, kha)
    with pytest.raises(ConfigError) as caught:
        fold_once_per_step([model], kha)
    return str(caught.value)


TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("kha", "overrides", "sizes", "message"),
    [
        (HeadsConfig(Knock(value="mlp")), {}, {}, "requires KHA-Linear, got value=mlp"),
        (LINEAR, {"multi_latent_attention": True}, {}, "does not support --multi-latent-attention"),
        (LINEAR, {"add_qkv_bias": True}, {}, "does not support --add-qkv-bias"),
        (
            LINEAR.updated(gate=Gate(output="head")),
            {"num_query_groups": 1},
            TP2,
            "does not support TP size 2 with 1 KV heads",
        ),
    ],
)
def test_what_cannot_be_folded_is_refused(ranks, kha, overrides, sizes, message):
    world = sizes.get("tensor_model_parallel_size", 1)
    for refused in ranks(refusal, world, kha, overrides, sizes):
        assert message in refused
        assert refused.endswith("Remove --kha-fold-linear.")
        assert "\n" not in refused


def test_fsdp_is_refused(ranks):
    with pytest.raises(RankError, match="requires Megatron's DistributedDataParallel"):
        ranks(train, 2, case(khas=(LINEAR,), fold=True, dp=2, fsdp="torch"))
