"""Layers of the attention family and their twins in the oracle, for the workers of ``launcher.py``.

Sizes are ugly on purpose: 7 tokens, 6 query heads, 3 tied states, no two widths alike.
"""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from tests import oracle as reference
from tests.distributed import models

HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 6, 3, 12, 28, 7, 2
BASE = 10000.0


def config_of(kha, latent, **overrides):
    """A TransformerConfig for one layer."""
    sizes = {"num_attention_heads": HEADS, "hidden_size": HIDDEN}
    sizes |= {"multi_latent_attention": True} if latent else {"kv_channels": HEAD_DIM}
    if not latent:
        sizes["num_query_groups"] = GROUPS
    return models.transformer_config(**sizes | overrides)


def attention_layer(config, kha):
    """One layer's attention in float64, away from where it starts."""
    layer = models.attention(config, kha).double()
    models.perturb(layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "layernorm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "knock" not in name:
                parameter.mul_(10)  # from a standard deviation of 0.02
    return layer


def inputs():
    """Hidden states ``[s, b, h]`` and the causal mask."""
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]


def call(layer, hidden, mask):
    """The layer's output, with the rotary embedding of a model where it does not make its own."""
    if layer.config.multi_latent_attention:
        return layer(hidden, mask)[0]
    percent = 0.5 if layer.kind == "gta" else 1.0
    rotary = RotaryEmbedding(HEAD_DIM, percent, rotary_base=BASE, use_cpu_initialization=True)
    return layer(hidden, mask, rotary_pos_emb=rotary(TOKENS).double())[0]


def oracle(layer, weights, hidden):
    """What the oracle makes of the layer's weights, ``{name: tensor}``."""
    twin = _tied if layer.kind == "gta" else _latent
    matrices = {p: list(weights[f"knock_{p}.weight"]) for p in layer.kha.variants}
    return twin(layer, weights, hidden.transpose(0, 1), matrices).transpose(0, 1)


def _tied(layer, weights, hidden, matrices):
    blocks = weights["linear_qkv.weight"].view(GROUPS, HEADS // GROUPS + 1, HEAD_DIM, HIDDEN)
    return reference.tied_attention(
        hidden,
        blocks[:, :-1].reshape(-1, HIDDEN).T,
        blocks[:, -1].reshape(-1, HIDDEN).T,
        weights["linear_k_rope.weight"].T,
        weights["linear_proj.weight"].T,
        layer.kha,
        matrices,
        num_query_groups=GROUPS,
        head_dim=HEAD_DIM,
        rotary_base=BASE,
        q_norm=weights.get("q_layernorm.weight"),
        k_norm=weights.get("k_layernorm.weight"),
    )


def _latent(layer, weights, hidden, matrices):
    config = layer.config
    down = weights["linear_kv_down_proj.weight"].T
    up = weights["linear_kv_up_proj.weight"].unflatten(0, (HEADS, -1))
    direct = config.q_lora_rank is None
    return reference.latent_attention(
        hidden,
        weights["linear_q_proj.weight" if direct else "linear_q_up_proj.weight"].T,
        down[:, : config.kv_lora_rank],
        up[:, : config.qk_head_dim].flatten(0, 1).T,
        up[:, config.qk_head_dim :].flatten(0, 1).T,
        down[:, config.kv_lora_rank :],
        weights["linear_proj.weight"].T,
        layer.kha,
        matrices,
        heads=HEADS,
        rotary_base=BASE,
        w_query_latent=None if direct else weights["linear_q_down_proj.weight"].T,
        q_norm=weights.get("q_layernorm.weight"),
        kv_norm=weights.get("kv_layernorm.weight"),
        gate=layer.kha.gate,
        gate_weights={"output": weights.get("gate_output.weight")},
    )
