"""Test which rank is the largest, whether it fits on a GPU, and which runs are refused."""

from dataclasses import asdict, replace

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.plan.counts import compute_flops
from kha_megatron.plan.estimate import build_setup, estimate_run
from kha_megatron.plan.memory import estimate_memory
from kha_megatron.plan.rank import Rank
from kha_megatron.recipes import RECIPES, get_recipe

GB = 1e9


def estimate(name, words="", gpus=8):
    return estimate_run(get_recipe(name).run.updated(words.split()), gpus)


def test_every_recipe_for_gpus_fits():
    checked = 0
    for recipe in RECIPES.values():
        run = recipe.run
        if run.training.device != "cuda":
            continue
        result = estimate_run(run, recipe.ranks)
        assert result.fits(80 * GB), (recipe.name, result.explain_fit(80 * GB))
        checked += 1
    assert checked > 100


def test_flops_are_those_of_three_forward_passes():
    result = estimate("dense-1.7b")
    run = get_recipe("dense-1.7b").run
    forward = compute_flops(run.model, 4096).forward
    assert result.flops_per_step == 512 * 3 * forward
    assert result.flops_per_token * 512 * 4096 == result.flops_per_step


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("dense-0.6b", 8, ""),
        ("moe-a0.8b-6.6b", 24, "--global-batch-size 768"),
        (
            "dense-1.7b",
            16,
            "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        ),
    ],
)
def test_kha_costs_what_it_adds(name, gpus, words):
    """The baseline's memory differs by exactly what is shown as KHA's."""
    knocked = estimate(name, words, gpus)
    baseline = estimate(name, f"{words} --kha-preset baseline", gpus)
    assert asdict(baseline.kha_memory) == dict.fromkeys(asdict(baseline.kha_memory), 0)
    assert knocked.memory == baseline.memory
    assert 0 < knocked.kha_memory.total < 0.15 * knocked.total_memory
    counts = knocked.largest_rank.counts
    assert counts.total - baseline.largest_rank.counts.total == counts.kha
    layout = knocked.layout
    assert layout.dp * layout.tp * layout.pp * layout.cp == gpus
    batch = knocked.setup.batch
    sequences = batch.micro_batch_size * layout.dp
    assert knocked.largest_rank.microbatches * sequences == batch.global_batch_size


def test_recompute_and_memory_decide_what_fits():
    totals = []
    for recompute in ("", "--recompute-granularity selective", "--recompute-granularity full"):
        result = estimate("dense-3.9b", f"--micro-batch-size 4 {recompute}")
        totals.append(result.total_memory)
        assert result.fits(result.total_memory / 0.89)
        assert not result.fits(result.total_memory / 0.91)
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("--pipeline-model-parallel-size 4", 0),
        # the middle stage has 18 of 24 layers
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E(t|)*2t*18|t*4L", 2),
    ],
)
def test_the_largest_rank_of_all_stages_decides(words, stage):
    result = estimate("dense-0.6b", words)
    assert result.largest_rank.stage == stage
    for number in range(4):
        memory, kha_memory = estimate_memory(Rank(result.setup, result.layout, number))
        assert memory.total + kha_memory.total <= result.total_memory


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        # attention weights are only kept for one layer at a time
        (
            "dense-3.9b",
            "--kha-preset talking --micro-batch-size 1",
            "--recompute-modules core_attn.",
        ),
        ("dense-3.9b", "--micro-batch-size 4", "Set --micro-batch-size 2."),
        ("dense-3.9b", "--num-layers 144", "Use more GPUs with a larger --tensor"),
    ],
)
def test_a_remedy_is_named_for_what_does_not_fit(name, words, remedy):
    text = estimate(name, words).explain_fit(80 * GB)
    assert "which does not fit into 90% of 80.0 GB" in text
    assert remedy in text


def test_invalid_layouts_are_refused():
    for words, message in (
        ("--tensor-model-parallel-size 3", "tensor-parallel ranks"),
        ("--pipeline-model-parallel-size 16", "The number of ranks (8) must be divisible by 16"),
        ("--pipeline-model-parallel-size 8 --num-layers 23", "Cannot split 23 layers"),
        ("--heads gate.key=head", "with QK-norm"),
    ):
        with pytest.raises(ConfigError) as refused:
            estimate("dense-0.6b", words)
        assert message in str(refused.value)


def test_a_recipe_that_cannot_be_counted_is_refused():
    run = get_recipe("dense-0.6b").run
    with pytest.raises(ConfigError, match=r"Cannot count a model with .* biases"):
        build_setup(run.updated(add_bias_linear=True))
    for changes, reason in (
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"use_torch_fsdp2": True}, "FSDP"),
        ({"decrease_batch_size_if_needed": True}, "without a fixed batch size"),
    ):
        with pytest.raises(ConfigError, match=reason):
            build_setup(run.updated(**changes))
    for name in ("table3/gta-mlp", "attention/gla-linear", "table3/mla-linear"):
        with pytest.raises(ConfigError, match=r"of [GM][TL]A with --tensor-model-parallel-size"):
            estimate(name, "--tensor-model-parallel-size 2")


def test_half_precisions_differ_in_their_gradients():
    """Megatron accumulates gradients of fp16 in fp16, see ``validate_args``."""
    bf16 = estimate("dense-0.6b")
    fp16 = estimate("dense-0.6b", "--fp16")
    assert fp16.setup == replace(bf16.setup, precision="fp16", gradient_size=2)
    assert bf16.memory == replace(fp16.memory, gradients=2 * fp16.memory.gradients)
    for words, size in (
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ("--grad-reduce-in-bf16", 2),
        ("--main-grads-dtype bf16", 2),
        ("--main-grads-dtype fp32", 4),
        ("--fp8-format hybrid", 4),
    ):
        assert estimate("dense-0.6b", words).setup.gradient_size == size, words
    single = get_recipe("dense-0.6b").run.updated(["--grad-reduce-in-bf16"], bf16=False)
    assert build_setup(single).precision == "fp32"
    assert build_setup(single).gradient_size == 4


@pytest.mark.parametrize(
    ("words", "recompute"),
    [
        ("--recompute-activations", "selective"),
        ("--recompute-activations --recompute-granularity full", "selective"),
        ("--recompute-granularity selective --recompute-modules mlp", "none"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
        ("--recompute-granularity full --recompute-method block", "--recompute-method block"),
        ("--recompute-granularity full --recompute-num-layers 6", "--recompute-num-layers 6"),
    ],
)
def test_only_modelled_recomputation_is_estimated(words, recompute):
    if recompute.startswith("--"):
        with pytest.raises(ConfigError, match=f"Cannot estimate the memory of {recompute}, only"):
            estimate("dense-0.6b", words)
    else:
        assert estimate("dense-0.6b", words).setup.recompute == recompute


def test_microbatch_groups_of_virtual_stages_need_memory():
    words = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3"
    default = estimate("dense-3.9b", words)
    equal = estimate("dense-3.9b", f"{words} --microbatch-group-size-per-virtual-pipeline-stage 4")
    larger = estimate(
        "dense-3.9b", f"{words} --microbatch-group-size-per-virtual-pipeline-stage 16"
    )
    assert equal.memory == default.memory
    kha_activations = larger.kha_memory.activations / default.kha_memory.activations
    assert kha_activations == pytest.approx(39 / 15)  # forward passes in flight
