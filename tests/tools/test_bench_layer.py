"""``tools/bench.py layer`` and the layers it measures."""

import json

import pytest
import torch

from tests.tools.conftest import run_tool

TINY = ["--device", "cpu", "--tokens", "24", "--sequence", "12", "--microbatches", "2"]


def test_every_variant_is_measured_in_every_turn_beside_stock(interpreting_rank, tmp_path):
    file = tmp_path / "layer.json"
    words = ["--variants", "baseline", "linear", "gate", "--repetitions", "4"]
    code, output = interpreting_rank(run_tool, "layer", [*TINY, *words, "--json", str(file)])
    assert code == 0
    report = json.loads(file.read_text())
    assert report["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert report["arguments"]["microbatches"] == 2
    (result,) = report["results"]
    assert (result["shape"], result["tokens"], result["precision"]) == ("tiny", 24, "bf16")
    assert result["backend"] == "local"
    wanted = {"stock", "baseline", "linear", "gate"}
    assert set(result["milliseconds"]) == set(result["over_stock"]) == wanted
    assert all(spread["count"] == 4 for spread in result["over_stock"].values())
    assert all(0 < s["low"] <= s["median"] <= s["high"] for s in result["milliseconds"].values())
    assert result["over_stock"]["stock"] == {"median": 1, "low": 1, "high": 1, "count": 4}
    assert (result["skipped"], result["failed"]) == ({}, {})
    assert "| tiny | 24 | bf16 | local | gate |" in output


def of_one_pass(names):
    """Output, input gradient and a weight gradient of each variant, away from the identity.

    All in Megatron's own attention: ours is torch's fused one on a CPU, which rounds otherwise.
    """
    from layers import Cell, Layer, start_megatron
    from variants import VARIANTS

    from kha_megatron.mcore.local_modules import GatheredDotProductAttention

    start_megatron()
    found = {}
    for name in names:
        layer = Layer(Cell("tiny", 24, 12, "bf16"), VARIANTS[name])
        with layer.variant.chosen(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(GatheredDotProductAttention, "_is_plain", lambda *args: False)
            output = layer.forward()
            output.backward(layer.upstream)
        weights = dict(layer.model.module.named_parameters())
        gradient = next(p.main_grad for n, p in weights.items() if "linear_qkv.weight" in n)
        found[name] = [t.detach().float().clone() for t in (output, layer.hidden.grad, gradient)]
    return found


def test_contenders_do_the_same_work(interpreting_rank):
    """What knocks nothing is stock bit for bit; two ways to knock agree, and are not stock."""
    found = interpreting_rank(of_one_pass, ["stock", "baseline", "mlp", "mlp/kernels", "linear"])
    for name in ("mlp", "linear"):
        assert not torch.equal(found[name][0], found["stock"][0])
    for ours, stock in zip(found["baseline"], found["stock"], strict=True):
        assert torch.equal(ours, stock)
    for eager, kernels in zip(found["mlp"], found["mlp/kernels"], strict=True):
        # the interpreter cuts where a GPU rounds to bfloat16
        assert (eager - kernels).norm() / eager.norm() < 3e-2


EVERY = {"num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128, "num_layers": 1}
MOE = {
    "hidden_size": 1536,
    "num_moe_experts": 64,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 1152,
}


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("moe", MOE), ("dense", {"hidden_size": 2560, "ffn_hidden_size": 9728})],
)
def test_shapes_are_the_papers(interpreting_rank, shape, sizes):
    found = interpreting_rank(config_fields, shape, "bf16", [*EVERY, *sizes, "params_dtype"])
    assert found == EVERY | sizes | {"params_dtype": torch.bfloat16}


def config_fields(shape, precision, names):
    """Fields of the configuration that Megatron makes of the arguments."""
    from layers import Cell, transformer_config

    config = transformer_config(Cell(shape, 8192, 8192, precision))
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_precisions_are_megatrons_recipes(interpreting_rank, recipe):
    found = interpreting_rank(config_fields, "dense", recipe, ["fp8", "fp8_recipe"])
    assert found["fp8_recipe"] == recipe
    assert found["fp8"] in ("hybrid", "e4m3")


def test_without_transformer_engine_fp8_is_left_out_with_the_reason(interpreting_rank):
    words = [*TINY, "--variants", "mlp", "--precisions", "tensorwise"]
    code, output = interpreting_rank(run_tool, "layer", words)
    assert code == 0
    assert "mlp skipped: FP8 needs Transformer Engine" in output
    assert "| mlp |" not in output


def test_times_are_of_a_microbatch_and_ratios_of_a_turn(tool, monkeypatch):
    bench = tool("bench_layer")
    seconds = {"stock": [2.0, 4.0, 40.0], "mlp": [3.0, 2.0, 40.0]}
    monkeypatch.setattr(bench, "of_each", lambda *_: ({"stock": Fake(), "mlp": Fake()}, {}, {}))
    monkeypatch.setattr(bench, "interleaved", lambda calls, *_, **__: seconds)
    given = tool("bench").arguments("layer", ["--device", "cpu", "--microbatches", "2"])
    result = bench.measure(Fake(), given, torch.device("cpu"))
    assert result["milliseconds"]["mlp"].median == 1500
    assert result["over_stock"]["mlp"].median == 1
    assert result["over_stock"]["mlp"].low == 0.75


class Fake:
    """A cell or a layer."""

    shape, tokens, precision, backend = "moe", 8192, "bf16", "local"


@pytest.mark.parametrize(
    ("tokens", "variant", "ratio", "met", "aim_met"),
    [
        (8192, "mlp/kernels", 1.0099, True, False),
        (8192, "mlp/kernels", 1.0101, False, False),
        (32768, "mlp/kernels", 0.985, True, True),
        (32768, "linear/folded", 1.004, False, False),
    ],
)
def test_targets_of_the_moe_shape(tool, tokens, variant, ratio, met, aim_met):
    bench = tool("bench_layer")
    cell = Fake()
    cell.tokens = tokens
    ratio = tool("measuring").Spread(ratio, ratio - 5e-5, ratio + 5e-5, 9)
    found = bench.judged(cell, variant, ratio)
    assert (found["met"], found["aim_met"]) == (met, aim_met)
    assert bench.verdict(found).startswith("met" if met else "MISSED")
    assert "undecided" not in bench.verdict(found)
    assert bench.judged(cell, "mlp", ratio) is None


def test_a_spread_around_the_limit_decides_nothing(tool):
    bench = tool("bench_layer")
    wide = tool("measuring").Spread(1.005, 0.98, 1.02, 9)
    found = bench.judged(Fake(), "mlp/kernels", wide)
    assert bench.verdict(found) == "met, undecided by the spread (at most 1.01, aim 1)"
