"""Attention in a few lines, to compute the formula of a mechanism with the weights of a layer."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kha_megatron.hf.modeling_kha import apply_rotary


def project(layer, hidden, head_dim: int):
    """Return queries, keys and values of shape [batch, tokens, heads, head_dim]."""
    shape = (*hidden.shape[:2], -1, head_dim)
    query = hidden @ layer.q_proj.weight.T
    key = hidden @ layer.k_proj.weight.T
    value = hidden @ layer.v_proj.weight.T
    return query.view(shape), key.view(shape), value.view(shape)


def attend(query, key, value):
    """Return the causal attention with RoPE, in the shape of ``query``."""
    position = torch.arange(query.shape[1]).double()[:, None]
    dim = query.shape[-1]
    exponents = torch.arange(0, dim, 2).double() / dim
    angles = position / 10000.0**exponents
    rotary = torch.cat([angles, angles], 1)[None]
    cos = rotary.cos()
    sin = rotary.sin()
    output = scaled_dot_product_attention(
        apply_rotary(query.transpose(1, 2), cos, sin),
        apply_rotary(key.transpose(1, 2), cos, sin),
        value.transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    )
    return output.transpose(1, 2)
