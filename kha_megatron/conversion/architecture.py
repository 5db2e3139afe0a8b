"""Names of the fields of a model in Megatron and in Hugging Face."""

from typing import TYPE_CHECKING, Any

from kha_megatron.model.config import ModelConfig
from kha_megatron.model.fields import Field, rows

if TYPE_CHECKING:

    class Architecture(ModelConfig):  # these are never None here
        num_layers: int
        vocab_size: int
        padded_vocab_size: int
        ffn_hidden_size: int
        max_position_embeddings: int
        num_experts: int
        moe_layer_freq: tuple[int, ...]
        moe_ffn_hidden_size: int
        moe_shared_expert_intermediate_size: int
        q_lora_rank: int
else:
    Architecture = ModelConfig

ROWS: dict[str, Field] = {row.field: row for row in rows(ModelConfig)}
"""Lookup table from field names to Megatron and Hugging Face names."""
HF_KEYS: dict[str, str] = {name: row.hf for name, row in ROWS.items() if row.hf}

STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
"""Settings that all supported models have in common."""

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""These fields are only used for latent attention (MLA and GLA)."""
