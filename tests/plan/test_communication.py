"""The planner's bytes against the collectives that Megatron really calls, on gloo.

Every collective passes through torch's dispatcher, where the test adds up its bytes by the ring
algorithm. Float32 and the local modules, which call the collectives that the plan counts. Messages
of integers (tokens per expert) are left out, as in the plan.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from kha_megatron.config import KHAConfig
from kha_megatron.heads import CollaborativeHeads, Gate, MixtureOfHeads, TalkingHeads
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.plan.communication import estimate_communication
from kha_megatron.plan.rank import Rank, Setup
from tests.plan.built import EXPERTS, MIXED, built

FACTORS = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "_allgather_base_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_base_": 1,
}


class Counter(TorchDispatchMode):
    """Bytes sent by this rank, by kind of collective; KHA's gradients under ``kha``."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.sent = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.add(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def add(self, name, args):
        if name in ("barrier", "broadcast_"):
            return
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        ranks, factor = group.size(), FACTORS[name]
        sides = [a if isinstance(a, (list, tuple)) else [a] for a in args[:2]]
        sides = [part for part in sides if part and isinstance(part[0], torch.Tensor)]
        together = name == "allgather_into_tensor_coalesced_"  # of bytes, whatever their dtypes
        if not sides[0][0].is_floating_point() and not together:
            return
        sizes = [sum(tensor.nbytes for tensor in part) for part in sides]
        # of an output and an input the larger is the whole tensor; an all-to-all sends its input
        whole = sizes[1] if name == "alltoall_base_" else max(sizes)
        if tuple(sides[0][0].shape[-2:]) == (self.head_dim, self.head_dim):
            name = "kha"
        self.sent[name] = self.sent.get(name, 0) + factor * (ranks - 1) / ranks * whole


def counted(layout, overrides, microbatches, step, kha):
    """What this rank sends in a step's forward, backward and reduction of gradients."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.distributed import models

    (chunk,), config, model, stage = built(layout, kha, **overrides)
    sharded = {"use_distributed_optimizer": step}
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded)
    ddp = DistributedDataParallel(config, ddp_config, chunk)
    if step:
        settings = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0, **sharded)
        optimizer = get_megatron_optimizer(settings, [ddp])
    tokens, positions, mask = models.batch()
    ddp.zero_grad_buffer()
    with Counter(config.kv_channels) as counter:
        for number in range(microbatches):
            ddp.is_last_microbatch = number == microbatches - 1
            with torch.enable_grad():
                ddp(tokens, positions, mask, labels=tokens).mean().backward()
        finalize_model_grads([ddp])
        if step:
            optimizer.step()
    vars(ddp).clear()
    return counter.sent, model, stage


def compare(ranks, world, layout, overrides, microbatches=1, step=False, kha=MIXED):
    """Sums over the ranks, since experts are not evenly loaded: counted, and planned."""
    from tests.distributed.models import BATCH, SEQUENCE

    layout = Layout(**{**vars(layout), "world_size": world})
    batch = Batch(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH * layout.dp * microbatches,
    )
    total, planned = {}, []
    found = ranks(counted, world, layout, overrides, microbatches, step, kha)
    for sent, model, stage in found:
        for name, count in sent.items():
            total[name] = total.get(name, 0) + count
        setup = Setup(
            model=model, kha=kha, batch=batch, precision="fp32", distributed_optimizer=step
        )
        planned.append(estimate_communication(Rank(setup, layout, stage)))
    return total, planned


def summed(planned, *names):
    return sum(getattr(plan, name) for plan in planned for name in names)


@pytest.mark.parametrize(
    ("world", "layout", "overrides"),
    [
        pytest.param(2, Layout(tp=2), {}, marks=pytest.mark.whole),
        (4, Layout(tp=4, sequence_parallel=True), {"num_query_groups": 2}),
    ],
    ids=["plain", "sequence parallel with few key/value heads"],
)
def test_tensor_parallel_bytes(ranks, world, layout, overrides):
    total, planned = compare(ranks, world, layout, overrides, microbatches=2)
    assert total.pop("kha") == summed(planned, "kha")
    assert sum(total.values()) == pytest.approx(summed(planned, "tensor"))


@pytest.mark.parametrize(
    ("kha", "sequence_parallel"),
    [
        (KHAConfig(talking=TalkingHeads(), collaborative=CollaborativeHeads(dim=10)), True),
        *(
            pytest.param(kha, sequence_parallel, marks=pytest.mark.whole)
            for kha, sequence_parallel in (
                (KHAConfig(talking=TalkingHeads()), False),
                (KHAConfig(moh=MixtureOfHeads(share=0.75, router="query_norm")), False),
                (KHAConfig.from_preset("moh_75"), True),
                (KHAConfig(gate=Gate(value="shared", dense="element")), True),
            )
        ),
    ],
    ids=str,
)
def test_what_mechanisms_exchange(ranks, kha, sequence_parallel):
    """Four ranks, of which two share a key/value head; KHA's bytes are those that are left."""
    layout = Layout(tp=4, sequence_parallel=sequence_parallel)
    total, planned = compare(ranks, 4, layout, {"num_query_groups": 2}, kha=kha)
    assert sum(total.values()) == pytest.approx(summed(planned, "tensor", "kha"))
    assert summed(planned, "kha") > 0


def test_expert_parallel_bytes(ranks):
    """Not with experts split over ranks: gloo cannot gather their uneven numbers of tokens."""
    layout = Layout(tp=2, ep=2, etp=1, sequence_parallel=True)
    total, planned = compare(ranks, 4, layout, EXPERTS)
    assert total.pop("kha") == summed(planned, "kha")
    names = ("tensor", "expert", "data", "expert_data", "kha_data")
    assert sum(total.values()) == pytest.approx(summed(planned, *names))


def test_data_parallel_bytes(ranks):
    total, planned = compare(ranks, 2, Layout(), {}, step=True)
    # buffers are padded to 64 elements a parameter
    assert sum(total.values()) == pytest.approx(summed(planned, "data", "kha_data"), rel=0.05)
