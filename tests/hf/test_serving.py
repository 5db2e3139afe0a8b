"""Test what the transformers backends of vLLM and SGLang do to a model.

They pass their own attention function with packed sequences, replace linear layers and experts, and
split layers into pipeline stages. ``tests/serving`` runs vLLM itself.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from kha_megatron.hf import KHAModel, KHAModelConfig
from kha_megatron.hf.modeling_kha import vllm_obstacle
from tests.hf.conftest import MIXED, MOE, TOKENS, make_model, tokens
from tests.hf.test_uses import MODELS, model_of

SEQUENCES = (3, 4)


def packed_attention(module, query, key, value, attention_mask, scaling, calls=None, **ignored):
    """Attend as servers do: state per layer, flat tokens ``[tokens, H * D]``, packed sequences."""
    calls.append((module, query.shape, key.shape, value.shape, scaling))
    assert attention_mask is None, "a server has its own mask"
    sequence = torch.arange(len(SEQUENCES)).repeat_interleave(torch.tensor(SEQUENCES))
    token = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (token[:, None] >= token)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        visible,
        scale=scaling,
        enable_gqa=True,
    )
    return output.transpose(1, 2).flatten(2)[0], None


AttentionInterface.register("packed", packed_attention)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "talking"])
def test_a_packed_row_equals_separate_sequences(name):
    model = model_of(name, attention="packed").model
    twin = model_of(name).model
    twin.load_state_dict(model.state_dict())
    sequences = [tokens(1, n) for n in SEQUENCES]
    calls = []
    positions = torch.cat([torch.arange(length) for length in SEQUENCES])
    with torch.no_grad():
        outputs = model(
            input_ids=torch.cat(sequences, 1),
            position_ids=positions[None],
            use_cache=False,
            return_dict=False,
            calls=calls,
        )
        packed = outputs[0][0]
        separate = torch.cat([twin(ids).last_hidden_state[0] for ids in sequences])
    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)
    assert [call[0] for call in calls] == [layer.self_attn for layer in model.layers]
    if name == "dense":
        module, query_shape, key_shape, value_shape, scaling = calls[0]
        assert module.is_causal
        assert query_shape == (1, 6, 7, 10)
        assert key_shape == (1, 3, 7, 10)
        assert value_shape == (1, 3, 7, 10)
        assert scaling == 10**-0.5


class OtherLinear(nn.Module):
    """A server's linear layer, which is not an ``nn.Linear``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.tensor = nn.Parameter(linear.weight.detach().clone())

    def forward(self, x):
        return F.linear(x, self.tensor)


class OtherExperts(nn.Module):
    """A server's experts, with the arguments of transformers' experts."""

    def __init__(self, experts) -> None:
        super().__init__()
        self.gate_up = experts.gate_up_proj.data
        self.down = experts.down_proj.data

    def forward(self, hidden_states, topk_ids, topk_weights):
        assert hidden_states.shape == (2 * TOKENS, 22)
        assert topk_ids.shape == topk_weights.shape == (2 * TOKENS, 2)
        assert not topk_ids.is_floating_point()
        assert topk_weights.dtype == torch.float32
        gate_up = torch.einsum("nc,efc->nef", hidden_states, self.gate_up)
        gate, up = gate_up.chunk(2, -1)
        outputs = torch.einsum("nef,ecf->nec", F.silu(gate) * up, self.down)
        chosen = outputs.gather(1, topk_ids[..., None].expand(-1, -1, 22))
        return (chosen * topk_weights[..., None]).sum(1)


def test_linear_layers_and_experts_can_be_replaced():
    model = make_model(MIXED, **MOE)
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, OtherLinear(child))
                elif name == "experts":
                    setattr(module, name, OtherExperts(child))
        assert not any(isinstance(module, nn.Linear) for module in model.modules())
        torch.testing.assert_close(
            model(ids).logits,
            expected,
            rtol=1e-5,
            atol=1e-5,
        )


class Missing(nn.Identity):
    """A server's placeholder for a module of another stage. Returns its first argument."""

    def forward(self, x, *args, **kwargs):
        return x


def test_stages_with_missing_layers_follow_the_plan():
    whole = make_model(MIXED, **MOE).model
    plan = KHAModelConfig.base_model_pp_plan
    lists = [name for name in plan if isinstance(getattr(whole, name), nn.ModuleList)]
    assert lists == ["layers"]

    def build_stage(missing):
        stage = make_model(MIXED, **MOE).model
        stage.load_state_dict(whole.state_dict())
        for layer in missing:
            stage.layers[layer] = Missing()
        return stage

    first = build_stage(missing=[2])
    first.norm = Missing()
    second = build_stage(missing=[0, 1])
    second.embed_tokens = Missing()
    ids = tokens()
    with torch.no_grad():
        hidden = first(ids, use_cache=False).last_hidden_state
        last = second(inputs_embeds=hidden, use_cache=False).last_hidden_state
        assert torch.equal(last, whole(ids).last_hidden_state)


GROUPS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 4,
}


@pytest.mark.parametrize(
    ("settings", "served", "by_backend"),
    [
        ({"kha_value": "mlp", "kha_gate": {"output": "element"}}, True, True),
        ({"kha_attention": "gta"}, False, False),
        ({"kha_talking": {}}, False, False),
        ({"kha_moh": {"share": 0.75}}, False, False),
        ({"hidden_act": "gelu"}, False, False),
        # The backend ranks groups by their best two scores with sigmoid, otherwise by the best.
        (GROUPS | {"topk_group": 2, "scoring_func": "sigmoid"}, True, False),
        (GROUPS | {"topk_group": 1, "scoring_func": "sigmoid"}, True, True),
        (GROUPS | {"topk_group": 2}, True, True),
        (GROUPS | {"topk_group": 1}, True, False),
    ],
)
def test_models_that_vllm_cannot_compute_are_refused(settings, served, by_backend):
    config = KHAModelConfig(**settings)
    assert (vllm_obstacle(config, by_backend=False) is None) == served
    assert (vllm_obstacle(config, by_backend=True) is None) == by_backend
    config._attn_implementation = "vllm"
    if not by_backend:
        with torch.device("meta"), pytest.raises(ValueError, match="vLLM"):
            KHAModel(config)
