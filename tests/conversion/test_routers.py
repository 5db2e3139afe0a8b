"""Compare the routers of Megatron and transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kha_megatron.conversion.hf_configs import fill_missing_tensors, from_hf_config, to_hf_config
from kha_megatron.hf.modeling_kha import KHARouter
from kha_megatron.model.megatron import to_arguments
from tests.conversion.models import SIZES

TOKENS, EXPERTS = 9, 8
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES = {
    "softmax": {},
    "softmax before the choice": {"normalizes_topk": False},
    "softmax, top-1": {"moe_router_topk": 1, "normalizes_topk": False},
    "sigmoid": SIGMOID,
    "sigmoid, scaled": SIGMOID | {"moe_router_topk": 2, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, scaled, top-1": SIGMOID
    | {"moe_router_topk": 1, "normalizes_topk": False, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid, groups": SIGMOID
    | {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "softmax, groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "softmax, groups, rounded": {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    | {"moe_router_topk": 4, "moe_router_dtype": None},
    "softmax before the choice, groups": {"normalizes_topk": False, "moe_router_topk": 2}
    | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
}
"""Fields of the architecture besides those of :data:`SMALL`."""
SMALL = {
    "num_experts": EXPERTS,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 4,
    "moe_layer_freq": (1, 1),
    "moe_router_dtype": "fp32",
}


def megatron_routing(logits, bias, args):
    """Return the dense weights ``[tokens, experts]`` of Megatron's router."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    with torch.enable_grad():  # as in training; without, its top-k is unsorted
        weights, _ = topk_routing_with_score_function(
            torch.from_numpy(logits),
            args["moe_router_topk"],
            use_pre_softmax=args["moe_router_pre_softmax"],
            num_groups=args["moe_router_num_groups"],
            group_topk=args["moe_router_group_topk"],
            scaling_factor=args["moe_router_topk_scaling_factor"],
            score_function=args["moe_router_score_function"],
            expert_bias=torch.from_numpy(bias) if args["moe_router_enable_expert_bias"] else None,
        )
    return weights.numpy()


def _dense(router, logits, bias):
    """Return the dense weights of a transformers router with an identity weight."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        _, weights, experts = router(torch.from_numpy(logits))
    return torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights).numpy()


@pytest.mark.parametrize("case", CASES)
def test_routers_agree(ranks, case):
    sizes = SMALL | CASES[case]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator).numpy()
    logits[3] = 0.5  # all experts alike
    logits[4, 2:6] = logits[4].max() + 1  # four of them share the first place
    logits[5] = -40.0  # sigmoids that vanish beside 1e-20
    bias = 0.4 * torch.randn(EXPERTS, generator=generator).numpy()
    bias[[1, 6]] = bias[1]
    raw = {"model_type": "qwen3", **SIZES, "hidden_size": EXPERTS, "intermediate_size": 4}

    model = replace(from_hf_config(raw), **sizes)
    expected = ranks(megatron_routing, 1, logits, bias, to_arguments(model))[0]
    assert ((expected != 0).sum(-1) <= model.moe_router_topk).all()
    stock = "glm4_moe" if model.moe_router_enable_expert_bias else "qwen3_moe"
    routers = {stock: Glm4MoeTopkRouter if stock == "glm4_moe" else Qwen3MoeTopKRouter}
    if stock == "qwen3_moe" and model.moe_router_num_groups:
        del routers[stock]  # it has none
    routers["kha"] = KHARouter
    for family, router in routers.items():
        config = to_hf_config(fill_missing_tensors(model, family), family)
        found = _dense(router(config), logits, bias)
        ties = [3, 4, 5] if not model.moe_router_num_groups else []
        clear = [token for token in range(TOKENS) if token not in ties]
        # transformers divides after a softmax over all experts where Megatron takes it over the
        # chosen ones: the same but for the last bits
        exact = not (family == "qwen3_moe" and model.normalizes_topk)
        limit = 0.0 if exact else 1.5e-7
        np.testing.assert_allclose(found[clear], expected[clear], rtol=limit, atol=0)
        # among equals either choice is right: the weights are the same whoever gets them
        np.testing.assert_allclose(
            np.sort(found[ties]), np.sort(expected[ties]), rtol=max(limit, 1e-6), atol=0
        )
