"""Section 3.3: a new model starts as the plain one, bit for bit."""

import itertools
from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from kha_megatron.hf import KHAForCausalLM
from kha_megatron.hf.modeling_kha import HeadSharedLinear
from tests.hf.conftest import MOE, every_projection, make_config, make_model, tokens

CASES = [
    *({p: v} for p, v in itertools.product(PROJECTIONS, MATRICES)),
    *(every_projection(v) for v in MATRICES),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kha", CASES, ids=lambda kha: "-".join(f"{p}_{kha[p]}" for p in kha))
def test_every_variant_starts_as_an_exact_no_op(kha, dtype):
    baseline = make_model(dtype=dtype)
    knocked = make_model(kha, learnt=False, dtype=dtype)
    assert sum(isinstance(m, HeadSharedLinear) for m in knocked.modules()) == 3 * sum(
        len(MATRICES[v]) for v in kha.values()
    )
    missing, unexpected = knocked.load_state_dict(baseline.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all("_knock." in name for name in missing)
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(knocked(ids).logits, baseline(ids).logits)


def test_a_plain_checkpoint_loads_as_a_knocked_model_that_does_the_same(tmp_path):
    baseline = make_model(**MOE)
    baseline.save_pretrained(tmp_path)
    config = make_config({"value": "mlp"}, **MOE)
    knocked = deepcopy(KHAForCausalLM.from_pretrained(tmp_path, config=config))  # see test_saving
    ids = tokens()
    assert torch.equal(knocked(ids).logits, baseline(ids).logits)


def test_transformers_initialisation_leaves_the_matrices_as_they_should_start():
    # from_config initialises module by module: an nn.Linear branch would overwrite the identity.
    config = make_config({"query": "linear", "value": "mlp"})
    attention = AutoModelForCausalLM.from_config(config).model.layers[2].self_attn
    eye = torch.eye(10)
    assert torch.equal(attention.q_knock.proj.weight, eye)
    assert torch.equal(attention.v_knock.up_proj.weight, eye)
    assert torch.equal(attention.v_knock.down_proj.weight, eye)
    assert torch.equal(attention.v_knock.gate_proj.weight, torch.zeros(10, 10))
    assert isinstance(attention.k_knock, nn.Identity)


def test_random_start_draws_every_matrix():
    config = make_config(every_projection("mlp"), kha_init="random", initializer_range=0.02)
    weights = [
        m.weight for m in KHAForCausalLM(config).modules() if isinstance(m, HeadSharedLinear)
    ]
    assert len(weights) == 27
    for weight in weights:
        assert 0.01 < weight.std() < 0.03
        assert weight.abs().max() < 0.2
