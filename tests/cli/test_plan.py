"""``kha-megatron plan``: tables, JSON and exit codes."""

import json

import pytest

PLAN = ["plan", "moe-a0.8b-6.6b", "--gpus", "64"]


def test_tables_show_the_layout_and_the_memory(run):
    text = run(*PLAN, "--", "--tensor-model-parallel-size", "2", "--sequence-parallel")[1]
    assert "6,614,249,472 (881,160,192 active, 884,736 for KHA)" in text
    assert "TP 2, EP 8, DP 32 (16 microbatches)" in text
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
    assert result["microbatches"] == 30
    parts = [*result["memory"].values(), *result["kha_memory"].values()]
    assert sum(parts) == pytest.approx(result["total_memory"])
    assert result["parameters"]["largest_rank"] < result["parameters"]["total"] / 8


def test_exit_code_tells_whether_it_fits(run):
    words = ["plan", "dense-3.9b", "--gpus=8", "--gpu-memory=40GB"]
    code, stdout, _ = run(*words)
    assert code == 1
    assert "about 50.7 GB of GPU memory (21.1 GB for activations)" in stdout
    assert "Add --recompute-granularity full" in stdout
    code, stdout, _ = run(*words, "--json")
    assert code == 1
    assert not json.loads(stdout)["fits"]
    code, stdout, _ = run("plan", "dense-3.9b", "--gpus=8", "--json")
    assert code == 0
    assert json.loads(stdout)["fits"]
