"""Attention with KHA compared with stock Megatron."""

import pytest
import torch

from kha_megatron.heads import Knock, TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from tests.mcore.sharded_layer import LATENT
from tests.mcore.test_family import GLA, GTA, MLA

TALKING = HeadsConfig(TalkingHeads())
MIXED = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))
HEADS = 6
GROUPS = 3
HEAD_DIM = 10
HIDDEN = 28
TOKENS = 7
BATCH = 2


def attention_layer(models, kha, built_with=None, **overrides):
    """Build the attention of one layer from the layer spec of a GPTModel."""
    settings = {
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM,
        "hidden_size": HIDDEN,
    }
    config = models.transformer_config(**settings | overrides)
    return models.attention(config, kha, **built_with or {})


def stock_spec(config):
    """Return Megatron's own layer spec for the local backend."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from kha_megatron.mcore.specs import with_kha

    spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    if config.multi_latent_attention:  # upstream's local core attention cannot be built for MLA
        spec = with_kha(spec, HeadsConfig())
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = MLASelfAttention
            layer.submodules.self_attention.params.pop("kha", None)
    return spec


def initial_losses(khas, dtype, overrides, stock):
    """Return per-token losses of new models. If ``stock``, the first one is Megatron's own."""
    from tests.distributed import models

    models.initialize()
    bf16 = dtype == torch.bfloat16
    config = models.transformer_config(
        **{"params_dtype": dtype, "bf16": bf16, "num_query_groups": 2} | overrides
    )
    builds = [(HeadsConfig(), stock_spec(config))] if stock else []
    outputs = []
    for kha, spec in builds + [(kha, None) for kha in khas]:
        models.initialize()
        model = models.gpt_model(config, kha, layer_spec=spec, perturbed=False)
        tokens, positions, mask = models.batch()
        with torch.no_grad():
            outputs.append(model(tokens, positions, mask, labels=tokens))
    return outputs


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "none",
}


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("khas", "overrides", "stock"),
    [
        pytest.param([HeadsConfig(), MIXED, TALKING], {}, True, id="mha"),
        pytest.param([HeadsConfig(), MIXED], MOE, True, id="moe"),
        pytest.param([HeadsConfig(), MIXED], {"attention_output_gate": True}, True, id="gate"),
        pytest.param(MLA, LATENT, True, id="mla"),
        pytest.param([GLA[2], GLA[0]], LATENT, False, id="gla"),
        pytest.param(GTA, {"kv_channels": 12}, False, id="gta"),
    ],
)
def test_initial_value_is_identity_bit_for_bit(ranks, khas, overrides, stock, dtype):
    first, *others = ranks(initial_losses, 1, khas, dtype, overrides, stock)[0]
    assert len(others) == len(khas) - 1 + stock
    assert all(torch.equal(first, other) for other in others)


def drawn(kha, name, overrides):
    """Return the replicated weights of two layers of a new model on this rank."""
    import torch.distributed as dist

    from tests.distributed import models

    # a random start ignores the random state of its rank
    seed = 100 + dist.get_rank() if kha.to_dict()["init"] == "random" else 7
    models.initialize(seed, tensor_model_parallel_size=2)
    config = models.transformer_config(tensor_model_parallel_size=2, **overrides)
    model = models.gpt_model(config, kha, perturbed=False)
    return [getattr(x.self_attention, name).weight.detach() for x in model.decoder.layers]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kha", "name", "overrides"),
    [
        (HeadsConfig(Knock(value="mlp", init="random")), "knock_value", {}),
        # drawn where training on a GPU draws it
        (GTA[0], "linear_k_rope", {"kv_channels": 8, "use_cpu_initialization": False}),
    ],
    ids=["knocking", "gta"],
)
def test_random_start_is_the_same_on_all_ranks(ranks, kha, name, overrides):
    first, second = ranks(drawn, 2, kha, name, overrides)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)
    assert 0.01 < first[0].std() < 0.03


def shared_with_more(kha):
    """Return whether query, key and value share memory with something else, plain and offloaded."""
    from tests.distributed import models

    models.initialize()
    layer = attention_layer(models, kha)
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, requires_grad=True)
    plain = layer.get_query_key_value_tensors(hidden)
    layer.offload_core_attention = True
    found = layer.get_query_key_value_tensors(hidden)
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    return [[x.untyped_storage().nbytes() > x.nbytes for x in qkv] for qkv in (plain, found)]


@pytest.mark.parametrize(
    "kha",
    [HeadsConfig(Knock(key="mlp")), HeadsConfig.from_preset("gate_output_head")],
)
def test_offloaded_tensors_share_no_memory(ranks, kha):
    """Megatron frees the memory of these tensors, but gates still read the projection."""
    plain, found = ranks(shared_with_more, 1, kha)[0]
    assert any(plain)
    assert not any(found)


def with_pre_hooks(khas):
    """Return for each configuration the modules of a layer that have a forward pre-hook."""
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
    khas = [HeadsConfig.from_preset(preset) for preset in presets]
    assert ranks(with_pre_hooks, 1, khas)[0] == []
