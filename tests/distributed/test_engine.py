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

from tests.distributed import pieces
from tests.distributed.cases import ALLGATHER, CENTERED, FULL, LINEAR, OVERLAP_ALL, RANDOM, case
from tests.distributed.parallelism import MICROBATCH, train
from tests.distributed.pieces import errors, quantities
from tests.distributed.test_mutations import MATRICES_DIFFER, without_copy_on_matrices
from tests.distributed.test_parallelism import FP32

pytestmark = pytest.mark.te

ENGINE = {"transformer_impl": "transformer_engine"}
PRECISION = {*ENGINE, "fp8", "fp8_recipe"}
GROUPED = ENGINE | {"moe_grouped_gemm": True}


def whole(case):
    return pytest.param(case, marks=pytest.mark.whole, id=str(case))


CASES = [
    case(tp=2, sp=True, ep=2, model="moe", savings=GROUPED),
    case(tp=2, packed=True, savings=ENGINE, config=CENTERED),
    case(tp=2, groups=2, savings=ENGINE),
    case(tp=2, sp=True, groups=1, savings=ENGINE),
    case(pp=2, khas=(RANDOM,), savings=ENGINE),
    case(tp=2, sp=True, savings=ENGINE | FULL),
    case(tp=2, sp=True, ep=2, model="moe", savings=GROUPED | ALLGATHER),
    case(tp=2, dp=2, ddp=OVERLAP_ALL, khas=(LINEAR,), savings=ENGINE),
    case(fold=True, tp=2, dp=2, ddp=OVERLAP_ALL, khas=(LINEAR,), savings=ENGINE),
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


@pytest.mark.parametrize("case", [*CASES[:2], *map(whole, CASES[2:])], ids=str)
def test_equals_the_unsharded_run_of_local_layers(ranks, ranks_with_engine, case):
    named = one_name_for_each_norm
    wanted = ranks(train, 1, case.twin(), named, timeout=600)[0]
    results = ranks_with_engine(train, case.layout.world, case, named, timeout=600)
    for kha, want, *got in zip(case.khas, wanted, *results, strict=True):
        relative = errors(quantities(got), quantities([want]))
        assert any("knock_" in name for name in relative)
        wrong = {name: error for name, error in relative.items() if not error <= FP32}
        assert not wrong, kha


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
    whole(case(tp=2, sp=True, khas=(LINEAR,), savings=ENGINE | TENSORWISE)),
    case(fold=True, pp=2, khas=(LINEAR,), savings=ENGINE | TENSORWISE),
]


BLOCKS = 128
"""Block-scaled tensors are gathered in FP8 if tokens of a rank and hidden are multiples of it."""


def beyond_one_process(local, engine, case, change=one_name_for_each_norm):
    """Return errors of losses and gradients beyond those of one process, with their limits.

    The reference is an unsharded run of local layers in float32. One process and ``case``, with the
    context ``change``, run in the precision of ``case`` on the ranks ``engine``.
    """

    def trained(pool, case, change=one_name_for_each_norm):
        results = pool(train, case.layout.world, case, change, timeout=600)
        return quantities([result for (result,) in results])

    want = trained(local, replace(case.twin(), bf16=False))
    precision = {name: value for name, value in case.savings.items() if name in PRECISION}
    rounding = errors(trained(engine, replace(case.twin(), savings=precision)), want)
    relative = errors(trained(engine, case, change), want)
    compared = [name for name in relative if name.startswith(("loss", "gradients"))]
    assert any("knock_" in name for name in compared)
    too_large = {}
    for name in compared:
        # the norms of two draws of n errors differ by chance too, by 1 / sqrt(2n) each
        limit = rounding[name] * (1.5 + 4 / want[name].size ** 0.5)
        if not relative[name] <= limit:
            too_large[name] = (relative[name], limit)
    return too_large


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_fp8_rounds_alike_under_every_parallelism(ranks, ranks_with_engine, case):
    # each rank has as many tokens as FP8 needs
    case = replace(case, bf16=True, config=WIDE, sequence=32, steps=1)
    if BLOCKWISE.items() <= case.savings.items():
        case = replace(
            case,
            config=WIDE | {"hidden_size": BLOCKS},
            sequence=BLOCKS,
        )
    assert not beyond_one_process(ranks, ranks_with_engine, case)


FSDP = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "use_distributed_optimizer": True,
    "use_megatron_fsdp": True,
}
SEQUENCE = 32
SIZES = {"hidden_size": 128, "kv_channels": 64, "ffn_hidden_size": 128}
"""Sizes that cuDNN's attention and our kernels support."""
EXPERTS = {"moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64}
EXPERTS |= {"moe_router_topk": 4}  # all: rounding would choose others
OVERLAP = case(tp=2, sp=True, savings=ENGINE | {"tp_comm_overlap": True})
NEEDS_NCCL = [
    OVERLAP,
    *(case(cp=2, savings=ENGINE | {"cp_comm_type": kind}) for kind in ("p2p", "a2a", "allgather")),
    case(cp=2, packed=True, savings=ENGINE),
    # its backward overlaps coalesced collectives, which gloo matches wrongly
    case(dp=2, fsdp="megatron", ddp=FSDP, savings=ENGINE),
    case(tp=2, sp=True, cp=2, groups=2, savings=ENGINE),
]


TWO_RANKS = [
    case(dp=2, ddp=OVERLAP_ALL, savings=ENGINE),
    case(dp=2, fsdp="torch", savings=ENGINE),
    case(tp=2, sp=True, savings=ENGINE | TENSORWISE),
]
"""Further cases that fit on two ranks."""


@contextmanager
def with_userbuffers():
    """Allocate the buffers of ``--tp-comm-overlap``, as Megatron does at the start of training."""
    from transformer_engine.pytorch.module import base

    modes = [base.UserBufferQuantizationMode.NONE]
    shape = [SEQUENCE * MICROBATCH, SIZES["hidden_size"]]
    base.initialize_ub(
        shape,
        2,
        quantization_modes=modes,
        ub_cfgs={},
        bootstrap_backend="nccl",
    )
    with one_name_for_each_norm():
        yield
    base.destroy_ub()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "change"),
    [
        (CASES[3], one_name_for_each_norm),
        (CASES[3], without_copy_on_matrices),
        *((case, one_name_for_each_norm) for case in (*CASES, *TWO_RANKS) if case != CASES[3]),
        *((case, one_name_for_each_norm) for case in NEEDS_NCCL if case != OVERLAP),
        (OVERLAP, with_userbuffers),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_equals_one_gpu(request, gpu_ranks, gpu_engine, most_gpu_ranks, case, change):
    """In bf16, and a removed all-reduce is detected.

    ``--ranks-device cpu`` runs the same on gloo and the test double.
    """
    world = case.layout.world
    if world > most_gpu_ranks:
        pytest.skip(f"NOT TESTED: needs {world} GPUs")
    options = [request.config.getoption(f"--ranks-{name}") for name in ("device", "backend")]
    if case in NEEDS_NCCL and options != ["cuda", "nccl"]:
        pytest.skip("NOT TESTED: needs NCCL")
    config = SIZES | (EXPERTS if case.model == "moe" else {})
    case = replace(
        case,
        bf16=True,
        sequence=SEQUENCE,
        steps=1,
        config=config,
        khas=case.khas[:1],
    )
    if change is without_copy_on_matrices:
        with pytest.raises(AssertionError, match=MATRICES_DIFFER):
            beyond_one_process(gpu_ranks, gpu_ranks, case, change)
    else:
        assert not beyond_one_process(gpu_ranks, gpu_ranks, case, change)
