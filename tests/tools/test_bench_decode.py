"""``tools/bench.py decode`` on the CPU at tiny sizes."""

import json

import pytest
import torch

from kha_megatron.recipes.paper import Shape

NEW, PROMPT, BATCHES, LAYERS = 3, 4, (1, 3), 2
CACHE = LAYERS * 2 * 4 * 128 * 4  # bytes of a token: keys and values of four heads, float32


@pytest.fixture(params=[None, (4, 2)], ids=["dense", "experts"])
def bench(tool, monkeypatch, request):
    """The tool with a smaller model."""
    module = tool("bench_decode")
    monkeypatch.setattr(module, "SMALL", Shape(LAYERS, 64, 96, request.param))
    return module


def test_folded_is_the_baseline_again_and_mlp_keeps_its_cache(bench, tool, tmp_path, capsys):
    file = tmp_path / "decode.json"
    words = ["--device", "cpu", "--new", str(NEW), "--prompt", str(PROMPT), "--repetitions", "2"]
    words += ["--batches", *map(str, BATCHES), "--folder", str(tmp_path), "--json", str(file)]
    words += ["--caches", "dynamic"]
    assert tool("bench").main(["decode", *words]) == 0
    assert not list(tmp_path.glob("kha-decode-*")), "what it made is deleted"
    results = json.loads(file.read_text())["results"]
    assert [(r["batch"], r["cache"]) for r in results] == [(batch, "dynamic") for batch in BATCHES]
    for result in results:
        assert set(result["tokens_per_second"]) == {"baseline", "mlp", "linear", "folded"}
        assert result["classes"]["folded"] == result["classes"]["baseline"] != "KHAForCausalLM"
        assert result["classes"]["mlp"] == result["classes"]["linear"] == "KHAForCausalLM"
        # the last token is not run
        assert set(result["cache_bytes"].values()) == {CACHE * result["batch"] * (PROMPT + NEW - 1)}
        assert result["over_baseline"]["baseline"]["median"] == 1
        assert result["over_baseline"]["mlp"]["count"] == 2
        assert result["targets"]["folded"]["met"]
        assert set(result["targets"]) == {"folded", "mlp"}
    assert "| 3 | dynamic | mlp | KHAForCausalLM |" in capsys.readouterr().out


@pytest.mark.whole  # compiling takes half a minute
@pytest.mark.parametrize("bench", [None], ids=["dense"], indirect=True)
def test_with_a_static_cache_the_model_is_compiled(bench, tool, tmp_path):
    file = tmp_path / "decode.json"
    words = ["--device", "cpu", "--new", str(NEW), "--prompt", str(PROMPT), "--repetitions", "2"]
    words += ["--batches", "1", "--caches", "static", "--models", "mlp", "--json", str(file)]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert tool("bench").main(["decode", *words]) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= compiled + 2
    (result,) = json.loads(file.read_text())["results"]
    assert set(result["tokens_per_second"]) == {"baseline", "mlp"}
    assert result["targets"]["mlp"]["text"] == "at most 1.01, same cache"


def test_another_cache_or_class_misses_the_target(tool):
    bench = tool("bench_decode")
    spread = tool("measuring").Spread
    near, far = spread(1.01, 1.0, 1.01, 9), spread(1.02, 1.02, 1.5, 9)
    models = {"baseline": 1, "folded": 2, "mlp": "a class of its own"}
    same = dict.fromkeys(models, (6, 100))
    assert bench.judged("folded", models, same, far)["met"]
    assert not bench.judged("folded", models, same | {"folded": (6, 101)}, near)["met"]
    assert not bench.judged("folded", models | {"folded": ""}, same, near)["met"]
    assert bench.judged("mlp", models, same, near)["met"]
    assert not bench.judged("mlp", models, same, far)["met"]
    assert not bench.judged("mlp", models, same | {"mlp": (6, 101)}, near)["met"]
