"""Compare the local core attention with Megatron's, and its mask under context parallelism."""

import functools

import numpy as np
import pytest

from tests.versions import on_this_cp_rank

TOKENS = 7
QUERY_HEADS = 6
FEATURES = 10


def core_attention(kind, groups, **options):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from tests.distributed import models

    models.initialize(context_parallel_size=options.get("context_parallel_size", 1))
    config = models.transformer_config(
        num_attention_heads=QUERY_HEADS,
        num_query_groups=groups,
        kv_channels=FEATURES,
        hidden_size=QUERY_HEADS * FEATURES,
        **options,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return kind(config, 3, AttnMaskType.causal, "self", pg_collection=collection)


def attended(groups, options, tokens=TOKENS, mask=None):
    """Return outputs and gradients in float64 of Megatron's attention and ours.

    Also returns whether each of them was fused.
    """
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from kha_megatron.mcore.local_modules import GatheredDotProductAttention

    hidden = None
    if mask is not None:
        hidden = torch.tensor(mask)[None, None]
    results = []
    fused = []
    for kind in (DotProductAttention, GatheredDotProductAttention):
        draw = functools.partial(
            torch.randn,
            generator=torch.Generator().manual_seed(3),
            dtype=torch.float64,
            requires_grad=True,
        )
        query = draw(tokens, 2, QUERY_HEADS, FEATURES)
        key = draw(tokens, 2, groups, FEATURES)
        value = draw(tokens, 2, groups, FEATURES)
        attention = core_attention(kind, groups, **options)
        output = attention(query, key, value, hidden)
        output.square().sum().backward()
        gradients = [tensor.grad.numpy() for tensor in (query, key, value)]
        results.append([output.detach().numpy(), *gradients])
        fused.append(_is_fused(output))
    return results, fused


def _is_fused(output):
    nodes = [output.grad_fn]
    for node in nodes:
        for before, _ in node.next_functions:
            if before and before not in nodes:
                nodes.append(before)
    return any("FlashAttention" in type(node).__name__ for node in nodes)


@pytest.mark.parametrize(("groups", "scaled"), [(3, False), (1, True)])
def test_fused_attention_equals_megatrons(ranks, groups, scaled):
    # float32 scores are Megatron's condition for layers scaled by their number
    options = {"apply_query_key_layer_scaling": scaled, "attention_softmax_in_fp32": scaled}
    (((theirs, ours), fused),) = ranks(attended, 1, groups, options)
    assert fused == [False, True]
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def test_windows_sinks_dropout_and_document_masks_use_megatrons_attention(ranks):
    documents = np.triu(np.ones((TOKENS, TOKENS), bool), 1)
    documents[4:, :4] = True
    for options, mask in (
        ({"window_size": (2, 0)}, None),
        ({"softmax_type": "off-by-one"}, None),
        ({}, documents.tolist()),
    ):
        (((theirs, ours), fused),) = ranks(attended, 1, 3, options, TOKENS, mask)
        assert fused == [False, False], options
        for a, b in zip(theirs, ours, strict=True):
            np.testing.assert_array_equal(b, a)
    ((_, fused),) = ranks(attended, 1, 3, {"attention_dropout": 0.5})
    assert fused == [False, False]


def attended_over_ranks(cp):
    """Return outputs ``[s / cp, b, h]`` of this rank and their positions.

    The mask separates two documents.
    """
    import torch
    from megatron.core import parallel_state

    from kha_megatron.mcore.local_modules import GatheredDotProductAttention

    attention = core_attention(GatheredDotProductAttention, 3, context_parallel_size=cp)
    tokens = 12
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    hidden[7:, :7] = True
    positions = torch.arange(tokens).expand(2, -1)
    batch = {
        "query": draw(2, tokens, QUERY_HEADS, FEATURES),
        "key": draw(2, tokens, 3, FEATURES),
        "value": draw(2, tokens, 3, FEATURES),
        "attention_mask": hidden.expand(2, 1, -1, -1).contiguous(),
        "positions": positions.contiguous(),
        "cu_seqlens": None,
    }
    batch = on_this_cp_rank(batch, parallel_state.get_context_parallel_group())
    output = attention(
        batch["query"].transpose(0, 1).contiguous(),
        batch["key"].transpose(0, 1).contiguous(),
        batch["value"].transpose(0, 1).contiguous(),
        batch["attention_mask"],
    )
    return output.numpy(), batch["positions"][0].numpy()


@pytest.mark.parametrize("cp", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_context_parallel_ranks_use_the_mask_of_their_own_queries(ranks, cp):
    ((whole, _),) = ranks(attended_over_ranks, 1, 1)
    got = np.full_like(whole, np.nan)
    for output, positions in ranks(attended_over_ranks, cp, cp):
        got[positions] = output
    # the same sums in another order of the matrix product
    np.testing.assert_allclose(got, whole, atol=1e-6)
