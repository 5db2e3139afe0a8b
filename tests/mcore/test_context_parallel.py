"""The core attention that gathers keys and values uses the mask of a data loader."""

import numpy as np
import pytest

from tests.versions import on_this_cp_rank

SEQUENCE = 12


def attended(cp):
    """Outputs ``[s / cp, b, h]`` of this rank, with a mask of two documents, and their places."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from kha_megatron.mcore.local_modules import GatheredDotProductAttention
    from tests.distributed import models

    models.initialize(context_parallel_size=cp)
    config = models.transformer_config(context_parallel_size=cp)
    attention = GatheredDotProductAttention(
        config,
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    generator = torch.Generator().manual_seed(5)
    shape = (2, SEQUENCE, 8, 6)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    hidden[7:, :7] = True
    batch = {
        "query": query,
        "key": key[:, :, ::2].contiguous(),
        "value": value[:, :, ::2].contiguous(),
        "attention_mask": hidden.expand(2, 1, -1, -1).contiguous(),
        "places": torch.arange(SEQUENCE).expand(2, -1).contiguous(),
        "cu_seqlens": None,
    }
    batch = on_this_cp_rank(batch, parallel_state.get_context_parallel_group())
    q, k, v = (batch[name].transpose(0, 1) for name in ("query", "key", "value"))
    output = attention(q, k.contiguous(), v.contiguous(), batch["attention_mask"])
    return output.numpy(), batch["places"][0].numpy()


@pytest.mark.parametrize("cp", [2, pytest.param(3, marks=pytest.mark.whole)])
def test_takes_the_mask_of_its_own_queries(ranks, cp):
    ((whole, _),) = ranks(attended, 1, 1)
    got = np.full_like(whole, np.nan)
    for output, places in ranks(attended, cp, cp):
        got[places] = output
    # the same sums in another order of the matrix product
    np.testing.assert_allclose(got, whole, atol=1e-6)
