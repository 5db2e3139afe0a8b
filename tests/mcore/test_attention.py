"""Attention with KHA compared with stock Megatron."""

import pytest
import torch

from kha_megatron.config import KHAConfig

MIXED = KHAConfig(query="linear", key="gate", value="mlp")
HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 6, 3, 10, 28, 7, 2


def attention_layer(models, kha, built_with=None, **overrides):
    """One layer's attention, from the layer spec that a GPTModel would be built with."""
    config = models.transformer_config(
        num_attention_heads=HEADS,
        num_query_groups=overrides.pop("num_query_groups", GROUPS),
        kv_channels=overrides.pop("kv_channels", HEAD_DIM),
        hidden_size=HIDDEN,
        **overrides,
    )
    return models.attention(config, kha, **built_with or {})


def identity_outputs(kha, dtype, overrides):
    """Per-token losses of stock Megatron, of the baseline spec and of the knocked model."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.distributed import models

    config = models.transformer_config(
        params_dtype=dtype, bf16=dtype == torch.bfloat16, num_query_groups=2, **overrides
    )
    models.initialize()
    stock = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    outputs = []
    for configured, spec in ((KHAConfig(), stock), (KHAConfig(), None), (kha, None)):
        models.initialize()
        model = models.gpt_model(config, configured, layer_spec=spec, perturbed=False)
        tokens, positions, mask = models.batch()
        with torch.no_grad():
            outputs.append(model(tokens, positions, mask, labels=tokens))
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kha", [MIXED], ids=str)
def test_initial_value_is_identity_bit_for_bit(ranks, kha, dtype):
    stock, baseline, knocked = ranks(identity_outputs, 1, kha, dtype, {})[0]
    assert torch.equal(stock, baseline)
    assert torch.equal(stock, knocked)


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "none",
}


@pytest.mark.parametrize("overrides", [MOE, {"attention_output_gate": True}], ids=["moe", "gate"])
def test_identity_in_moe_and_with_output_gate(ranks, overrides):
    stock, baseline, knocked = ranks(identity_outputs, 1, MIXED, torch.float32, overrides)[0]
    assert torch.equal(stock, baseline)
    assert torch.equal(stock, knocked)


def random_start():
    """Matrices of a random start, for two layers, under this rank's own random state."""
    import torch.distributed as dist

    from tests.distributed import models

    models.initialize(seed=100 + dist.get_rank(), tensor_model_parallel_size=2)
    config = models.transformer_config(tensor_model_parallel_size=2)
    model = models.gpt_model(config, KHAConfig(value="mlp", init="random"), perturbed=False)
    return [layer.self_attention.knock_value.weight.detach() for layer in model.decoder.layers]


def test_random_start_is_the_same_on_all_ranks(ranks):
    first, second = ranks(random_start, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    assert 0.01 < first[0].std() < 0.03


def shared_with_more(kha):
    """Whether the memory of query, key and value holds something else, plain and offloaded."""
    from tests.distributed import models

    models.initialize()
    layer = attention_layer(models, kha)
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, requires_grad=True)
    plain = layer.get_query_key_value_tensors(hidden)
    layer.offload_core_attention = True
    found = layer.get_query_key_value_tensors(hidden)
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    return [[x.untyped_storage().nbytes() > x.nbytes for x in qkv] for qkv in (plain, found)]


@pytest.mark.parametrize("kha", [KHAConfig(key="mlp"), KHAConfig.from_preset("gate_output_head")])
def test_offloaded_tensors_share_no_memory(ranks, kha):
    """Megatron frees the memory of these tensors, but gates still read the projection."""
    plain, found = ranks(shared_with_more, 1, kha)[0]
    assert any(plain)
    assert not any(found)


def with_pre_hooks(khas):
    """The modules of a layer of each configuration that have a pre-forward hook of torch's."""
    from tests.distributed import models

    models.initialize()
    layers = {str(kha): attention_layer(models, kha) for kha in khas}
    return [
        f"{kha}: {name}"
        for kha, layer in layers.items()
        for name, module in layer.named_modules()
        if module._forward_pre_hooks
    ]


def test_no_module_has_a_forward_pre_hook_which_cuda_graphs_refuse(ranks):
    presets = ("kha_mlp", "gate_output_head", "moh_75", "collaborative", "talking")
    khas = [KHAConfig.from_preset(preset) for preset in presets]
    assert ranks(with_pre_hooks, 1, khas)[0] == []
