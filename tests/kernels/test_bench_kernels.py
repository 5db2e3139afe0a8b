"""``tools/bench.py kernels`` on the CPU at tiny sizes, and what it stands on."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--device", "cpu", "--tokens", "5", "--heads", "3", "--head-dims", "64"]
EVERY_WORK = {"forward", "input gradient", "weight gradients", "forward + all gradients"}


@pytest.fixture
def measuring():
    return importlib.import_module("measuring")


def bench(*words, **environment):
    return subprocess.run(
        [sys.executable, str(TOOLS / "bench.py"), "kernels", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "KHA_KERNELS": "auto", "TRITON_INTERPRET": "0", **environment},
    )


def test_times_what_runs_here_and_says_what_does_not(tmp_path):
    path = tmp_path / "kernels.json"
    result = bench(*SMALL, "--json", str(path))
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert report["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["arguments"]["tokens"] == [5]
    assert {r["work"] for r in report["results"]} == EVERY_WORK
    for found in report["results"]:
        assert set(found["microseconds"]) == {"eager", "gemms", "copy"}
        assert all(spread["median"] > 0 for spread in found["microseconds"].values())
        assert found["kernels_over"] == {}
    assert found["bytes"] == 7 * 5 * 3 * 64 * 2
    for reason in (
        "kernels skipped: tensors are on cpu",
        "compiled skipped: torch.compile takes minutes on a CPU",
        "te skipped: Transformer Engine",
    ):
        assert f", forward: {reason}" in result.stdout
    assert "| eager |" in result.stdout
    assert "not measured" in result.stdout


def run_here(words, name="kernels"):
    """A tool within this process, which may be the interpreter's."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(TOOLS)
        assert importlib.import_module("bench").main([name, *words]) == 0
    return out.getvalue()


def test_compares_the_kernels_with_everything_else(interpreter, tmp_path):
    path = tmp_path / "kernels.json"
    words = ["--variants", "gate", "--repetitions", "2", "--json", str(path)]
    assert "| kernels |" in interpreter(run_here, [*SMALL, *words])
    for found in json.loads(path.read_text())["results"]:
        assert set(found["kernels_over"]) == {"kernels", "eager", "gemms", "copy"}
        assert found["kernels_over"]["kernels"]["median"] == 1
        assert 0 < found["relative_errors"]["dx"] < 1e-2


def test_every_case_is_compiled_for_its_sizes(measuring, monkeypatch):
    """Eager torch under the name of compiled one would be beaten by anything."""
    tool, graphs, compile_ = importlib.import_module("bench_kernels"), [], torch.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=counting))
    for tokens in range(3, 13):
        case = tool.Case("gate", tokens, 2, 8, torch.float32, torch.device("cpu"))
        data = tool.Tensors.of(case)
        way = tool.compiled(replace(case, device=torch.device("cuda")), data)
        way.knock(data.x)
    assert len(graphs) == 10


def test_help_has_an_example():
    result = bench("--help")
    assert result.returncode == 0
    assert "python tools/bench.py kernels --tokens 8192 32768 --json" in result.stdout


def test_every_contender_runs_in_every_turn(measuring):
    calls = {"a": [], "b": []}
    contenders = {name: lambda name=name: calls[name].append(0) for name in calls}
    times = measuring.interleaved(contenders, torch.device("cpu"), repetitions=5, warm_up=2)
    assert {name: len(values) for name, values in times.items()} == {"a": 5, "b": 5}
    assert {name: len(values) for name, values in calls.items()} == {"a": 7, "b": 7}


def test_contenders_take_turns_in_changing_order(measuring):
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "abc"}
    measuring.interleaved(contenders, torch.device("cpu"), repetitions=20, warm_up=0)
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(set(turn) == set("abc") for turn in turns)
    assert len(set(turns)) > 3


def test_ratios_are_taken_turn_by_turn(measuring):
    spread = measuring.ratios([2.0, 20.0, 200.0], [1.0, 10.0, 50.0])
    assert (spread.low, spread.median, spread.high, spread.count) == (2, 2, 3, 3)
    assert spread.text(1) == "2.0 (2.0-3.0)"
    assert measuring.Spread.of([4.0]) == measuring.Spread(4.0, 4.0, 4.0, 1)


def test_the_machine_is_described(measuring):
    machine = measuring.describe_machine(torch.device("cpu"))
    assert machine["cores"] >= 1
    assert "gpu" not in machine
    line = measuring.machine_line(machine)
    assert "no GPU" in line
    assert f"torch {importlib.metadata.version('torch')}" in line
