"""``kha-megatron plan``: tables and JSON."""

import json

import pytest

PLAN = ["plan", "moe-a0.8b-6.6b", "--gpus", "64"]


def test_tables_list_the_layouts_and_the_assumptions(run):
    text = run(*PLAN, "--ep", "8", "--limit", "3")[1]
    assert "6,614,249,472 parameters (881,160,192 active, 884,736 for KHA on value=mlp)" in text
    assert "valid layouts on 64 GPUs" in text
    assert "Estimates assume Transformer Engine" in text
    rows = [line.split() for line in text.splitlines() if " dp" in line]
    assert len(rows) == 9
    assert {row[-1] for row in rows[:3]} == {"yes"}
    assert rows[6][2:4] == ["4096", "2048"]  # rows per GEMM and per expert
    assert all("ep8" in row for row in rows)
    assert max(map(len, text.splitlines()[1:-3])) <= 80  # a plain terminal
    assert "--expert-model-parallel-size 8" in text.splitlines()[-1]


def test_json_adds_up(run):
    words = ["--tp", "2", "--pp", "3", "--vpp", "1", "--cp", "1", "--ep", "4", "--etp", "1"]
    words = [*PLAN[:2], "--gpus", "96", *words, "--gpu-memory", "40GiB", "--json"]
    changes = "--global-batch-size 480 --recompute-granularity full --fp8-format hybrid"
    result = json.loads(run(*words, "--", *changes.split())[1])
    assert result["gpu_memory"] == 40 * 2**30
    assert (result["precision"], result["recompute"]) == ("fp8", "full")
    (layout,) = result["layouts"]
    assert layout["layout"]["dp"] == 16
    assert layout["layout"]["expert_dp"] == 8
    assert layout["microbatches"] == 30
    # of equal stages, and the last has the logits as well
    assert 2 / 32 < layout["time"]["idle"] < 1
    parts = [*layout["memory"].values(), *layout["kha_memory"].values()]
    assert sum(parts) == pytest.approx(layout["total_memory"])
