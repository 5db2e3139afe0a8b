"""All tensors by their names in Megatron and Hugging Face.

If you want to support a new type of attention or MLP, add its tensors here. The Hugging Face names
are those of the ``kha`` architecture. Other architectures use the same names, except for those in
``QWEN_LAYER_NAMES`` and ``QWEN_PREDICTION_NAMES``.
"""

from collections.abc import Iterator

from kha_megatron.conversion.tensor_mappings import (
    DirectMapping,
    GatedMLPMapping,
    LatentHeadsMapping,
    NormMapping,
    QKVMapping,
    Shape,
    TensorMapping,
    TensorSlot,
    VocabularyMapping,
    head_mapping,
)
from kha_megatron.model.config import ModelConfig


def _hidden_vector(model: ModelConfig) -> Shape:
    return (model.hidden_size,)


def _vocabulary_matrix(model: ModelConfig) -> Shape:
    return (model.vocabulary_rows, model.hidden_size)


# Tensors outside of the layers

EMBEDDING = VocabularyMapping(
    megatron="embedding.word_embeddings.weight",
    hf="model.embed_tokens.weight",
    shape=_vocabulary_matrix,
)
FINAL_NORM = NormMapping(
    megatron="decoder.final_layernorm.weight",
    aliases=("decoder.final_norm.weight",),
    hf="model.norm.weight",
    shape=_hidden_vector,
)
"""The second name is that of HybridModel."""
LM_HEAD = VocabularyMapping(
    megatron="output_layer.weight",
    hf="lm_head.weight",
    shape=_vocabulary_matrix,
)

# Attention: MHA, MQA and GQA

FUSED_INPUT_NORM = NormMapping(
    megatron="self_attention.linear_qkv.layer_norm_weight",
    aliases=(
        "input_layernorm.weight",
        "self_attention.linear_qkv_down_proj.layer_norm_weight",
    ),
    hf="input_layernorm.weight",
    shape=_hidden_vector,
)
QKV = QKVMapping(
    megatron="self_attention.linear_qkv.weight",
    query="self_attn.q_proj.weight",
    key="self_attn.k_proj.weight",
    value="self_attn.v_proj.weight",
    mechanism="self_attn.{module}.weight",
    shape=lambda model: (model.qkv.rows, model.hidden_size),
)
QKV_BIAS = QKVMapping(
    megatron="self_attention.linear_qkv.bias",
    query="self_attn.q_proj.bias",
    key="self_attn.k_proj.bias",
    value="self_attn.v_proj.bias",
    mechanism="self_attn.{module}.bias",
    shape=lambda model: (model.qkv.rows,),
)
QK_NORM = (
    NormMapping(
        megatron="self_attention.q_layernorm.weight",
        hf="self_attn.q_norm.weight",
        shape=lambda model: (model.normed_dim,),
    ),
    NormMapping(
        megatron="self_attention.k_layernorm.weight",
        hf="self_attn.k_norm.weight",
        shape=lambda model: (model.normed_dim,),
    ),
)
ATTENTION_OUTPUT = DirectMapping(
    megatron="self_attention.linear_proj.weight",
    hf="self_attn.o_proj.weight",
    shape=lambda model: (model.hidden_size, model.num_attention_heads * model.kv_channels),
)

# Grouped-tied attention (GTA, only ``kha``). Each head starts with its rotary half in both formats.

INPUT_NORM = NormMapping(
    megatron="input_layernorm.weight",
    aliases=(
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv_down_proj.layer_norm_weight",
    ),
    hf="input_layernorm.weight",
    shape=_hidden_vector,
)
"""For GTA and multi-latent attention, where Transformer Engine does not fuse this norm."""
TIED_QKV = QKVMapping(
    megatron="self_attention.linear_qkv.weight",
    query="self_attn.q_proj.weight",
    key=None,
    value="self_attn.kv_proj.weight",
    mechanism="self_attn.{module}.weight",
    shape=lambda model: (model.qkv.rows, model.hidden_size),
)
TIED_QKV_BIAS = QKVMapping(
    megatron="self_attention.linear_qkv.bias",
    query="self_attn.q_proj.bias",
    key=None,
    value="self_attn.kv_proj.bias",
    mechanism="self_attn.{module}.bias",
    shape=lambda model: (model.qkv.rows,),
)
TIED_ROTARY_KEY = DirectMapping(
    megatron="self_attention.linear_k_rope.weight",
    hf="self_attn.k_rope_proj.weight",
    shape=lambda model: (model.kv_channels // 2, model.hidden_size),
)

# Multi-latent attention: MLA (``deepseek_v3`` and ``kha``) and GLA (only ``kha``). Both formats
# use the same order within a head: features without position first, then rotary or value features.
# RoPE is interleaved, i.e. it rotates adjacent features.


def _query_rows(model: ModelConfig) -> int:
    return model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)


def _key_value_rows(model: ModelConfig) -> int:
    return model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)


LATENT_QUERY = DirectMapping(
    megatron="self_attention.linear_q_proj.weight",
    hf="self_attn.q_proj.weight",
    shape=lambda model: (_query_rows(model), model.hidden_size),
)
"""Only without compressed queries (``q_lora_rank``)."""
LATENT_QUERY_DOWN = DirectMapping(
    megatron="self_attention.linear_q_down_proj.weight",
    hf="self_attn.q_a_proj.weight",
    shape=lambda model: (model.query_rank, model.hidden_size),
)
LATENT_QUERY_NORM = NormMapping(
    megatron="self_attention.linear_q_up_proj.layer_norm_weight",
    aliases=("self_attention.q_layernorm.weight",),
    write_aliases=True,
    hf="self_attn.q_a_layernorm.weight",
    shape=lambda model: (model.query_rank,),
)
LATENT_QUERY_UP = DirectMapping(
    megatron="self_attention.linear_q_up_proj.weight",
    hf="self_attn.q_b_proj.weight",
    shape=lambda model: (_query_rows(model), model.query_rank),
)
LATENT_KV_DOWN = DirectMapping(
    megatron="self_attention.linear_kv_down_proj.weight",
    hf="self_attn.kv_a_proj_with_mqa.weight",
    shape=lambda model: (model.kv_lora_rank + model.qk_pos_emb_head_dim, model.hidden_size),
)
LATENT_KV_NORM = NormMapping(
    megatron="self_attention.linear_kv_up_proj.layer_norm_weight",
    aliases=("self_attention.kv_layernorm.weight",),
    write_aliases=True,
    hf="self_attn.kv_a_layernorm.weight",
    shape=lambda model: (model.kv_lora_rank,),
)
LATENT_KV_UP = DirectMapping(
    megatron="self_attention.linear_kv_up_proj.weight",
    hf="self_attn.kv_b_proj.weight",
    shape=lambda model: (_key_value_rows(model), model.kv_lora_rank),
)
GROUPED_LATENT_KV_UP = LatentHeadsMapping(
    megatron="self_attention.linear_kv_up_proj.weight",
    hf="self_attn.kv_b_proj.{latent_head}.weight",
    shape=lambda model: (_key_value_rows(model), model.kv_lora_rank // model.latent_heads),
)

# Dense MLP

FUSED_MLP_NORM = NormMapping(
    megatron="mlp.linear_fc1.layer_norm_weight",
    aliases=("pre_mlp_layernorm.weight",),
    hf="post_attention_layernorm.weight",
    shape=_hidden_vector,
)
MLP = (
    GatedMLPMapping(
        megatron="mlp.linear_fc1.weight",
        gate="mlp.gate_proj.weight",
        up="mlp.up_proj.weight",
        shape=lambda model: (2 * model.dense_width, model.hidden_size),
    ),
    DirectMapping(
        megatron="mlp.linear_fc2.weight",
        hf="mlp.down_proj.weight",
        shape=lambda model: (model.hidden_size, model.dense_width),
    ),
)

# Mixture of experts (MoE)

MLP_NORM = NormMapping(
    megatron="pre_mlp_layernorm.weight",
    aliases=("mlp.linear_fc1.layer_norm_weight",),
    write_aliases=True,
    hf="post_attention_layernorm.weight",
    shape=_hidden_vector,
)
"""Also for dense layers with multi-latent attention."""
ROUTER = DirectMapping(
    megatron="mlp.router.weight",
    hf="mlp.gate.weight",
    shape=lambda model: (model.experts, model.hidden_size),
)
EXPERT_BIAS = DirectMapping(
    megatron="mlp.router.expert_bias",
    hf="mlp.gate.e_score_correction_bias",
    shape=lambda model: (model.experts,),
    trained=False,
)
"""Always float32. Megatron updates it based on expert load instead of gradients."""
EXPERT = (
    GatedMLPMapping(
        megatron="mlp.experts.experts.linear_fc1.weight",
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        shape=lambda model: (2 * model.expert_width, model.hidden_size),
    ),
    DirectMapping(
        megatron="mlp.experts.experts.linear_fc2.weight",
        hf="mlp.experts.{expert}.down_proj.weight",
        shape=lambda model: (model.hidden_size, model.expert_width),
    ),
)
SHARED_EXPERT = (
    GatedMLPMapping(
        megatron="mlp.shared_experts.linear_fc1.weight",
        gate="mlp.shared_experts.gate_proj.weight",
        up="mlp.shared_experts.up_proj.weight",
        shape=lambda model: (2 * model.shared_width, model.hidden_size),
    ),
    DirectMapping(
        megatron="mlp.shared_experts.linear_fc2.weight",
        hf="mlp.shared_experts.down_proj.weight",
        shape=lambda model: (model.hidden_size, model.shared_width),
    ),
)
SHARED_EXPERT_GATE = DirectMapping(
    megatron="mlp.shared_experts.gate_weight",
    hf="mlp.shared_expert_gate.weight",
    shape=lambda model: (1, model.hidden_size),
)

# Additional tensors in layers for multi-token prediction (MTP). In both formats, the input of
# ``eh_proj`` is the normalized embedding of the next token, then the normalized hidden state.

PREDICTION_PROJECTION = DirectMapping(
    megatron="eh_proj.weight",
    hf="eh_proj.weight",
    shape=lambda model: (model.hidden_size, 2 * model.hidden_size),
)
PREDICTION = (
    NormMapping(
        megatron="enorm.weight",
        hf="enorm.weight",
        shape=_hidden_vector,
    ),
    NormMapping(
        megatron="hnorm.weight",
        hf="hnorm.weight",
        shape=_hidden_vector,
    ),
    PREDICTION_PROJECTION,
    NormMapping(
        megatron="final_layernorm.weight",
        hf="shared_head.norm.weight",
        shape=_hidden_vector,
    ),
)

# Names that differ from those above

QWEN_LAYER_NAMES = {
    "mlp.shared_experts.gate_proj.weight": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight": "mlp.shared_expert.up_proj.weight",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_expert.down_proj.weight",
}
"""Layers of ``qwen3_next`` and ``qwen3_5_text``."""
QWEN_PREDICTION_NAMES = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}
"""Additional tensors in the MTP layer of ``qwen3_next``."""


def tensor_slots(model: ModelConfig) -> Iterator[TensorSlot]:
    """Yield all slots: embedding, layers (MTP layers are last), final norm and LM head."""
    yield TensorSlot(EMBEDDING)
    for layer in range(model.layers + model.predictions):
        for mapping in layer_mappings(model, layer):
            if mapping in EXPERT:
                for expert in range(model.experts):
                    yield TensorSlot(mapping, layer, expert)
            else:
                yield TensorSlot(mapping, layer)
    yield TensorSlot(FINAL_NORM)
    if not model.tied_embeddings:
        yield TensorSlot(LM_HEAD)


def layer_mappings(model: ModelConfig, layer: int) -> list[TensorMapping]:
    """Return the mappings for all tensors of a layer (MTP layers come after the others)."""
    mappings: list[TensorMapping] = []
    if layer >= model.layers:
        mappings += PREDICTION
    mappings += _attention_mappings(model)
    if model.is_moe(layer):
        mappings += _moe_mappings(model)
    elif model.multi_latent_attention:
        mappings += [MLP_NORM, *MLP]
    else:
        mappings += [FUSED_MLP_NORM, *MLP]
    return mappings


def _attention_mappings(model: ModelConfig) -> list[TensorMapping]:
    is_latent = model.multi_latent_attention
    is_tied = model.attention_type == "gta"
    mappings: list[TensorMapping] = []
    mappings.append(INPUT_NORM if is_latent or is_tied else FUSED_INPUT_NORM)
    if not is_latent:
        mappings.append(TIED_QKV if is_tied else QKV)
    if model.add_qkv_bias:
        mappings.append(TIED_QKV_BIAS if is_tied else QKV_BIAS)
    if is_tied:
        mappings.append(TIED_ROTARY_KEY)
    mappings += [head_mapping(tensor) for tensor in model.head_tensors]
    if is_latent:
        mappings += _latent_mappings(model)
    elif model.qk_layernorm:
        mappings += QK_NORM
    mappings.append(ATTENTION_OUTPUT)
    return mappings


def _latent_mappings(model: ModelConfig) -> list[TensorMapping]:
    mappings: list[TensorMapping] = []
    if not model.query_rank:
        mappings.append(LATENT_QUERY)
    else:
        mappings.append(LATENT_QUERY_DOWN)
        if model.qk_layernorm:
            mappings.append(LATENT_QUERY_NORM)
        mappings.append(LATENT_QUERY_UP)
    mappings.append(LATENT_KV_DOWN)
    if model.qk_layernorm:
        mappings.append(LATENT_KV_NORM)
    mappings.append(LATENT_KV_UP if model.latent_heads == 1 else GROUPED_LATENT_KV_UP)
    return mappings


def _moe_mappings(model: ModelConfig) -> list[TensorMapping]:
    mappings: list[TensorMapping] = [MLP_NORM, ROUTER]
    if model.moe_router_enable_expert_bias:
        mappings.append(EXPERT_BIAS)
    mappings += EXPERT
    if model.shared_width:
        mappings += SHARED_EXPERT
        if model.moe_shared_expert_gate:
            mappings.append(SHARED_EXPERT_GATE)
    return mappings
