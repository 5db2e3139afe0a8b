"""A tensor-parallel run equals the unsharded one: outputs, gradients, norm, and replicas for ever.

Tolerance: everything is float32, where sharding only reorders sums of a few dozen terms; 1e-5
relative (of norms) is some twenty times what is seen and a thousandth of any real mistake.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from kha_megatron.config import MATRICES, PROJECTIONS, KHAConfig

TOLERANCE = 1e-5
HEADS = 8

EVERY_PLACE = [KHAConfig(**{p: v}) for v in MATRICES for p in PROJECTIONS]
EVERYWHERE = [KHAConfig(query=v, key=v, value=v) for v in MATRICES]


def sharded_run(tp, sequence_parallel, groups, khas, steps=0, *, reduce_shared=True, **overrides):
    """Forward, backward, norm and ``steps`` optimizer steps of each configuration, gathered."""
    from kha_megatron.mcore import knocking
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=tp)
    config = models.transformer_config(
        num_query_groups=groups,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        **overrides,
    )
    rule = knocking.copy_to_tensor_model_parallel_region
    if not reduce_shared:
        knocking.copy_to_tensor_model_parallel_region = lambda weight, group=None: weight
    try:
        return [_one_run(models, config, kha, steps) for kha in khas]
    finally:
        knocking.copy_to_tensor_model_parallel_region = rule


def _one_run(models, config, kha, steps):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(7)
    model = models.gpt_model(config, kha)
    tokens, positions, mask = models.batch()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", sgd_momentum=0.9, lr=0.1, clip_grad=1.0), [ddp]
    )
    kept = {}

    def keep(name):
        def hook(module, inputs, output):
            output.retain_grad()
            kept[name] = output

        return hook

    model.embedding.register_forward_hook(keep("x"))
    model.decoder.register_forward_hook(keep("y"))

    def step():
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        ddp(tokens, positions, mask, labels=tokens).mean().backward()
        finalize_model_grads([ddp])

    step()
    grads = {n: _gather(n, p, p.main_grad) for n, p in model.named_parameters()}
    sequence = config.sequence_parallel
    result = {
        "output": _concat(kept["y"].detach(), 0) if sequence else kept["y"].detach(),
        "input gradient": _concat(kept["x"].grad, 0) if sequence else kept["x"].grad,
        "gradients": grads,
        "grad norm": torch.tensor(optimizer.step()[1]),
    }
    for _ in range(steps - 1):
        step()
        optimizer.step()
    shared = {n: p.detach() for n, p in model.named_parameters() if ".knock_" in n}
    result["replicas differ by"] = {
        n: max((p - other).abs().max().item() for other in _all(p)) for n, p in shared.items()
    }
    result["trained"] = {n: _gather(n, p, p.detach()) for n, p in model.named_parameters() if steps}
    # autograd's hooks close over the model where the garbage collector cannot see: without this it
    # would live on, and with it the threads of its process groups
    kept.clear()
    ddp.grad_accs.clear()
    return result


def _all(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _concat(tensor, dim):
    return torch.cat(_all(tensor), dim)


def _gather(name, parameter, tensor):
    """The whole tensor from its tensor-parallel shards."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor.clone()
    if name.endswith("linear_fc1.weight"):  # each rank holds its part of the gate, then of the up
        gates, ups = zip(*(part.chunk(2) for part in _all(tensor)), strict=True)
        return torch.cat([*gates, *ups])
    return _concat(tensor, parameter.partition_dim)


def error(got, want):
    return ((got - want).norm() / want.norm().clamp_min(1e-12)).item()


def errors(got, want):
    """Relative error of every compared quantity, by name."""
    found = {n: error(got[n], want[n]) for n in ("output", "input gradient", "grad norm")}
    for group in ("gradients", "trained"):
        assert got[group].keys() == want[group].keys()
        found |= {f"{group} {n}": error(got[group][n], want[group][n]) for n in want[group]}
    return found


@pytest.fixture(scope="module")
def unsharded(ranks):
    """Results of one process, computed once for each set of arguments."""

    @functools.cache
    def run(groups, khas, steps=0, **overrides):
        return ranks(sharded_run, 1, 1, False, groups, khas, steps, **overrides)[0]

    return run


LAYOUTS = [(tp, sp) for tp in (2, 4) for sp in (False, True)]


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
@pytest.mark.parametrize(("tp", "sp"), LAYOUTS, ids=lambda v: str(v))
def test_every_variant_on_every_projection(ranks, unsharded, tp, sp, groups):
    khas = tuple(EVERY_PLACE + EVERYWHERE)
    want = unsharded(groups, khas)
    for got in ranks(sharded_run, tp, tp, sp, groups, khas):
        for kha, g, w in zip(khas, got, want, strict=True):
            wrong = {n: e for n, e in errors(g, w).items() if not e < TOLERANCE}
            assert not wrong, f"{kha}: {wrong}"


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
@pytest.mark.parametrize(("tp", "sp"), LAYOUTS, ids=lambda v: str(v))
def test_replicas_stay_equal_through_twenty_steps(ranks, unsharded, tp, sp, groups):
    khas = tuple(EVERYWHERE)
    want = unsharded(groups, khas, 20)
    for got in ranks(sharded_run, tp, tp, sp, groups, khas, 20):
        for kha, g, w in zip(khas, got, want, strict=True):
            assert set(g["replicas differ by"].values()) == {0.0}, f"{kha}"
            # momentum SGD is linear in the gradients: Adam would amplify the rounding of tiny ones
            wrong = {n: e for n, e in errors(g, w).items() if not e < 10 * TOLERANCE}
            assert not wrong, f"{kha}: {wrong}"


@pytest.mark.parametrize("sp", [False, True])
def test_without_the_all_reduce_the_same_comparison_fails(ranks, unsharded, sp):
    """The mutation that this file must catch: take out the sum over the ranks."""
    khas = tuple(EVERYWHERE)
    want = unsharded(4, khas, 20)
    for got in ranks(sharded_run, 2, 2, sp, 4, khas, 20, reduce_shared=False):
        for kha, g, w in zip(khas, got, want, strict=True):
            found = errors(g, w)
            assert found["output"] < TOLERANCE, "outputs look right: this is why it goes unnoticed"
            shared = {n: e for n, e in found.items() if "gradients" in n and ".knock_" in n}
            assert shared, f"{kha}: nothing was compared"
            assert min(shared.values()) > 0.1, f"{kha}: {shared}"
            assert min(g["replicas differ by"].values()) > 1e-4, f"{kha}: replicas should drift"


@pytest.mark.parametrize("qk_layernorm", [True, False])
def test_with_and_without_qk_norm(ranks, unsharded, qk_layernorm):
    khas = tuple(EVERYWHERE)
    want = unsharded(2, khas, qk_layernorm=qk_layernorm)
    for got in ranks(sharded_run, 4, 4, False, 2, khas, qk_layernorm=qk_layernorm):
        for kha, g, w in zip(khas, got, want, strict=True):
            wrong = {n: e for n, e in errors(g, w).items() if not e < TOLERANCE}
            assert not wrong, f"{kha}: {wrong}"
