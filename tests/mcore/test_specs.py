"""Layer specs for both backends, and what they leave alone. `test_named_specs.py` has the names."""

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig


def rewritten_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from kha_megatron.mcore.attention import KHASelfAttention
    from kha_megatron.mcore.local_modules import GatheredDotProductAttention
    from kha_megatron.mcore.specs import with_kha
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 1])
    stock = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    ours = with_kha(stock, HeadsConfig(Knock(value="mlp")))
    assert ours.layer_specs[1] is ours.layer_specs[2]
    for before, after in zip(stock.layer_specs, ours.layer_specs, strict=True):
        before, after = before.submodules, after.submodules
        assert after.mlp == before.mlp
        assert before.self_attention.module is SelfAttention
        assert before.self_attention.submodules.core_attention is DotProductAttention
        assert after.self_attention.module is KHASelfAttention
        assert after.self_attention.submodules.core_attention is GatheredDotProductAttention


def test_with_kha_replaces_the_attention_in_a_copy_of_the_spec(ranks):
    ranks(rewritten_spec, 1)


def refuse_specs():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from kha_megatron.mcore.layers import knock_layer
    from kha_megatron.mcore.specs import with_kha
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(num_layers=2)
    block = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
    layer = block.layer_specs[0]
    layer.submodules.self_attention = IdentityOp
    kha = HeadsConfig(Knock(value="mlp"))
    for spec in (block, layer, ModuleSpec(module=IdentityOp)):
        with pytest.raises(ConfigError, match="no attention module that supports KHA"):
            with_kha(spec, kha)
    with pytest.raises(ConfigError, match="no attention module that supports KHA"):
        knock_layer(layer.submodules, kha)


def test_specs_without_attention_are_refused(ranks):
    """They would be trained without KHA."""
    ranks(refuse_specs, 1)


def transformer_engine_layer(kha, changes):
    """The modules of a layer, and the shapes in its checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=2)
    config = models.transformer_config(
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        hidden_size=64,
        ffn_hidden_size=64,
        **{"kv_channels": 16} | changes,
    )
    layer = models.gpt_model(config, kha).decoder.layers[0]
    stored = layer.sharded_state_dict(metadata=None).values()
    return (
        {name: type(module).__name__ for name, module in layer.named_modules()},
        {t.key: tuple(t.global_shape) for t in stored if isinstance(t, ShardedTensor)},
    )


@pytest.mark.fast
@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [None, "gla"], ids=["mla", "gla"])
def test_transformer_engine_latent_attention_constructs(ranks_with_engine, kind, fused):
    kha = HeadsConfig(Knock(query="linear", key="linear", value="linear"), attention=kind)
    changes = {"multi_latent_attention": True, "mla_down_proj_fusion": fused}
    modules, stored = ranks_with_engine(transformer_engine_layer, 2, kha, changes)[0]
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
    kha = HeadsConfig(Knock(value="mlp"), attention="gta")
    modules, stored = ranks_with_engine(transformer_engine_layer, 2, kha, {})[0]
    assert modules["self_attention"] == "KHAGroupedTiedAttention"
    assert modules["self_attention.linear_qkv"] == "TEColumnParallelLinear"
    assert modules["input_layernorm"] in ("RMSNorm", "TENorm")
    assert stored["input_layernorm.weight"] == (64,)
    assert stored["self_attention.linear_qkv.weight"] == ((8 + 4) * 16, 64)
    assert stored["self_attention.linear_k_rope.weight"] == (8, 64)
    assert stored["self_attention.knock_value.weight"] == (3, 16, 16)
