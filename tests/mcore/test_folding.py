"""Folded and direct application give the same outputs and gradients.

``tests/distributed/test_parallelism.py`` compares parallel layouts with an unsharded run that does
not fold. These tests compare one layer in float64, and check when a layer is folded.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads.fold_autograd import fold_matrices
from tests.mcore.test_attention import BATCH, HEADS, HIDDEN, TOKENS, attention_layer

LINEAR = KHAConfig(query="linear", key="linear", value="linear")
VALUE = KHAConfig(value="linear")
KHAS = [LINEAR, VALUE, KHAConfig(query="gate", key="linear", value="mlp")]
EXACT = 1e-12  # relative error in float64


def test_gradients_of_the_fold_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    owners = (0, 0, 1, 2, None, 0, 2)  # the last matrix has no head on this rank
    matrices = [draw(5, 5) for _ in range(4)]
    for rows in (draw(7 * 5, 3), draw(7 * 5)):
        torch.autograd.gradcheck(lambda rows, *m: fold_matrices(rows, m, owners), (rows, *matrices))
        folded = fold_matrices(rows, matrices, owners)
        for head, owner in enumerate(owners):
            mine = slice(5 * head, 5 * head + 5)
            matrix = torch.eye(5).double() if owner is None else matrices[owner]
            torch.testing.assert_close(folded[mine], matrix.T @ rows[mine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_identity_folds_bit_for_bit(dtype):
    rows = torch.randn(6 * 8, 5).to(dtype)
    identity = torch.eye(8, dtype=dtype)
    assert torch.equal(fold_matrices(rows, [identity], (0, 0, None, 0, None, 0)), rows)


def layer(models, kha, **overrides):
    """One attention of its layer spec, with weights that do not depend on ``kha.fold``."""
    torch.manual_seed(3)
    built = attention_layer(models, kha, **overrides)
    models.perturb(built)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias") or "layernorm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return built


def project(built, tokens=TOKENS, seed=5):
    """What the attention computes of some tokens, and its gradients accumulate."""
    dtype = built.linear_proj.weight.dtype
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, BATCH, built.config.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
    output, _ = built(hidden, mask)
    if torch.is_grad_enabled():
        upstream = torch.randn(output.shape, generator=generator, dtype=dtype)
        output.backward(upstream)
    return output.detach(), hidden.grad


def two_ways(khas, overrides):
    """Return, for each configuration, the relative errors of the folded layer."""
    from kha_megatron.mcore import folding
    from tests.distributed import models

    models.initialize()
    found = []
    for kha in khas:
        seen = []
        for fold in ("never", "always"):
            built = layer(
                models, replace(kha, fold=fold), params_dtype=torch.float64, **overrides
            ).double()
            with mock.patch.object(folding, "fold_matrices", wraps=fold_matrices) as fold_weight:
                results = [project(built, seed=seed) for seed in (5, 6, 7)]  # microbatches
            assert fold_weight.called == (fold == "always")
            tensors = {n: p.grad for n, p in built.named_parameters()}
            for i, (output, gradient) in enumerate(results):
                tensors |= {f"output {i}": output, f"input gradient {i}": gradient}
            seen.append(tensors)
        direct, folded = seen
        assert direct.keys() == folded.keys()
        found.append({n: ((folded[n] - x).norm() / x.norm()).item() for n, x in direct.items()})
    return found


KINDS = [
    {},
    {"num_query_groups": 1, "add_qkv_bias": True, "qk_layernorm": False},
    {"num_query_groups": HEADS, "attention_output_gate": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=["norm", "mqa-bias-no-norm", "mha-output-gate"])
def test_folded_equals_direct(ranks, kind):
    for kha, found in zip(KHAS, ranks(two_ways, 1, KHAS, kind)[0], strict=True):
        parameters = 2 + len(kha.variants) + 2 * kind.get("qk_layernorm", True)
        assert len(found) == 6 + parameters + ("add_qkv_bias" in kind)
        wrong = {name: error for name, error in found.items() if not error < EXACT}
        assert not wrong, kha


def chosen(kha, training, tokens, overrides, sizes):
    """Return which of these sequence lengths are folded."""
    from tests.distributed import models

    models.initialize(**sizes)
    fused = overrides.pop("fused", False)
    built = layer(models, kha, **overrides).train(training)
    built.config.gradient_accumulation_fusion = fused
    return [built.folding.folds(torch.empty(n, BATCH, HIDDEN)) for n in tokens]


SHARED = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("kha", "training", "tokens", "overrides"),
    [
        (LINEAR, True, (14, 15), {}),  # all 12 heads are linear: 28 tokens in two sequences
        (VALUE, True, (56, 57), {}),  # 3 of 12 heads: four times as many
        (LINEAR, False, (14, 15), {}),
        (LINEAR, True, (18, 19), {"fused": True}),  # 4/3: folding ends gradient fusion
        (LINEAR, True, (7, 8), {**SHARED, "sequence_parallel": True, "num_query_groups": 2}),
    ],
    ids=["all", "value", "evaluation", "fused", "sequence-parallel"],
)
def test_auto_folds_where_it_moves_fewer_bytes(ranks, kha, training, tokens, overrides):
    sizes = {name: overrides[name] for name in SHARED if name in overrides}
    for ways in ranks(chosen, 2 if sizes else 1, kha, training, tokens, overrides, sizes):
        assert ways == [False, True]


def order_of_the_wait_and_the_fold():
    """Return the order of waiting for the gathered QKV weight and of folding it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from kha_megatron.mcore import folding
    from tests.distributed import models

    models.initialize()
    built = layer(models, replace(LINEAR, fold="always"))
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 1}
    ddp = DistributedDataParallel(
        built.config, DistributedDataParallelConfig(overlap_param_gather=True, **options), built
    )
    events = []
    group = ddp.param_to_bucket_group[built.linear_qkv.weight]
    wait = mock.Mock(side_effect=lambda **options: events.append("wait"))
    fold = mock.Mock(side_effect=lambda *args: events.append("fold") or fold_matrices(*args))
    with (
        torch.no_grad(),
        mock.patch.object(group, "finish_param_sync", wait),
        mock.patch.object(folding, "fold_matrices", fold),
    ):
        built.get_query_key_value_tensors(torch.randn(TOKENS, BATCH, HIDDEN))
    return events


def test_folding_waits_for_gathered_parameters(ranks):
    assert ranks(order_of_the_wait_and_the_fold, 1) == [["wait", "fold"]]


def thresholds():
    """Return the thresholds relative to bf16 without fusion, for training and for inference."""
    from tests.distributed import models

    models.initialize()
    found = []
    for training in (True, False):
        built = layer(models, LINEAR).train(training)
        plain = built.folding.least_tokens
        built.config.gradient_accumulation_fusion = True
        fused = built.folding.least_tokens
        built.config.fp8 = "hybrid"
        found.append((fused / plain, built.folding.least_tokens / plain))
    return found


def test_additional_memory_traffic_raises_the_threshold(ranks):
    training, inference = ranks(thresholds, 1)[0]
    assert training == pytest.approx((4 / 3, 5 / 3))
    assert inference == pytest.approx((1, 2))


@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ({"delay_wgrad_compute": True}, {}, "--delay-wgrad-compute"),
        ({"cuda_graph_impl": "local"}, {}, "CUDA graph"),
        ({"fp8_param": True}, {}, "--fp8-param-gather"),
        ({}, {"tensor_model_parallel_size": 4}, "10 heads of linear_qkv are not divisible by TP"),
    ],
    ids=["delayed-wgrad", "cuda-graph", "fp8-param", "pieces-of-heads"],
)
def test_obstacles_prevent_folding(ranks, options, sizes, words):
    for folds, obstacle, refusal in ranks(hindered, 4 if sizes else 1, sizes, options):
        assert not folds
        assert words in obstacle
        assert refusal.startswith(f"--kha-fold always is not supported: {obstacle}.")


def hindered(sizes, options):
    """Return whether ``auto`` folds, the obstacle, and what ``always`` raises."""
    from tests.distributed import models

    models.initialize(**sizes)
    heads = {"num_attention_heads": 8, "num_query_groups": 1} if sizes else {}
    built = layer(models, LINEAR, **heads, **sizes)
    parts = built.split.layout, built.knockings
    for name, value in options.items():  # Megatron accepts some of them with a GPU only
        setattr(built.config, name, value)
    folding = type(built.folding)(built, LINEAR, *parts)
    inputs = torch.empty(1000, BATCH, HIDDEN)
    with pytest.raises(ConfigError) as caught:
        type(built.folding)(built, replace(LINEAR, fold="always"), *parts).folds(inputs)
    return folding.folds(inputs), folding.obstacle, str(caught.value)


class Adapter(torch.nn.Module):
    """A low-rank adapter as libraries put it around a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.low = torch.nn.Linear(HIDDEN, linear.weight.shape[0], bias=False)

    def forward(self, x):
        output, bias = self.linear(x)
        return output + self.low(x), bias


def adapted():
    from tests.distributed import models

    models.initialize()
    outputs = []
    for fold in ("never", "auto"):
        built = layer(models, replace(LINEAR, fold=fold))
        torch.manual_seed(1)
        built.linear_qkv = Adapter(built.linear_qkv)
        outputs.append(project(built, tokens=40)[0])
    return torch.equal(*outputs)


def test_the_output_of_an_adapter_is_knocked_too(ranks):
    assert ranks(adapted, 1) == [True]
