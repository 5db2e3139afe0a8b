"""Test which layouts the planner lists, their order, and the cost of KHA."""

import functools
import math
from dataclasses import asdict, replace

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.layout import Layout
from kha_megatron.model.rules import check_layout
from kha_megatron.plan.communication import estimate_communication
from kha_megatron.plan.counts import compute_flops
from kha_megatron.plan.rank import Rank
from kha_megatron.plan.search import build_setup, fits, get_layout_arguments, plan_layouts
from kha_megatron.plan.timing import estimate_time, list_gemms
from kha_megatron.recipes import get_recipe

GB = 1e9


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("dense-0.6b", 8),
        ("moe-a0.8b-6.6b", 24),
        pytest.param("moe-a1.6b-14.6b", 4096, marks=pytest.mark.whole),
    ],
)
def test_every_listed_layout_is_legal_and_costed(name, gpus):
    batch = {"global_batch_size": 768} if gpus == 24 else {}
    setup = build_setup(get_recipe(name).run.updated(**batch))
    plans = plan_layouts(setup, gpus, 80 * GB, {})
    assert plans
    seen = set()
    for plan in plans:
        check_layout(setup.model, plan.layout, setup.batch)
        layout = plan.layout
        assert layout.dp * layout.tp * layout.pp * layout.cp == gpus
        assert plan.microbatches * layout.dp == setup.batch.global_batch_size
        assert 0 <= plan.time.idle < 1
        assert 0 < plan.kha_memory.total < 0.15 * plan.total_memory
        assert plan.communication.total > 0
        assert layout not in seen
        seen.add(layout)
    keys = [(not fits(p, 80 * GB), round(math.log(p.time.total, 1.05))) for p in plans]
    assert keys == sorted(keys)


def test_fixed_sizes_are_kept():
    setup = build_setup(get_recipe("moe-a0.8b-6.6b").run.updated(global_batch_size=48))
    fixed = {"tp": 2, "pp": 3, "vpp": 2, "cp": 1, "ep": 4, "etp": 1}
    (plan,) = plan_layouts(setup, 24, 80 * GB, fixed)
    assert {name: getattr(plan.layout, name) for name in fixed} == fixed
    run = get_recipe("moe-a0.8b-6.6b").run.updated(**get_layout_arguments(plan.layout, setup.model))
    assert run.layout(24) == plan.layout


def test_a_prime_number_of_layers_counts_the_loss_as_a_layer():
    setup = build_setup(get_recipe("moe-a1.6b-14.6b").run)
    plans = plan_layouts(setup, 64, 80 * GB, {"pp": 4})
    assert all(plan.layout.loss_as_layer for plan in plans)
    assert sum(map(sum, plans[0].layout.chunk_layers(23))) == 23


def test_kha_costs_what_it_adds():
    """The baseline's plan differs by exactly what is shown as KHA's."""
    setup = build_setup(get_recipe("dense-1.7b").run)
    plain = replace(setup, kha=KHAConfig())
    fixed = {"tp": 2, "pp": 2, "vpp": 1, "cp": 1}
    (knocked,), (baseline,) = (plan_layouts(s, 16, 80 * GB, fixed) for s in (setup, plain))
    assert asdict(baseline.kha_memory) == dict.fromkeys(asdict(baseline.kha_memory), 0)
    assert knocked.memory == baseline.memory
    sent = asdict(knocked.communication)
    assert sent.pop("kha") > 0
    assert sent.pop("kha_data") > 0
    assert sent == {n: v for n, v in asdict(baseline.communication).items() if n in sent}


def test_recompute_and_memory_decide_what_fits():
    name, fixed = "dense-3.9b", {"tp": 1, "pp": 1, "cp": 1}
    totals = []
    for recompute in ("", "--recompute-granularity selective", "--recompute-granularity full"):
        words = f"--micro-batch-size 4 {recompute}".split()
        setup = build_setup(get_recipe(name).run.updated(words))
        (plan,) = plan_layouts(setup, 8, 80 * GB, fixed)
        totals.append(plan.total_memory)
        assert fits(plan, plan.total_memory / 0.89)
        assert not fits(plan, plan.total_memory / 0.91)
    assert totals == sorted(totals, reverse=True)


def test_a_recipe_that_cannot_be_counted_is_refused():
    run = get_recipe("dense-0.6b").run
    with pytest.raises(ConfigError, match=r"Cannot count a model with .* biases"):
        build_setup(run.updated(add_bias_linear=True))
    with pytest.raises(ConfigError, match="multi-token prediction"):
        build_setup(run.updated(mtp_num_layers=1))
    for name in ("table3/gta-mlp", "attention/gla-linear", "table3/mla-linear"):
        with pytest.raises(ConfigError, match="Planning is not supported"):
            build_setup(get_recipe(name).run)


def simulate(stages, microbatches):
    """Return the end of a 1F1B schedule. Forward passes take a third of a stage's time."""
    orders = []
    for stage in range(len(stages)):
        early = min(microbatches, len(stages) - 1 - stage)
        passes = [("forward", m) for m in range(early)]
        for m in range(microbatches):
            passes += [("forward", m + early)] * (m + early < microbatches) + [("backward", m)]
        orders.append(passes)

    @functools.cache
    def end(stage, index):
        if not 0 <= stage < len(stages) or index < 0:
            return 0
        kind, m = orders[stage][index]
        before = stage + (1 if kind == "backward" else -1)
        ready = end(before, orders[before % len(stages)].index((kind, m)))
        spent = stages[stage] * (2 if kind == "backward" else 1) / 3
        return max(ready, end(stage, index - 1)) + spent

    return end(0, 2 * microbatches - 1)


def test_the_slowest_stage_sets_the_pace():
    """A vocabulary of 157,184 beside 24 layers of 1,024: the last stage is the slowest."""
    setup = build_setup(get_recipe("dense-0.6b").run.updated(global_batch_size=14))
    (plan,) = plan_layouts(setup, 8, 80 * GB, {"tp": 1, "pp": 4, "vpp": 1, "cp": 1})
    ranks = [Rank(setup, plan.layout, stage) for stage in range(4)]
    times = [estimate_time([rank], [estimate_communication(rank)]) for rank in ranks]
    stages = [(time.compute + time.sent) / plan.microbatches for time in times]
    assert stages[3] > 1.2 * stages[2]
    end = simulate(stages, plan.microbatches)
    assert plan.time.total - plan.time.data == pytest.approx(end, rel=1e-3)
    assert plan.time.idle * plan.time.total == pytest.approx(end - 7 * sum(stages) / 4, rel=1e-2)
    assert plan_layouts(setup, 14, 80 * GB, {})[0].layout.pp == 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dense-1.7b", {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}),
        ("moe-a0.8b-6.6b", {"tp": 2, "etp": 1, "ep": 4, "pp": 3, "sequence_parallel": True}),
        ("moe-a0.8b-6.6b", {"tp": 4, "ep": 2, "sequence_parallel": True}),
    ],
)
def test_all_ranks_together_multiply_what_the_model_does(name, sizes):
    setup = build_setup(get_recipe(name).run.updated(global_batch_size=48))
    layout, found = Layout(world_size=24, **sizes), 0
    for stage in range(layout.pp):
        rank = Rank(setup, layout, stage)
        flops = sum(
            2 * n * rows * inputs * outputs for n, rows, inputs, outputs in list_gemms(rank)
        )
        found += 24 / layout.pp * rank.microbatches * flops
    work = compute_flops(setup.model, KHAConfig(), setup.batch.seq_length)
    assert found == pytest.approx(48 * (work.projections + work.mlp + work.logits))


def test_expert_parallelism_stays_within_a_node():
    setup = build_setup(get_recipe("moe-a0.8b-6.6b").run)
    assert plan_layouts(setup, 64, 80 * GB, {})[0].layout.ep == 8
    fixed = {"tp": 1, "pp": 1, "cp": 1}
    near, far = (plan_layouts(setup, 64, 80 * GB, fixed | {"ep": ep})[0].time for ep in (8, 64))
    # 56 of 64 ranks are on other nodes, and the network is nine times slower than NVLink
    assert far.sent == pytest.approx(near.sent * 9 * (56 / 64) / (7 / 8))
    assert far.expert_rows == 8 * near.expert_rows
    assert near.gradient_bytes > 2 * far.gradient_bytes
