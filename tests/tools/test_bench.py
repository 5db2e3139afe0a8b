"""``tools/bench.py`` on the CPU at tiny sizes."""

import contextlib
import functools
import io
import json
import math
import signal
import subprocess
import sys

import bench
import bench_decode
import bench_kernels
import bench_layer
import bench_step
import bench_tune
import layers
import measuring
import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import SAVED
from kha_megatron.plan.counts import count_model
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
    weight_bytes = result["weight_bytes"]
    assert weight_bytes["folded"] == weight_bytes["baseline"]
    # 4 layers with 3 matrices, or with twice the rows of v_proj
    assert weight_bytes["mlp"] - weight_bytes["baseline"] == 4 * 3 * 128 * 128 * 4
    assert weight_bytes["mlp-folded"] - weight_bytes["baseline"] == 4 * 512 * 512 * 4


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


def test_overlapping_kernels_are_counted_once():
    intervals = [(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (3.0, 4.5), (7.0, 7.5)]
    assert measuring.covered_time(intervals) == 4.5 + 2.5
    assert sum(end - start for start, end in intervals) == 9
    assert measuring.covered_time([]) == 0
    assert measuring.covered_time([(3.0, 3.0)]) == 0


def test_rows_are_published_only_for_the_runner(tmp_path, monkeypatch):
    measuring.publish("nowhere", "passed")
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv(measuring.ROWS_VARIABLE, str(file))
    monkeypatch.setenv(measuring.STAGE_VARIABLE, "step")
    measuring.publish("a cell", "measured", "3 ms", spread=measuring.Spread.of([3.0]))
    with file.open("a") as unfinished:
        unfinished.write('{"stage": "st')
    assert measuring.read_rows(file) == [
        {
            "stage": "step",
            "name": "a cell",
            "status": "measured",
            "detail": "3 ms",
            "spread": {"median": 3.0, "low": 3.0, "high": 3.0, "count": 1},
        }
    ]


STEP_CONTENDERS = ["stock", "baseline", "kha_mlp", "kha_mlp+watch", "kha_linear+fused-loss"]


def measure_steps(file):
    """Run the benchmark of steps in a rank on the CPU."""
    words = ["--cells", f"tiny/bf16/2={','.join(STEP_CONTENDERS)}", "--length", "24"]
    return run_bench("step", [*words, "--repetitions", "2"], file)


@pytest.mark.whole
def test_steps_train_the_same_model_with_and_without_kha(ranks, tmp_path):
    ((code, out, (result,)),) = ranks(measure_steps, 1, tmp_path / "step.json")
    assert code == 0
    assert result["failed"] == result["skipped"] == {}
    contenders = result["contenders"]
    assert list(contenders) == STEP_CONTENDERS
    cell = bench_step.Cell.parse(result["cell"], 24, 2)
    for contender in cell.contenders:
        run = cell.run(contender)
        counted = count_model(run.model).total
        parameters = contenders[contender.name]["parameters"]
        heads = contenders["kha_mlp"]["parameters"] - contenders["baseline"]["parameters"]
        if contender.preset in (None, "baseline"):
            # the recipe has KHA-MLP
            assert parameters == counted - heads
        assert contenders[contender.name]["busy_milliseconds"] is None
        assert contenders[contender.name]["peak_gigabytes"] is None
    assert contenders["kha_mlp"]["parameters"] == counted
    losses = {name: figures["first_loss"] for name, figures in contenders.items()}
    assert losses["baseline"] == pytest.approx(math.log(512), rel=0.1)
    assert losses["baseline"] == losses["kha_mlp"] == losses["kha_mlp+watch"]
    # other attention and loss kernels round differently in bfloat16
    assert losses["stock"] == pytest.approx(losses["baseline"], abs=1e-2)
    assert losses["kha_linear+fused-loss"] == pytest.approx(losses["baseline"], abs=1e-2)
    tokens = 2 * 24 * 2
    milliseconds = contenders["kha_mlp"]["milliseconds"]["median"]
    speed = contenders["kha_mlp"]["tokens_per_second"]
    assert speed == pytest.approx(1e3 * tokens / milliseconds)
    assert "| tiny | bf16 | 2 | kha_mlp+watch |" in out


def spoiled_step(file):
    """Run the benchmark with a NaN in the loss."""
    draw = bench_step.Training._draw_batch

    def draw_and_spoil(self, vocabulary):
        draw(self, vocabulary)
        with torch.no_grad():
            next(self.chunks[0].parameters()).fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_step.Training, "_draw_batch", draw_and_spoil)
        words = ["--cells", "tiny/bf16/1=stock+watch,kha_mlp+watch", "--length", "24"]
        return run_bench("step", [*words, "--repetitions", "2"], file)


@pytest.mark.whole
def test_the_watch_of_a_step_is_on(ranks, tmp_path):
    ((_, _, (result,)),) = ranks(spoiled_step, 1, tmp_path / "step.json")
    assert result["skipped"].keys() == {"stock+watch", "kha_mlp+watch"}
    assert all("NaN in" in reason for reason in result["skipped"].values())


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("moe-0.8b/bf16=stock", "Expected a cell like"),
        ("large/bf16/1=stock", "Models: dense-0.6b"),
        ("tiny/fp4/1=stock", "Precisions: bf16"),
        ("tiny/bf16/1=stock+fast", "Unknown option 'fast' in 'stock\\+fast'"),
    ],
)
def test_cells_of_steps_are_checked(cell, message):
    with pytest.raises(ConfigError, match=message):
        bench_step.Cell.parse(cell, 32, 2)


def tune_kernels(folder):
    """Run the benchmark of tilings in a process with Triton's interpreter; return the launches."""
    from kha_megatron.heads.kernels import knock_launch

    launched = []
    find = knock_launch.tiling

    def find_and_record(*arguments):
        tile = find(*arguments)
        launched.append((arguments[0], tile))
        return tile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knock_launch, "tiling", find_and_record)
        words = ["--tokens", "9", "--kernels", "backward_weight"]
        words += ["--choose", str(folder / "tilings.json")]
        return *run_bench("tune", words, folder / "tune.json"), launched


@pytest.mark.whole
def test_tilings_are_launched_and_the_fastest_is_chosen(interpreter, tmp_path):  # noqa: F811
    code, _, (result,), launched = interpreter(tune_kernels, tmp_path)
    assert code == 0
    candidates = bench_tune.CANDIDATES["backward_weight"]
    assert {tile for _, tile in launched} == set(candidates)
    assert all(0 < figures["error"] < 1e-2 for figures in result["tilings"])
    fastest = min(result["tilings"], key=lambda figures: figures["over_copy"])
    (chosen,) = json.loads((tmp_path / "tilings.json").read_text())
    assert chosen == {"kernel": "backward_weight", "tiling": fastest["tiling"]}


def test_a_tiling_that_was_wrong_once_is_not_chosen(tmp_path):
    first, second, *_ = [bench_tune.asdict(t) for t in bench_tune.CANDIDATES["forward"]]
    results = [
        {"kernel": "forward", "tilings": [{"tiling": first, "over_copy": 1.0}]},
        {"kernel": "forward", "tilings": []},
    ]
    for result in results:
        result["tilings"].append({"tiling": second, "over_copy": 2.0})
    bench_tune.choose(tmp_path / "chosen", results)
    assert json.loads((tmp_path / "chosen").read_text()) == [
        {"kernel": "forward", "tiling": second}
    ]


@pytest.mark.whole
def test_compiled_steps_give_the_tokens_of_generate(tmp_path):
    words = ["--device", "cpu", "--models", "mlp", "--new", "6"]
    args = bench.arguments("decode", words)
    models = bench_decode.make_models(args, tmp_path)
    prompt = torch.randint(4096, (3, 5))
    for model in models.values():
        decoder = bench_decode.StepDecoder(model, prompt, new=6)
        expected = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        for _ in range(2):  # the second overwrites the first in the cache
            assert torch.equal(decoder.decode(), expected[:, 5:])


def test_each_row_of_a_result_has_a_name_of_its_own(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv(measuring.ROWS_VARIABLE, str(file))
    monkeypatch.setenv(measuring.STAGE_VARIABLE, "layer")
    result = {
        "cell": "moe, 64 tokens",
        "rows": [["stock", "1.0", ""], ["mlp", "1.2", "MISSED (at most 1.01)"]],
        "skipped": {"mlp/kernels": "no GPU"},
        "failed": {"gate": "ValueError"},
    }
    bench.publish_result(["variant", "over stock", "target"], result)
    rows = measuring.read_rows(file)
    assert len({row["name"] for row in rows}) == 4
    assert [row["status"] for row in rows] == ["measured", "missed", "skipped", "failed"]
    assert rows[0]["detail"] == "variant stock, over stock 1.0"
    assert rows[3]["name"] == "moe, 64 tokens, gate"
