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
    rows = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}
    for name in ("model", "KHA"):
        *parts, total = map(float, rows[name])
        assert sum(parts) == pytest.approx(total, abs=0.03)


@pytest.mark.fast
def test_json_adds_up(run):
    changes = [
        *("--global-batch-size", "480", "--recompute-granularity", "full"),
        *("--fp8-format", "hybrid", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--pipeline-model-parallel-size", "3", "--expert-model-parallel-size", "4"),
        *("--expert-tensor-parallel-size", "1"),
    ]
    words = [*PLAN[:2], "--gpus", "96", "--gpu-memory", "40GiB", "--json"]
    result = json.loads(run(*words, "--", *changes)[1])
    assert result["gpu_memory"] == 40 * 2**30
    assert (result["precision"], result["recompute"]) == ("fp8", "full")
    layout = result["layout"]
    assert (layout["dp"], layout["expert_dp"], layout["etp"]) == (16, 8, 1)
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
    assert (code, json.loads(stdout)["fits"]) == (1, False)
    code, stdout, _ = run("plan", "dense-3.9b", "--gpus=8", "--json")
    assert (code, json.loads(stdout)["fits"]) == (0, True)
