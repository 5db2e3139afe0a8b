"""Mistakes of the prologue's kernels that the comparison of whole layers must notice.

Each is made on purpose around the kernels, in Triton's interpreter: then all passes of our layers
are wrong, those of the layers that judge them must not be.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.gpu import test_layers

LENGTH, BATCH = 16, 1
"""Of what the interpreter can compute in a second."""


def turned_backwards(fused, qkv, weights, query_norm, key_norm, angles, settings):
    return fused(qkv, weights, query_norm, key_norm, -angles, settings)


def turned_by_halves(fused, qkv, weights, query_norm, key_norm, angles, settings):
    """Cosines and sines of 0.5: those of an eighth of a turn, times the root of one half."""
    eighth = torch.full_like(angles, math.pi / 4)
    query, key, value = fused(qkv, weights, query_norm, key_norm, eighth, settings)
    return query * math.sqrt(0.5), key * math.sqrt(0.5), value


def not_turned(fused, qkv, weights, query_norm, key_norm, angles, settings):
    return fused(qkv, weights, query_norm, key_norm, None, settings)


def half_gradient(x):
    """The same value, of which half of the gradient is lost."""
    return (x + x.detach()) / 2


def halved_norm_gradients(fused, qkv, weights, query_norm, key_norm, angles, settings):
    norms = half_gradient(query_norm), half_gradient(key_norm)
    return fused(qkv, weights, *norms, angles, settings)


def halved_matrix_gradients(fused, qkv, weights, query_norm, key_norm, angles, settings):
    weights = {name: half_gradient(weight) for name, weight in weights.items()}
    return fused(qkv, weights, query_norm, key_norm, angles, settings)


def one_added_to_the_norms(fused, qkv, weights, query_norm, key_norm, angles, settings):
    settings = replace(settings, zero_centred=not settings.zero_centred)
    return fused(qkv, weights, query_norm, key_norm, angles, settings)


def keys_without_gradient(fused, *inputs):
    query, key, value = fused(*inputs)
    return query, half_gradient(key), value


NORMS = {f"d decoder.layers.{i}.self_attention.{x}_layernorm.weight" for i in (0, 1) for x in "qk"}
MATRICES = {f"d decoder.layers.{i}.self_attention.knock_value.weight" for i in (0, 1)}
MISTAKES = {
    "RoPE turns backwards": (turned_backwards, {"logits"}),
    "cosines and sines are 0.5": (turned_by_halves, {"logits"}),
    "RoPE turns nothing": (not_turned, {"logits"}),
    "the norms' weights are one larger": (one_added_to_the_norms, {"logits"}),
    "gradients of the QK-norms are halved": (halved_norm_gradients, NORMS),
    "gradients of the matrices are halved": (halved_matrix_gradients, MATRICES),
    "half of the keys' gradient is lost": (
        keys_without_gradient,
        {"d decoder.layers.0.self_attention.k_layernorm.weight"},
    ),
}
"""Each with something that must be noticed."""


def errors(mistake=None):
    """Of small layers through the interpreted kernels, with a mistake of :data:`MISTAKES`."""
    from kha_megatron.ops.kernels import prologue_launch
    from tests.gpu import models

    fused = prologue_launch.fused_prologue

    def mistaken(*inputs):
        return MISTAKES[mistake][0](fused, *inputs)

    with (
        mock.patch.multiple(models, SEQUENCE=LENGTH, BATCH=BATCH),
        mock.patch.object(prologue_launch, "fused_prologue", mistaken if mistake else fused),
    ):
        return test_layers.errors("mlp", "local", torch.bfloat16, False)


def test_nothing_is_noticed_without_a_mistake(interpreting_rank):
    found = interpreting_rank(errors)
    assert found.ours != found.plain  # they went other ways
    assert found.fused == 2 * 2  # two layers, without and with gradients
    assert not found.beyond(test_layers.FLOOR["bf16"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_notices(interpreting_rank, mistake):
    noticed = interpreting_rank(errors, mistake).beyond(test_layers.FLOOR["bf16"])
    assert noticed.keys() >= MISTAKES[mistake][1]
