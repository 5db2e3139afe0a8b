"""``tools/bench.py step``: real runs at tiny sizes, and how their times become ratios."""

import json

import pytest

from tests.tools.conftest import TOOLS

SECONDS = {"stock": [1.0, 4.0], "mlp": [2.0, 3.0]}


def test_trains_stock_and_ours_in_turns(tool, training_package, tmp_path, capsys):
    file = tmp_path / "step.json"
    words = ["--device", "cpu", "--variants", "mlp", "mlp/kernels", "--steps", "2"]
    words += ["--repetitions", "1", "--layers", "1", "--json", str(file)]
    assert tool("bench").main(["step", *words]) == 0, capsys.readouterr().err
    (result,) = json.loads(file.read_text())["results"]
    assert set(result["seconds"]) == {"stock", "mlp"}  # each checked for the class of its attention
    assert result["tokens"] == 2 * 32
    for name, spread in result["seconds"].items():
        speed = result["tokens_per_second"][name]["median"]
        assert speed == pytest.approx(result["tokens"] / spread["median"])
    assert result["over_stock"]["stock"]["median"] == 1
    assert result["failed"] == {}
    out = capsys.readouterr().out
    assert "| tiny, 1 layers | 64 | bf16 | mlp |" in out
    assert "mlp/kernels skipped: the kernels need a CUDA device" in out


def test_ratios_are_of_a_turn(tool, monkeypatch):
    bench = tool("bench_step")
    times = {name: iter(values) for name, values in SECONDS.items()}
    monkeypatch.setattr(bench, "run", lambda variant, shape, given: next(times[variant.name]))
    given = tool("bench").arguments(
        "step", ["--device", "cpu", "--variants", "mlp", "--repetitions", "2"]
    )
    result = bench.measure("tiny", given)
    assert (result["over_stock"]["mlp"].low, result["over_stock"]["mlp"].count) == (1.0625, 2)
    assert result["tokens_per_second"]["mlp"].high == pytest.approx(64 * (1 / 3 + 0.75 / 6))


def test_a_variant_that_fails_leaves_the_others(tool, monkeypatch, capsys):
    bench = tool("bench_step")
    monkeypatch.setattr(bench, "run", fail_in("gate"))
    words = ["--device", "cpu", "--variants", "gate", "mlp", "--repetitions", "3"]
    assert tool("bench").main(["step", *words]) == 1
    out = capsys.readouterr().out
    assert "gate failed: exit code 1 after 0 steps" in out
    assert "| mlp |" in out


def fail_in(name):
    def run(variant, shape, given):
        if variant.name == name:
            raise RuntimeError("exit code 1 after 0 steps:\nthe last lines")
        return 1.0

    return run


def test_the_command_is_the_recipes(tool):
    """What a GPU machine with Transformer Engine and several ranks would run."""
    bench = tool("bench_step")
    given = tool("bench").arguments("step", ["--device", "cpu", "--ranks", "2", "--layers", "6"])
    given.device, given.megatron = "cuda", ["--expert-model-parallel-size=2"]
    variants = tool("variants").VARIANTS
    stock = bench.command(variants["stock"], "moe", given)
    ours = bench.command(variants["mlp"], "moe", given)
    assert stock[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert stock[stock.index(str(TOOLS / "timed_training.py")) + 1] == "--stock"
    assert [w for w in ours if w != "kha_mlp"] == [
        w for w in stock if w not in ("--stock", "baseline")
    ]
    for flag, value in {
        "--hidden-size": "1536",
        "--num-layers": "6",
        "--expert-model-parallel-size": "2",
        "--device": "cuda",
        "--vocab-size": "157184",
    }.items():
        assert ours[ours.index(flag) + 1] == value
