"""``kha-megatron plan``: tables, JSON and exit codes."""

import json

import pytest

from kha_megatron.recipes import RECIPES

PLAN = ["plan", "moe-a0.8b-6.6b", "--gpus", "64"]


def test_tables_show_the_layout_and_the_memory(run):
    text = run(*PLAN, "--", "--tensor-model-parallel-size", "2", "--sequence-parallel")[1]
    assert "6,614,249,472 (881,160,192 active, 884,736 for KHA)" in text
    assert "TP 2, EP 8, DP 32 (4 microbatches)" in text
    assert "8.93 GFLOPs" in text
    assert "which fits into 90% of 80.0 GB." in text
    assert "Memory is estimated for Transformer Engine" in text
    checked = set()
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name in ("model", "KHA"):
            *parts, total = map(float, numbers)
            assert sum(parts) == pytest.approx(total, abs=0.03)
            checked.add(name)
    assert checked == {"model", "KHA"}


@pytest.mark.fast
def test_json_adds_up(run):
    words = ["plan", "moe-a0.8b-6.6b", "--gpus", "96", "--gpu-memory", "40GiB", "--json"]
    words += ["--", "--global-batch-size", "480", "--recompute-granularity", "full"]
    words += ["--fp8-format", "hybrid", "--tensor-model-parallel-size", "2"]
    words += ["--sequence-parallel", "--pipeline-model-parallel-size", "3"]
    words += ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    _, stdout, _ = run(*words)
    result = json.loads(stdout)
    assert result["gpu_memory"] == 40 * 2**30
    assert result["precision"] == "fp8"
    assert result["recompute"] == "full"
    layout = result["layout"]
    assert layout["dp"] == 16
    assert layout["expert_dp"] == 8
    assert layout["etp"] == 1
    assert result["microbatches"] == 15
    parts = [*result["memory"].values(), *result["kha_memory"].values()]
    assert sum(parts) == pytest.approx(result["total_memory"])
    assert result["parameters"]["largest_rank"] < result["parameters"]["total"] / 8


def test_exit_code_tells_whether_it_fits(run):
    words = ["plan", "dense-3.9b", "--gpus=8", "--gpu-memory=40GB"]
    code, stdout, _ = run(*words)
    assert code == 1
    assert "about 71.8 GB of GPU memory (42.3 GB for activations)" in stdout
    assert "Add --recompute-granularity full" in stdout
    assert "and set --micro-batch-size 1." in stdout
    code, stdout, _ = run("plan", "dense-3.9b", "--gpus=8", "--gpu-memory=60GB")
    assert code == 1
    assert "Set --micro-batch-size 1." in stdout
    code, stdout, _ = run(
        "plan", "dense-3.9b", "--gpus=8", "--gpu-memory=60GB", "--", "--micro-batch-size", "1"
    )
    assert code == 0
    code, stdout, _ = run(*words, "--json")
    assert code == 1
    assert not json.loads(stdout)["fits"]
    code, stdout, _ = run("plan", "dense-3.9b", "--gpus=8", "--json")
    assert code == 0
    assert json.loads(stdout)["fits"]


def test_all_recipes_for_gpus_fit_with_the_largest_micro_batch(run):
    """A table shows less than the JSON output, but the same numbers."""
    code, stdout, _ = run("plan", "*", "--json")
    assert code == 0
    rows = json.loads(stdout)
    expected = [name for name, recipe in RECIPES.items() if recipe.run.training.device == "cuda"]
    assert [row["recipe"] for row in rows] == expected
    batches = {row["recipe"]: row["batch"]["micro_batch_size"] for row in rows}
    assert batches["table2/mlp-v"] == 4
    assert set(batches.values()) == {1, 2, 4, 8}
    assert all(row["fits"] for row in rows)
    assert max(row["total_memory"] for row in rows) < 0.9 * 80e9

    code, stdout, _ = run("plan", "table2")
    assert code == 2  # a name without a pattern
    code, stdout, _ = run("plan", "table2/*", "--gpu-memory", "75GB")
    assert code == 1
    shown = {line.split()[0]: line.split()[1:] for line in stdout.splitlines()[3:-1]}
    assert shown["table2/mlp-qkv"] == ["8", "4", "51.4", "68.9", "no"]
    assert shown["table2/mlp-v"][-1] == "yes"
    assert shown.keys() == {name for name in RECIPES if name.startswith("table2/")}


def test_pattern_without_gpu_recipes_is_refused(run):
    code, _, stderr = run("plan", "laptop/*")
    assert code == 2
    assert "No recipe for GPUs matches 'laptop/*'" in stderr


def test_more_gpus_than_micro_batches(run):
    """512 sequences on 256 GPUs: two for each, although the recipe has four."""
    words = ["plan", "moe-a0.8b-6.6b", "--gpus", "256", "--json"]
    _, stdout, stderr = run(*words)
    assert "Reducing --micro-batch-size from 4 to 2" in stderr
    assert json.loads(stdout)["batch"]["micro_batch_size"] == 2
    code, _, stderr = run(*words, "--", "--micro-batch-size", "4")  # the user's own is not changed
    assert code == 2
    assert "--global-batch-size (512) must be divisible by 1024" in stderr
