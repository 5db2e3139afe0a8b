"""Folding in Transformer Engine's own linear layers, which run on the CPU (``cpu.engine``).

It reaches where a layer looks for its weight, what its autograd functions save, and when it caches
its FP8 copy.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig

pytestmark = pytest.mark.te

LINEAR = KHAConfig(query="linear", key="linear", value="linear")
HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 6, 3, 10, 28, 7, 2
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def layer(fold, plain, overrides):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    from kha_megatron.mcore.specs import kha_layer_spec
    from tests.distributed import models

    config = models.transformer_config(
        transformer_impl="transformer_engine",
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        hidden_size=HIDDEN,
        qk_layernorm=False,
        **overrides,
    )
    spec = kha_layer_spec(config, replace(LINEAR, fold=fold))
    spec = spec.layer_specs[0].submodules.self_attention
    if plain:
        spec.submodules.linear_qkv = TEColumnParallelLinear
    torch.manual_seed(3)
    built = build_module(spec, config=config, layer_number=1)
    models.perturb(built)
    return built


def two_ways(plain, overrides):
    """Errors of folded against direct: what the projection returns, and all gradients."""
    from tests.distributed import models

    models.initialize()
    seen = []
    for fold in ("never", "always"):
        built = layer(fold, plain, overrides)
        found = {}
        for microbatch in range(3):
            generator = torch.Generator().manual_seed(microbatch)
            hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).requires_grad_()
            outputs = built.get_query_key_value_tensors(hidden)
            upstream = [torch.randn(x.shape, generator=generator) for x in outputs]
            torch.autograd.backward(outputs, upstream)
            found |= {f"output {microbatch}.{i}": x.detach() for i, x in enumerate(outputs)}
            found[f"input gradient {microbatch}"] = hidden.grad
        found |= {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
        seen.append(found)
    direct, folded = seen
    assert direct.keys() == folded.keys()
    name = type(built.linear_qkv).__name__
    return name, {n: ((folded[n] - x).norm() / x.norm()).item() for n, x in direct.items()}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("plain", [False, True], ids=["with-norm", "plain"])
def test_folded_equals_direct(ranks_with_engine, plain, bias):
    name, found = ranks_with_engine(two_ways, 1, plain, {"add_qkv_bias": bias})[0]
    assert name == ("TEColumnParallelLinear" if plain else "TELayerNormColumnParallelLinear")
    assert len(found) == 3 * 4 + 1 + 3 + bias + (not plain)
    assert max(found.values()) < 1e-5, found


def model(fold, **options):
    from tests.distributed.models import initialize
    from tests.gpu import models

    initialize()
    kha = replace(LINEAR, fold=fold)
    return models.build(kha, "transformer_engine", torch.bfloat16, moe=False, **options)


def microbatches_of_both_ways(caches, interleaved, forgets):
    """Return the logits of three microbatches and the weights after each of two steps.

    The second microbatch is long and folds. ``interleaved`` runs all forward passes of a step
    before the backward passes, as pipeline stages do, and otherwise nothing is cached between
    microbatches. ``forgets`` lets Transformer Engine cache the folded weight.
    """
    from kha_megatron.mcore import folding
    from tests.gpu import models

    built = model("auto", **FP8)
    for module in built.modules():
        if hasattr(module, "disable_parameter_transpose_cache"):
            module.disable_parameter_transpose_cache = not caches
    tokens, positions, mask = models.batch()
    long, short = (len(tokens), 1)
    ways = [layer.self_attention.folding.least_tokens for layer in built.decoder.layers]
    assert all(tokens[:short].numel() < least < tokens.numel() for least in ways)
    found = []
    rule = mock.patch.object(folding, "_without_weight_cache", contextlib.nullcontext)
    with rule if forgets else contextlib.nullcontext():
        for _ in range(2):
            built.set_is_first_microbatch()
            outputs = []
            for count in (short, long, short):
                outputs.append(built(tokens[-count:], positions[-count:], mask))
                if not interleaved:
                    outputs[-1].float().pow(2).mean().backward()
                    built.set_is_first_microbatch()
            for output in outputs if interleaved else ():
                output.float().pow(2).mean().backward()
            with torch.no_grad():
                for parameter in built.parameters():
                    parameter -= parameter.grad / parameter.grad.norm()
                    parameter.grad = None
            found += [x.detach().clone() for x in (*outputs, *built.parameters())]
    return found


def difference(caches, forgets):
    """Return the largest relative error of interleaved microbatches."""
    got = microbatches_of_both_ways(caches, True, forgets)
    want = microbatches_of_both_ways(caches, False, False)
    pairs = zip(got, want, strict=True)
    return max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)


@pytest.mark.parametrize("caches", [True, False], ids=["cached", "not-cached"])
def test_a_microbatch_uses_no_quantized_weight_of_another_one(ranks_with_engine, caches):
    """Nothing is cached if Megatron does not pass ``is_first_microbatch``."""
    assert ranks_with_engine(difference, 1, caches, False) == [0]


def test_without_the_rule_microbatches_use_weights_of_others(ranks_with_engine):
    assert ranks_with_engine(difference, 1, True, True)[0] > 0.5
