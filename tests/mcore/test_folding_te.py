"""Folding in Transformer Engine's own linear layers, which run on the CPU (``cpu.engine``).

It reaches where a layer looks for its weight, what its autograd functions save, and when it makes
its FP8 copy anew.
"""

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


def after_a_microbatch_of_the_other_way(forgets):
    """Relative error of the logits of a long microbatch, which folds, after a short one, which
    does not, against those of a step's first microbatch; ``forgets`` takes the rule out."""
    from kha_megatron.mcore.folding import Folding
    from tests.gpu import models

    folds = Folding.folds

    def unnoticed(folding, hidden_states):
        folding.was_folded = folds(folding, hidden_states)
        return folding.was_folded

    built = model("auto", **FP8)
    tokens, positions, mask = models.batch()
    built.set_is_first_microbatch()
    want = built(tokens, positions, mask).detach().float()
    built.set_is_first_microbatch()
    with mock.patch.object(Folding, "folds", unnoticed if forgets else folds):
        built(tokens[:1], positions[:1], mask).float().sum().backward()
        got = built(tokens, positions, mask).detach().float()
    ways = [layer.self_attention.folding.least_tokens for layer in built.decoder.layers]
    assert all(tokens[:1].numel() < least < tokens.numel() for least in ways)
    return ((got - want).norm() / want.norm()).item()


def test_a_weight_cached_in_fp8_is_not_taken_for_the_other_one(ranks_with_engine):
    assert ranks_with_engine(after_a_microbatch_of_the_other_way, 1, False)[0] == 0
    assert ranks_with_engine(after_a_microbatch_of_the_other_way, 1, True)[0] > 0.5
