"""Attention in a few lines, to compute the formula of a mechanism with the weights of a layer."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kha_megatron.hf.modeling_kha import apply_rotary


def project(layer, hidden, head_dim: int):
    """Return queries, keys and values of shape [batch, tokens, heads, head_dim]."""
    heads = (*hidden.shape[:2], -1, head_dim)
    return [(hidden @ getattr(layer, f"{p}_proj").weight.T).view(heads) for p in "qkv"]


def attend(query, key, value):
    """Return the causal attention with RoPE, in the shape of ``query``."""
    position = torch.arange(query.shape[1]).double()[:, None]
    dim = query.shape[-1]
    angles = position / 10000.0 ** (torch.arange(0, dim, 2).double() / dim)
    rotary = torch.cat([angles, angles], 1)[None]
    query, key = (apply_rotary(x.transpose(1, 2), rotary.cos(), rotary.sin()) for x in (query, key))
    value = value.transpose(1, 2)
    found = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        enable_gqa=True,
    )
    return found.transpose(1, 2)
