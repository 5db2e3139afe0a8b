"""Decoding from Megatron's static cache gives the outputs of a whole sequence."""

import pytest
import torch

from kha_megatron.heads import CollaborativeHeads, Gate, Knock, TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from tests.mcore.sharded_layer import LATENT, ON_RANKS, SIZES, decoded
from tests.mcore.test_family import GLA, GTA, GTA_SIZES, MLA
from tests.mcore.test_moh import LEARNED, QUANTIZED

EVERYWHERE = Gate(
    output="head",
    value="element",
    key="shared",
    query="element",
    dense="element",
)
MIXING = HeadsConfig(CollaborativeHeads(dim=10), TalkingHeads())
ONE_GROUP = ON_RANKS | {"num_query_groups": 1}


@pytest.mark.parametrize(
    ("kha", "tp", "sizes"),
    [
        pytest.param(GTA[-1], 1, GTA_SIZES, id="gta"),
        pytest.param(GLA[0], 1, LATENT, id="gla"),
        pytest.param(MLA[1].updated(gate=Gate(output="element")), 1, LATENT, id="mla, gated"),
        pytest.param(HeadsConfig(Knock(value="mlp"), EVERYWHERE), 1, {}, id="gates"),
        # two ranks divide one query token's heads
        *(
            pytest.param(MIXING, tp, ON_RANKS | {"kv_channels": 8}, id=f"mixing, tp{tp}")
            for tp in (1, 2)
        ),
        # all keys and values are cached, because a later token may choose any head
        *(
            pytest.param(HeadsConfig(routing), 2, ONE_GROUP, id=str(routing))
            for routing in (LEARNED, QUANTIZED)
        ),
    ],
)
def test_decodes_with_megatrons_static_cache(ranks, kha, tp, sizes):
    for whole, steps in ranks(decoded, tp, kha, tp, SIZES | sizes):
        torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-9)
