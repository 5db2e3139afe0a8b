"""Transformer Engine's layers under every parallelism equal an unsharded run of Megatron's own.

Transformer Engine runs on the test double ``tests/transformer_engine``. In float32 sharding only
reorders sums, and the bound is that of ``test_parallelism.py``. With FP8 each rank scales its own
shard, so a sharded run rounds differently. Its distance from the unsharded float32 run may be 1.5
times that of FP8 in one process, plus what chance does to few numbers.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from tests.distributed import parallelism, pieces
from tests.distributed.cases import FOLDED, FULL, OVERLAP_ALL, RANDOM, case
from tests.distributed.parallelism import train
from tests.distributed.pieces import errors, quantities
from tests.distributed.test_parallelism import FP32

pytestmark = pytest.mark.te

ENGINE = {"transformer_impl": "transformer_engine"}
GROUPED = ENGINE | {"moe_grouped_gemm": True}


def whole(case):
    return pytest.param(case, marks=pytest.mark.whole, id=str(case))


CASES = [
    case(tp=2, sp=True, ep=2, model="moe", savings=GROUPED),
    whole(case(tp=2, groups=2, savings=ENGINE)),
    whole(case(tp=2, sp=True, groups=1, savings=ENGINE)),
    whole(case(pp=2, khas=(RANDOM,), savings=ENGINE)),
    whole(case(tp=2, sp=True, savings=ENGINE | FULL)),
    whole(case(tp=2, dp=2, ddp=OVERLAP_ALL, khas=FOLDED, fold="always", savings=ENGINE)),
]


@contextmanager
def one_name_for_each_norm():
    """Rename the norm of Transformer Engine's expert layers as in Megatron's local layers."""
    sharded = pieces._sharded

    def renamed(chunk):
        for tensor in sharded(chunk):
            tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            yield tensor

    with mock.patch.object(pieces, "_sharded", renamed):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_unsharded_run_of_local_layers(ranks, ranks_with_engine, case):
    named = one_name_for_each_norm
    wanted = ranks(train, 1, case.twin(), named, timeout=600)[0]
    results = ranks_with_engine(train, case.layout.world, case, named, timeout=600)
    for kha, want, *got in zip(case.khas, wanted, *results, strict=True):
        found = errors(quantities(got), quantities([want]))
        assert any("knock_" in name for name in found)
        assert not {name: e for name, e in found.items() if not e <= FP32}, kha


WIDE = {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 64}
"""Multiples of 16, as FP8 asks for."""
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
SCALED = [
    case(tp=2, sp=True, savings=ENGINE | TENSORWISE | FULL),
    whole(case(tp=2, groups=2, savings=ENGINE | TENSORWISE)),
    whole(case(tp=2, sp=True, savings=ENGINE | {"fp8": "hybrid", "fp8_recipe": "delayed"})),
    whole(case(tp=2, sp=True, savings=ENGINE | BLOCKWISE)),
    whole(case(pp=2, groups=2, savings=ENGINE | TENSORWISE)),
    whole(case(tp=2, sp=True, khas=FOLDED[:1], fold="always", savings=ENGINE | TENSORWISE)),
]


BLOCKS = 128
"""Block-scaled tensors are gathered in FP8 if tokens of a rank and hidden are multiples of it."""


def train_long(case):
    """Run :func:`train` on sequences of which each rank has as many tokens as FP8 needs."""
    blocks = case.config["hidden_size"] == BLOCKS
    with mock.patch.object(parallelism, "SEQUENCE", BLOCKS if blocks else 32):
        return train(case)


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_fp8_rounds_alike_under_every_parallelism(ranks, ranks_with_engine, case):
    def trained(pool, case):
        results = pool(train_long, case.layout.world, case, timeout=600)
        return quantities([result for (result,) in results])

    config = WIDE | ({"hidden_size": BLOCKS} if BLOCKWISE.items() <= case.savings.items() else {})
    case = replace(case, bf16=True, config=config, steps=1)
    want = trained(ranks, replace(case.twin(), bf16=False))
    scaled = {name: case.savings[name] for name in (*ENGINE, "fp8", "fp8_recipe")}
    rounding = errors(trained(ranks_with_engine, replace(case.twin(), savings=scaled)), want)
    found = errors(trained(ranks_with_engine, case), want)
    compared = [name for name in found if name.startswith(("loss", "gradients"))]
    assert any("knock_" in name for name in compared)
    # the norms of two draws of n errors differ by chance too, by 1 / sqrt(2n) each
    limits = {name: rounding[name] * (1.5 + 4 / want[name].size ** 0.5) for name in compared}
    far = [name for name in compared if not found[name] <= limits[name]]
    assert not far, {name: (found[name], limits[name]) for name in far}
