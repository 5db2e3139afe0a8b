"""Every parallelism equals the unsharded run, with each mechanism in every layer.

Tolerance: in float32, sharding only reorders sums of a few dozen terms. 1e-5 relative (of norms) is
several times the error after ten optimizer steps, and a thousandth of any real mistake. In
bfloat16, the sums of a row-parallel layer are rounded on each rank before they are added: 2^-8 of
every activation, a few percent of a gradient or of a routed output after two layers.

``make test`` runs one case per claim for three steps. ``make test-all`` runs all cases for ten
steps and writes ``benchmarks/parallelism.md``.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES
from tests.distributed.cases import ALL_OTHERS, FAST, LATENT, MIXED, ONE_PER_CLAIM, TIED
from tests.distributed.parallelism import Case, Layout, step_in_bf16, train
from tests.distributed.pieces import errors, quantities

FP32 = 1e-5
BF16 = {"grad norm": 0.01, "loss": 0.02, "": 0.1}
BIAS_STEP = re.compile(r"update .*\.expert_bias")
"""Not compared in bfloat16: one token that changes its expert changes the sign of a load."""
SAME_VARIANT = tuple(HeadsConfig(Knock(query=v, key=v, value=v)) for v in MATRICES)


def bound(name, case):
    """Return the tolerance of a quantity."""
    if not case.bf16:
        return FP32
    limit = next(limit for start, limit in BF16.items() if name.startswith(start))
    # a token at the border between two experts changes its expert
    return 2.5 * limit if case.model == "moe" else limit


def parameters():
    for case in ONE_PER_CLAIM:
        yield pytest.param(case, marks=[pytest.mark.fast] if case in FAST else [])
    for case in ALL_OTHERS:
        yield pytest.param(case, marks=pytest.mark.whole)


@pytest.mark.parametrize("case", list(parameters()), ids=str)
def test_equals_the_unsharded_run(ranks, unsharded, parallelism_table, whole, case):
    if whole:
        khas = case.khas
        if not case.fold and not case.config.keys() & (LATENT | TIED).keys():
            khas += SAME_VARIANT
        case = replace(case, khas=khas, steps=10)
    results = ranks(train, case.layout.world, case, timeout=600)
    epsilon = 2**-8 if case.bf16 else 2**-23
    for kha, want, *got in zip(case.khas, unsharded(case), *results, strict=True):
        relative = errors(quantities(got), want, epsilon)
        if case.bf16:
            relative = {name: e for name, e in relative.items() if not BIAS_STEP.match(name)}
        worst = max(relative, key=relative.get)
        parallelism_table(str(case), str(kha), float(relative[worst]), worst)
        wrong = {name: e for name, e in relative.items() if not e <= bound(name, case)}
        assert not wrong, f"{kha}: {wrong}"


@pytest.mark.parametrize("ddp", [{}, {"use_distributed_optimizer": True}], ids=["", "distributed"])
def test_shared_matrices_have_main_parameters_in_float32(ranks, ddp):
    """A bf16 weight near one ignores updates below 2^-9. Its main parameter must not."""
    case = Case(layout=Layout(), khas=(MIXED,), bf16=True, ddp=ddp)
    (stepped,) = ranks(step_in_bf16, 1, case)
    matrices = [name for name in stepped if ".knock_" in name]
    assert len(matrices) == 2 * len(MIXED.variants)
    for name, parameter in stepped.items():
        # a few roundings of float32 in the gradient norm and in Adam
        np.testing.assert_allclose(parameter.main, parameter.expected, rtol=1e-6, atol=1e-6)
        rounded = torch.from_numpy(parameter.main).bfloat16().float().numpy()
        np.testing.assert_array_equal(parameter.weight, rounded, err_msg=name)
        if name in matrices:
            assert not np.array_equal(parameter.main, rounded), name


MEGATRON_FSDP = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "use_distributed_optimizer": True,
    "use_megatron_fsdp": True,
}


def megatron_fsdp_losses(kha=MIXED):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    from tests.distributed import models

    models.initialize()
    config = models.transformer_config()
    model = models.gpt_model(config, kha)
    tokens, positions, mask = models.batch()
    with torch.no_grad():
        plain = model(tokens, positions, mask, labels=tokens)
        ddp_config = DistributedDataParallelConfig(**MEGATRON_FSDP)
        wrapped = FullyShardedDataParallel(config, ddp_config, model)
        return plain.numpy(), wrapped(tokens, positions, mask, labels=tokens).numpy()


def test_megatron_fsdp_shards_and_gathers_the_shared_matrices(ranks):
    pytest.importorskip("einops", reason="Megatron-FSDP needs einops")
    for plain, sharded in ranks(megatron_fsdp_losses, 2):
        np.testing.assert_array_equal(plain, sharded)
