"""What the benchmarks of models refuse, and the variants that they compare."""

import os

import pytest
import torch

from kha_megatron.config import KHAConfig
from tests.tools.conftest import run_tool

MODELS = ["layer", "memory", "decode", "step", "kernels"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repetitions", "0"], "0 is less than 1"),
        (["--no-such-option"], "no-such-option"),
        (["--json"], "expected one argument"),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device was found",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_wrong_arguments_end_with_two(tool, capsys, name, words, says):
    with pytest.raises(SystemExit) as ended:
        tool("bench").main([name, "--device", "cpu", *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer", "memory"])
def test_sequences_must_fill_a_microbatch(tool, capsys, name):
    with pytest.raises(SystemExit) as ended:
        tool("bench").main([name, "--device", "cpu", "--tokens", "100", "--sequence", "64"])
    assert ended.value.code == 2
    assert "no multiple of --sequence 64" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer", "step"])
def test_unknown_variants_are_named(tool, capsys, name):
    with pytest.raises(SystemExit) as ended:
        tool("bench").main([name, "--device", "cpu", "--variants", "mpl"])
    assert ended.value.code == 2
    assert "linear/folded+kernels" in capsys.readouterr().err


def test_a_transformer_engine_that_is_not_whole_is_none(tool, monkeypatch):
    """As the extra ``te-cpu`` installs it, it cannot be measured on a GPU."""
    shapes = tool("shapes")
    monkeypatch.setattr(shapes.compat, "lacks_te_extension", lambda: True)
    assert not shapes.has("transformer_engine")
    assert shapes.has("torch")


def test_what_megatron_does_not_know_is_refused(interpreting_rank):
    words = ["--device", "cpu", "--variants", "mlp"]
    code, _ = interpreting_rank(run_tool, "layer", [*words, "--megatron=--no-such-flag"])
    assert code == 2


def test_a_refusal_is_one_line(tool, capsys):
    bench = tool("bench")
    given = ["step", "--device", "cpu", "--variants", "mlp", "--megatron=bare"]
    with pytest.raises(SystemExit) as ended:
        bench.exit_with(lambda: bench.main(given))
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected argument 'bare'")
    assert err.count("\n") == 1


def test_stock_is_always_there_and_first(tool):
    variants = tool("variants")
    found, skipped = variants.runnable(["gate", "mlp"], "cpu")
    assert [variant.name for variant in found] == ["stock", "gate", "mlp"]
    assert skipped == {}


def test_variants_are_what_their_names_say(tool, monkeypatch):
    variants = tool("variants")
    for name, variant in variants.VARIANTS.items():
        assert variant.kernels == name.endswith("kernels")
        assert variant.folded == ("folded" in name)
        assert variant.environment() == {"KHA_KERNELS": "triton" if variant.kernels else "torch"}
        kind = name.partition("/")[0]
        expected = {"stock": {}, "baseline": {}, "mlp": {"value": "mlp"}, "gate": {"value": "gate"}}
        linear = dict.fromkeys(("query", "key", "value"), "linear")
        if not variant.missing("cuda"):
            kha = variant.kha()
            assert kha.variants == KHAConfig(**expected.get(kind, linear)).variants
            assert getattr(kha, "fold", "never") == ("always" if variant.folded else "never")
        assert variant.words()[:2] == ["--kha-preset", variant.preset or "baseline"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "CUDA device" in variants.VARIANTS["mlp/kernels"].missing("cpu")


@pytest.mark.parametrize("before", [None, "auto"])
def test_a_variant_leaves_the_environment_as_it_was(tool, monkeypatch, before):
    monkeypatch.delenv("KHA_KERNELS", raising=False)
    if before:
        monkeypatch.setenv("KHA_KERNELS", before)
    with tool("variants").VARIANTS["mlp/kernels"].chosen():
        assert os.environ["KHA_KERNELS"] == "triton"
    assert os.environ.get("KHA_KERNELS") == before


def test_an_unknown_benchmark_gets_the_list(tool, capsys):
    bench = tool("bench")
    assert bench.main(["speed"]) == 2
    unknown = capsys.readouterr().out
    assert bench.main(["--help"]) == 0
    assert capsys.readouterr().out == unknown
    for name in bench.BENCHMARKS:
        assert f"  {name} " in unknown
        assert callable(tool(f"bench_{name}").results)
