"""``tools/bench.py`` on the CPU at tiny sizes."""

import contextlib
import functools
import io
import json
import signal
import subprocess
import sys

import bench
import bench_kernels
import bench_layer
import layers
import measuring
import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import SAVED
from tests.kernels.conftest import interpreter, usable_triton  # noqa: F401


def run_bench(name, words, file):
    """Run a benchmark in this process; return its exit code, its output and its results."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = bench.main([name, "--device", "cpu", *words, "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    return code, out.getvalue(), report["results"]


def run_kernels_in_this_process(file):
    """Run the benchmark of kernels in a process that has not loaded ``tests/conftest.py``."""
    words = ["--tokens", "5", "--heads", "3", "--head-dims", "64", "--variants", "gate"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KHA_KERNELS", "triton")
        return run_bench("kernels", [*words, "--repetitions", "2"], file)


def test_kernels_are_compared_with_every_other_way(interpreter, tmp_path):  # noqa: F811
    code, out, results = interpreter(run_kernels_in_this_process, tmp_path / "kernels.json")
    assert code == 0
    assert [result["work"] for result in results] == list(bench_kernels.WORKS)
    for result in results:
        assert set(result["kernels_over"]) == {"kernels", "eager", "gemms", "copy"}
        assert result["kernels_over"]["kernels"]["median"] == 1
        assert 0 < result["relative_errors"]["dx"] < 1e-2
    assert results[-1]["bytes"] == 7 * 5 * 3 * 64 * 2
    assert "| kernels |" in out
    assert "compiled skipped: torch.compile takes minutes on a CPU" in out


@pytest.mark.whole
def test_an_interrupted_benchmark_keeps_its_rows_and_resumes(tmp_path):
    file = tmp_path / "kernels.json"
    words = ["kernels", "--device", "cpu", "--tokens", "7", "9000", "--heads", "3"]
    words += ["--head-dims", "64", "--variants", "gate", "--repetitions", "2"]
    words += ["--json", str(file)]
    command = [sys.executable, str(measuring.ROOT / "tools/bench.py"), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("gate, 9000 x") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert "--resume measures what is missing" in process.stderr.read()
    assert process.returncode == 130
    interrupted = json.loads(file.read_text())
    assert not interrupted["complete"]
    assert len(interrupted["results"]) >= 4
    with pytest.raises(ConfigError, match=r"its heads is 3, expected 2. Choose another file"):
        bench.main([*words, "--heads", "2", "--resume"])
    assert bench.main([*words, "--resume"]) == 0
    resumed = json.loads(file.read_text())
    assert resumed["complete"]
    assert resumed["results"][: len(interrupted["results"])] == interrupted["results"]
    cells = []
    for tokens in (7, 9000):
        for work in bench_kernels.WORKS:
            cells.append(f"gate, {tokens} x 3 x 64, bfloat16, {work}")
    assert [result["cell"] for result in resumed["results"]] == cells


TOKENS = 12
SEQUENCE = 6
VALUES = 2 * 64 * 2  # bytes of the values of one token of shape tiny: two heads of 64 in bfloat16


@pytest.mark.whole
def test_layers_are_timed_and_save_what_is_documented(interpreting_rank, tmp_path):
    variants = ["baseline", "mlp", "mlp/kernels", "gate", "linear"]
    words = ["--tokens", str(TOKENS), "--sequence", str(SEQUENCE), "--repetitions", "2"]
    words += ["--variants", *variants]
    code, out, (result,) = interpreting_rank(run_bench, "layer", words, tmp_path / "layer.json")
    assert code == 0
    assert set(result["over_stock"]) == {"stock", *variants}
    assert result["over_stock"]["stock"] == {"median": 1, "low": 1, "high": 1, "count": 2}
    assert result["skipped"] == {}
    assert result["failed"] == {}
    saved = {name: size / TOKENS for name, size in result["saved"].items()}
    for name in ("mlp", "gate"):  # torch saves its inputs, one of which is in the QKV buffer
        assert saved[name] == saved["baseline"] + SAVED[name] * VALUES
    assert saved["mlp/kernels"] == saved["baseline"] + VALUES  # only the knocked values
    assert "| tiny | 12 | bf16 | local | mlp/kernels |" in out


def outputs(names):
    """Return the output and the gradient of the QKV weight of each variant of a layer."""
    layers.start_megatron()
    cell = layers.Cell("tiny", 12, 6, "bf16")
    results = {}
    for name in names:
        layer = layers.Layer(cell, layers.VARIANTS[name])
        with layer.variant.chosen():
            output = layer.forward()
            output.backward(layer.upstream)
        gradients = []
        for parameter_name, parameter in layer.model.module.named_parameters():
            if "linear_qkv.weight" in parameter_name:
                gradients.append(parameter.main_grad.float().clone())
        (gradient,) = gradients
        results[name] = [output.detach().float().clone(), gradient]
    return results


@pytest.mark.whole
def test_contenders_do_the_same_work(interpreting_rank):
    results = interpreting_rank(outputs, ["stock", "baseline", "mlp", "mlp/kernels"])

    def distances(name, reference):
        pairs = zip(results[name], results[reference], strict=True)
        return [((a - b).norm() / b.norm()).item() for a, b in pairs]

    # other attention kernels and the interpreter round differently
    assert max(distances("baseline", "stock")) < 3e-2
    assert max(distances("mlp/kernels", "mlp")) < 3e-2
    assert min(distances("mlp", "stock")) > 3e-2


def test_times_of_layers_are_per_microbatch_and_ratios_per_turn(monkeypatch):
    class Fake:
        backend = "local"
        run = saved_bytes = functools.partial(int, 640)

    seconds = {"stock": [2.0, 4.0, 40.0], "mlp": [3.0, 2.0, 40.0]}
    built = dict.fromkeys(seconds, Fake())
    monkeypatch.setattr(bench_layer, "build", lambda cell, args: (built, {}, {}))
    monkeypatch.setattr(bench_layer, "interleaved", lambda *_, **__: seconds)
    args = bench.arguments("layer", ["--device", "cpu"])
    cell = layers.Cell("moe", 8192, 8192, "bf16")
    result = bench_layer.measure(cell, args, torch.device("cpu"))
    assert result["milliseconds"]["mlp"].median == 750
    assert result["over_stock"]["mlp"].median == 1
    assert result["over_stock"]["mlp"].low == 0.75


@pytest.mark.whole
def test_folded_models_decode_as_the_baseline(tmp_path):
    words = ["--new", "3", "--prompt", "4", "--batches", "2", "--caches", "dynamic"]
    words += ["--repetitions", "2"]
    code, _, (result,) = run_bench("decode", words, tmp_path / "decode.json")
    assert code == 0
    classes = result["classes"]
    assert classes["folded"] == classes["baseline"] != "KHAForCausalLM"
    for name in ("mlp", "linear", "mlp-folded"):
        assert classes[name] == "KHAForCausalLM"
    assert result["over_baseline"].keys() == classes.keys()
    # keys and values of 4 heads in 4 layers, float32; the last token is not run
    assert set(result["cache_bytes"].values()) == {4 * 2 * 4 * 128 * 4 * 2 * (4 + 3 - 1)}


def test_contenders_take_turns_in_changing_order():
    order = []
    contenders = {name: functools.partial(order.append, name) for name in "abc"}
    device = torch.device("cpu")
    times = measuring.interleaved(contenders, device, repetitions=20, warm_up=1)
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(set(turn) == set("abc") for turn in turns)
    assert len(set(turns)) > 3
    assert times.keys() == set("abc")
    assert all(len(values) == 20 for values in times.values())


def test_ratios_are_taken_turn_by_turn():
    spread = measuring.ratios([2.0, 20.0, 200.0], [1.0, 10.0, 50.0])
    assert spread.low == 2
    assert spread.median == 2
    assert spread.high == 3
    assert spread.count == 3
    assert spread.text(1) == "2.0 (2.0-3.0)"
    assert spread.verdict(3) == "met (at most 3)"
    assert spread.verdict(2.5) == "met (at most 2.5), undecided by the spread"
    assert spread.verdict(1) == "MISSED (at most 1)"
