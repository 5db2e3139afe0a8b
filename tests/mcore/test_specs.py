"""Layer specs for both backends, and what they leave alone. `test_named_specs.py` has the names."""

import json
import os
from unittest import mock

import pytest

from kha_megatron.config import KHAConfig


def rewritten_spec():
    """with_kha changes attention and norms only, keeps shared objects shared, and its input."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from kha_megatron.mcore.attention import KHASelfAttention
    from kha_megatron.mcore.local_modules import GatheredDotProductAttention
    from kha_megatron.mcore.specs import with_kha
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 1])
    stock = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm"
    )
    ours = with_kha(stock, KHAConfig(value="mlp"))
    assert all(s.submodules.self_attention.module is SelfAttention for s in stock.layer_specs)
    assert all(s.submodules.self_attention.module is KHASelfAttention for s in ours.layer_specs)
    assert ours.layer_specs[1] is ours.layer_specs[2]
    for before, after in zip(stock.layer_specs, ours.layer_specs, strict=True):
        assert after.submodules.mlp == before.submodules.mlp
        assert before.submodules.self_attention.submodules.core_attention is DotProductAttention
        core = after.submodules.self_attention.submodules.core_attention
        assert core is GatheredDotProductAttention
    return True


def test_the_rest_of_the_spec_stays(ranks):
    assert ranks(rewritten_spec, 1)[0]


def spec_without_attention():
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from kha_megatron.errors import ConfigError
    from kha_megatron.mcore.specs import with_kha

    with pytest.raises(ConfigError, match="has no attention that supports KHA"):
        with_kha(ModuleSpec(module=TransformerLayer), KHAConfig(value="mlp"))


def test_refuses_a_spec_without_self_attention(ranks):
    ranks(spec_without_attention, 1)


def transformer_engine_model(moe, named):
    """Construct and describe the Transformer Engine form."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from kha_megatron.mcore import specs
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=2)
    overrides = {"num_moe_experts": 4, "moe_grouped_gemm": True} if moe else {}
    config = models.transformer_config(
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        hidden_size=64,
        kv_channels=16,
        ffn_hidden_size=64,
        **overrides,
    )
    kha = KHAConfig(query="linear", key="gate", value="mlp")
    with mock.patch.dict(os.environ, KHA_CONFIG=json.dumps(kha.to_dict())):
        model = models.gpt_model(config, kha, layer_spec=specs.kha if named else None)
    attention = model.decoder.layers[0].self_attention
    sharded = model.sharded_state_dict()
    return {
        "linear_qkv": type(attention.linear_qkv).__name__,
        "norm": type(attention.q_layernorm).__name__,
        "attributes": {
            n: (getattr(p, "tensor_model_parallel", False), hasattr(p, "sequence_parallel"))
            for n, p in attention.named_parameters()
            if n.startswith("knock_")
        },
        "replicated": {
            t.key: t.global_shape
            for t in sharded.values()
            if isinstance(t, ShardedTensor) and ".knock_" in t.key
        },
    }


@pytest.mark.te
@pytest.mark.parametrize(
    ("moe", "named"), [(False, True), pytest.param(True, False, marks=pytest.mark.whole)]
)
def test_transformer_engine_spec_constructs(ranks_with_engine, moe, named):
    found = ranks_with_engine(transformer_engine_model, 2, moe, named)[0]
    assert found["linear_qkv"] == "TELayerNormColumnParallelLinear"
    assert found["norm"] in ("RMSNorm", "TENorm")
    names = ["knock_query.weight", "knock_key.weight", "knock_value.weight"]
    assert found["attributes"] == dict.fromkeys(names, (False, False))
    shapes = {"query": (2, 1, 16, 16), "key": (2, 1, 16, 16), "value": (2, 3, 16, 16)}
    assert found["replicated"] == {
        f"decoder.layers.self_attention.knock_{p}.weight": s for p, s in shapes.items()
    }


def transformer_engine_family(kha, latent, changes):
    """Construct one of the family on Transformer Engine; its modules, and what a checkpoint has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=2)
    config = models.transformer_config(
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        hidden_size=64,
        ffn_hidden_size=64,
        **({"multi_latent_attention": True} if latent else {"kv_channels": 16}),
        **changes,
    )
    layer = models.gpt_model(config, kha).decoder.layers[0]
    stored = layer.sharded_state_dict(metadata=None).values()
    return (
        {name: type(module).__name__ for name, module in layer.named_modules()},
        {t.key: tuple(t.global_shape) for t in stored if isinstance(t, ShardedTensor)},
    )


LINEAR = {"query": "linear", "key": "linear", "value": "linear"}


@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [None, "gla"], ids=["mla", "gla"])
def test_transformer_engine_latent_attention_constructs(ranks_with_engine, kind, fused):
    kha = KHAConfig(attention=kind, **LINEAR)
    changes = {"mla_down_proj_fusion": True} if fused else {}
    modules, stored = ranks_with_engine(transformer_engine_family, 2, kha, True, changes)[0]
    name = "KHAFusedMLASelfAttention" if fused else "KHAMLASelfAttention"
    up = "LatentUpProjection" if kind else "TELayerNormColumnParallelLinear"
    assert modules["self_attention"] == name
    assert modules["self_attention.linear_kv_up_proj"] == up
    assert modules["self_attention.linear_q_up_proj"] == "TELayerNormColumnParallelLinear"
    width = 12 // 2 if kind else 12
    assert stored["self_attention.linear_kv_up_proj.weight"] == (8 * (6 + 10), width)
    norm = "kv_layernorm.weight" if kind else "linear_kv_up_proj.layer_norm_weight"
    assert stored[f"self_attention.{norm}"] == (12,)
    for projection, width in (("query", 6), ("key", 6), ("value", 10)):
        assert stored[f"self_attention.knock_{projection}.weight"] == (1, width, width)


@pytest.mark.te
def test_transformer_engine_gta_constructs(ranks_with_engine):
    kha = KHAConfig(attention="gta", value="mlp")
    modules, stored = ranks_with_engine(transformer_engine_family, 2, kha, False, {})[0]
    assert modules["self_attention"] == "KHAGroupedTiedAttention"
    assert modules["self_attention.linear_qkv"] == "TEColumnParallelLinear"
    assert modules["input_layernorm"] in ("RMSNorm", "TENorm")
    assert stored["input_layernorm.weight"] == (64,)
    assert stored["self_attention.linear_qkv.weight"] == ((8 + 4) * 16, 64)
    assert stored["self_attention.linear_k_rope.weight"] == (8, 64)
    assert stored["self_attention.knock_value.weight"] == (3, 16, 16)
