"""A new KHA model equals its baseline bit for bit (section 3.3)."""

import pytest
import torch

from kha_megatron.heads.knock import MATRICES
from kha_megatron.hf import KHAForCausalLM
from kha_megatron.hf.modeling_kha import HeadSharedLinear
from tests.hf.conftest import FAMILY, LATENT, MOE, every_projection, make_config, make_model, tokens

CASES = {
    **{v: (every_projection(v), {}) for v in MATRICES},
    "moe": ({"value": "mlp"}, MOE),
    **FAMILY,
}


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_new_matrices_are_an_exact_no_op(name, dtype):
    kha, sizes = CASES[name]
    baseline = make_model(dtype=dtype, **sizes)
    knocked = make_model(kha, learnt=False, dtype=dtype, **sizes)
    shared = [module for module in knocked.modules() if isinstance(module, HeadSharedLinear)]
    matrices_of_layer = sum(len(MATRICES[variant]) for variant in kha.values())
    assert len(shared) == 3 * matrices_of_layer
    missing, unexpected = knocked.load_state_dict(baseline.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all("_knock." in name for name in missing)
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(knocked(ids).logits, baseline(ids).logits)


@pytest.mark.parametrize("sizes", [{}, MOE, LATENT, {"kha_collaborative": {"dim": 14}}])
def test_norms_around_zero_start_as_ordinary_norms(sizes):
    torch.manual_seed(4)
    centered = KHAForCausalLM(make_config(**sizes, zero_centered_norms=True)).eval()
    ordinary = KHAForCausalLM(make_config(**sizes)).eval()
    weights = centered.state_dict()
    for name in list(weights):
        if name.endswith("norm.weight"):
            del weights[name]
    missing, unexpected = ordinary.load_state_dict(weights, strict=False)
    assert not unexpected
    assert len(missing) > 2 * len(centered.model.layers)
    assert not any(centered.get_parameter(name).any() for name in missing)
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(centered(ids).logits, ordinary(ids).logits)
