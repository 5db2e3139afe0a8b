"""Test ``tools/gpu.py``: stages, time limits, results, resuming and refusals."""

import json
import math
import os
import queue
import re
import subprocess
import sys
import tarfile
import time

import bench
import gpu
import gpu_ranks
import gpu_stages
import measuring
import pytest
import torch
from gpu_stages import Command, Setting, Stage

from kha_megatron.heads.kernels.tilings import KERNEL_VARIANTS

LONG_AGO = {"machine": "any"}


def run_main(monkeypatch, *words):
    """Run ``tools/gpu.py`` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(gpu.main())
    return stopped.value.code


@pytest.mark.parametrize("command", gpu_stages.STAGES)
def test_a_dry_run_lists_stages_in_order_with_their_times(monkeypatch, capsys, command):
    assert run_main(monkeypatch, command, "--dry-run") == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    stages = gpu_stages.STAGES[command]
    assert [row[0].strip("| ") for row in rows] == [stage.name for stage in stages]
    assert [float(row[1]) for row in rows] == [stage.seconds for stage in stages]


def test_the_stages_before_the_comparison_fit_into_a_run():
    seconds = sum(stage.seconds for stage in gpu_stages.RUN[:-1])
    assert seconds + gpu_stages.RUN[-1].least < 60 * gpu_stages.MINUTES["run"]


@pytest.mark.whole
def test_the_first_stage_has_each_kernel_and_a_layer(tmp_path):
    setting = Setting(device="cuda", gpus=1, folder=tmp_path)
    (command,) = gpu_stages.CHECK[0].commands(setting)
    done = subprocess.run(
        [*command.words, "--collect-only"],
        cwd=gpu.ROOT,
        env=os.environ | {"PYTHONPATH": f"{gpu.ROOT}:{gpu.ROOT}/tools"},
        capture_output=True,
        text=True,
    )
    for variant in KERNEL_VARIANTS:
        assert f"test_equals_float64_with_every_gradient[{variant}-" in done.stdout
    assert "test_local_layers_with_kernels_equal_those_without[mlp]" in done.stdout


@pytest.mark.parametrize(
    ("available", "words", "why"),
    [
        (False, [], f"torch {torch.__version__} needs CUDA {torch.version.cuda}, and no driver"),
        (False, ["--only", "speed"], "--only speed: choose from"),
        (True, [], "lacks Transformer Engine with its compiled extension"),
        (True, ["--without", "flash-attn"], "needs them with --without flash-attn,te."),
        (False, ["--device", "cpu", "--model", "full"], "--model full does not run"),
        (False, ["--commit", ""], "Pass its commit with --commit."),
    ],
)
def test_missing_gpus_components_and_stages_exit_with_two(
    tmp_path,
    monkeypatch,
    capsys,
    available,
    words,
    why,
):
    if gpu.find_components()["te"]:
        pytest.skip("this environment has Transformer Engine")
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    assert run_main(monkeypatch, "run", "--output", str(tmp_path / "out"), *words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def code_stage(name, *sources, seconds=60, **options):
    """Return a stage that runs Python code; a source with the prefix ``or`` is a fallback."""
    commands = []
    for source in sources:
        is_fallback = source.startswith("or ")
        words = [sys.executable, "-c", source.removeprefix("or ")]
        commands.append(Command(words=words, is_fallback=is_fallback))
    return Stage(
        name=name,
        question="",
        seconds=seconds,
        commands=lambda setting: commands,
        **options,
    )


PUBLISH = """
import json, os
row = {{"stage": os.environ["KHA_GPU_STAGE"], "name": "{}", "status": "{}", "detail": "its detail"}}
with open(os.environ["KHA_GPU_ROWS"], "a") as rows:
    print(json.dumps(row), file=rows)
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Return a runner on the GPU's time limits, with a directory of its own."""
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    folder = tmp_path / "commit-machine"
    folder.mkdir()
    (folder / gpu.MACHINE).write_text(json.dumps(LONG_AGO))
    return gpu.Runner(Setting(device="cuda", gpus=1, folder=folder), seconds=600)


def outcomes(runner):
    """Return the newest status of each stage as a whole."""
    rows = gpu.newest_rows(runner.setting.folder)
    return {row["stage"]: row["status"] for row in rows if row["name"] == gpu.WHOLE}


@pytest.mark.whole
def test_a_failing_and_a_hanging_stage_do_not_stop_the_next(runner):
    source = PUBLISH.format("before the end", "passed") + "import time; time.sleep(1000)"
    stages = [
        code_stage("fails", "raise ValueError('too far')"),
        code_stage("hangs", source, seconds=12),
        code_stage("works", PUBLISH.format("a result", "measured")),
        code_stage("is too long", "pass", seconds=3600),
        code_stage("may continue later", "pass", seconds=3600, least=1),
    ]
    for stage in stages:
        runner.run(stage)
    assert outcomes(runner) == {
        "fails": "failed",
        "hangs": "stopped",
        "works": "passed",
        "is too long": "not reached",
        "may continue later": "passed",
    }
    assert gpu.exit_code(runner.setting.folder, stages) == 1
    assert gpu.exit_code(runner.setting.folder, stages[1:]) == 3
    assert gpu.exit_code(runner.setting.folder, stages[2:3]) == 0
    report = (runner.setting.folder / "report.md").read_text()
    assert "ValueError: too far" in report
    assert "| before the end | passed |  | its detail |" in report


def test_a_complete_stage_is_not_repeated_and_a_failed_one_is(runner):
    count = "open('{0}', 'a').write('x'); assert len(open('{0}').read()) > 1"
    files = [runner.setting.folder / name for name in "ab"]
    files[0].write_text("x")
    stages = [code_stage(file.name, count.format(file)) for file in files]
    for stage in stages:
        runner.run(stage)
    assert outcomes(runner) == {"a": "passed", "b": "failed"}
    for stage in stages:
        runner.run(stage)
    assert outcomes(runner) == {"a": "passed", "b": "passed"}
    assert [file.read_text() for file in files] == ["xx", "xx"]


def test_a_fallback_runs_only_after_a_failure(runner):
    for name, source in (("good", "pass"), ("bad", "raise SystemExit(3)")):
        fallback = "or " + PUBLISH.format(f"instead of {name}", "passed")
        runner.run(code_stage(name, source, fallback))
    assert outcomes(runner) == {"good": "passed", "bad": "passed"}
    names = [row["name"] for row in measuring.read_rows(runner.rows_file)]
    assert "instead of bad" in names
    assert "instead of good" not in names


def test_results_travel_in_one_file_and_continue_from_it(runner, tmp_path):
    folder = runner.setting.folder
    (folder / "compare/runs/checkpoints").mkdir(parents=True)
    (folder / "compare/runs/checkpoints/weights").write_text("large")
    (folder / "compare/runs/result.json").write_text("{}")
    runner.run(code_stage("works", "pass"))
    copy = tmp_path / "copy"
    copy.mkdir()
    packed = copy / gpu.PACKED
    packed.write_bytes((tmp_path / gpu.PACKED).read_bytes())
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert f"{folder.name}/compare/runs/result.json" in names
    assert not any("weights" in name for name in names)
    gpu.unpack(copy)
    rows = measuring.read_rows(copy / folder.name / gpu.ROWS)
    assert gpu.is_complete(code_stage("works", "pass"), rows)
    assert not gpu.is_complete(code_stage("other", "pass"), rows)


def test_results_of_other_commits_changes_and_machines_are_kept_apart(tmp_path, monkeypatch):
    class Done:
        stdout = b"one change"

    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: Done)
    machines = [{"hardware": "NVIDIA H200"}, {"hardware": "NVIDIA H100 80GB"}]
    folders = {gpu.results_folder(tmp_path, "abc", machine) for machine in machines}
    folders.add(gpu.results_folder(tmp_path, "def", machines[0]))
    folders.add(gpu.results_folder(tmp_path, "def-dirty", machines[0]))
    Done.stdout = b"another change"
    folders.add(gpu.results_folder(tmp_path, "def-dirty", machines[0]))
    assert len(folders) == 5
    assert tmp_path / "abc-NVIDIA-H200" in folders


SUITE = """
import pytest
def test_passes(record_property):
    record_property("detail", "loss 8.3 at first")
def test_fails():
    assert False, "too far"
def test_skips():
    pytest.skip("needs a thing")
def test_comes_last():
    pytest.skip("NOT REACHED: no time was left")
"""


def test_each_test_is_a_row_and_what_passed_is_not_repeated(runner, monkeypatch):
    # otherwise, the tests of the runner would take themselves for a part of this test run
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    file = runner.setting.folder / "test_it.py"
    file.write_text(SUITE)
    words = [*gpu_stages.pytest(), str(file), "--rootdir", str(file.parent), "--noconftest"]
    stage = Stage(
        name="tests",
        question="",
        seconds=300,
        commands=lambda setting: [Command(words=words)],
    )
    runner.run(stage)
    first = measuring.read_rows(runner.rows_file)
    found = {row["name"].partition("::")[2]: (row["status"], row["detail"]) for row in first[:4]}
    assert found["test_passes"] == ("passed", "loss 8.3 at first")
    assert found["test_fails"][0] == "failed"
    assert "too far" in found["test_fails"][1]
    assert found["test_skips"] == ("skipped", "needs a thing")
    assert found["test_comes_last"] == ("not reached", "NOT REACHED: no time was left")
    assert outcomes(runner) == {"tests": "failed"}
    file.write_text(SUITE.replace("assert False", "assert True"))
    runner.run(stage)
    second = measuring.read_rows(runner.rows_file)[len(first) :]
    assert not any("test_passes" in row["name"] for row in second)
    assert any("test_fails" in row["name"] and row["status"] == "passed" for row in second)
    assert outcomes(runner) == {"tests": "passed"}
    assert gpu.exit_code(runner.setting.folder, [stage]) == 3  # a test was not reached


class Rank:
    """Stands for the process of a rank."""

    def __init__(self, alive):
        self.is_alive = lambda: alive


@pytest.mark.parametrize(
    ("alive", "message"),
    [
        (True, "a rank did not answer in time: all-gather"),
        (False, "the ranks ended without an answer: all-gather"),
    ],
)
def test_ranks_that_hang_or_end_are_not_waited_for(alive, message):
    results = queue.Queue()
    answers = gpu_ranks.Answers(results, [Rank(alive), Rank(False)])
    for answer in ("all-reduce", 0.0), ("all-gather", 0.5), ("all-reduce", 0.25):
        results.put(answer)
    soon = time.monotonic() + (0.5 if alive else 300)
    assert answers.wait("all-reduce", soon) == [0.0, 0.25]
    with pytest.raises(TimeoutError, match=message):
        answers.wait("all-gather", soon)


def test_wrong_results_of_collectives_fail(tmp_path, monkeypatch):
    file = tmp_path / "rows"
    monkeypatch.setenv(measuring.ROWS_VARIABLE, str(file))
    monkeypatch.setenv(measuring.STAGE_VARIABLE, "ranks")
    assert gpu_ranks.report("gloo", "right", [0.0, 0.0])
    assert not gpu_ranks.report("gloo", "wrong", [0.0, 1e-7])
    assert not gpu_ranks.report("gloo", "not a number", [math.nan, 0.0])
    assert not gpu_ranks.report("gloo", "refused", ["RuntimeError: no", 0.0])
    statuses = [row["status"] for row in measuring.read_rows(file)]
    assert statuses == ["passed", "failed", "failed", "failed"]


def test_the_backend_is_gloo_if_nccl_failed():
    row = {"stage": "ranks", "name": "nccl: all-reduce", "status": "passed"}
    assert gpu_stages.choose_backend([]) == "nccl"
    assert gpu_stages.choose_backend([row]) == "nccl"
    failed = row | {"name": "nccl: ranks", "status": "failed"}
    assert gpu_stages.choose_backend([row, failed]) == "gloo"


def test_several_ranks_on_one_gpu_need_another_nccl(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_stages.NCCL_VARIABLE, "/there/libnccl.so.2")
    single = Setting(device="cuda", gpus=1, folder=tmp_path)
    nccl, gloo = gpu_stages.check_ranks(single)
    assert nccl.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert nccl.environment["LD_PRELOAD"] == "/there/libnccl.so.2"
    assert gloo.is_fallback
    (command,) = gpu_stages.test_parallelism(single)
    assert command.environment == nccl.environment
    assert command.words[-2:] == ["--ranks-per-gpu", "4"]
    (command,) = gpu_stages.test_parallelism(Setting(device="cuda", gpus=4, folder=tmp_path))
    assert command.environment == {}
    assert command.words[-2:] == ["--ranks-per-gpu", "1"]


def test_bundle_excludes_packages_of_the_gpu_machine():
    script = (gpu.ROOT / "tools/gpu_bundle.sh").read_text()
    (left_out,) = re.findall(r"grep -vE '(.*?)' \"\$work/all.txt\"", script)
    pinned = (gpu.ROOT / "constraints.txt").read_text().splitlines()
    left = {line.partition("==")[0] for line in pinned if re.search(left_out, line)}
    others = {name for name in left if not name.startswith(("nvidia-", "cuda-"))}
    assert others == {"torch", "triton", "transformer-engine"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_benchmarks_take_their_options(device, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    setting = Setting(device=device, gpus=1, folder=tmp_path)
    stages = [*gpu_stages.RUN, *gpu_stages.BENCH]
    subjects = set()
    for stage in stages:
        for command in stage.commands(setting):
            tool = str(gpu.ROOT / "tools/bench.py")
            if tool in command.words:
                subject, *words = command.words[command.words.index(tool) + 1 :]
                assert bench.arguments(subject, words).device == device
                subjects.add(subject)
    assert subjects == {"step", "decode", "tune", "layer", "kernels"}


def parse_command_lines():
    """Return by run of a GPU stage why Megatron refuses its command line, empty if it does not."""
    import bench_step
    import layers
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from kha_megatron.recipes import get_recipe
    from kha_megatron.training.arguments import add_kha_arguments, check_args, kha_from_args

    reasons = {}

    def parse_training(training):
        data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4096"]
        words = [*gpu_stages.render(training.flags), *data, "--device", "cuda"]
        run = get_recipe(training.recipe).run_for(words)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["training", *run.as_hybrid().words()])
            args = parse_args(add_kha_arguments)
        check_args(args)
        kha_from_args(args)
        validate_args(args, {})
        core_transformer_config_from_args(args)

    def parse_step(cell, contender):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench_step, "uses_local_modules", lambda: False)
            patch.setattr(bench_step, "module_flags", dict)
            args = layers.parse_megatron(cell.arguments(contender))
        assert args.hybrid_layer_pattern
        core_transformer_config_from_args(args)

    runs = {training.name: (parse_training, training) for training in gpu_stages.TRAININGS}
    for text in bench_step.DEFAULTS["cuda"]["cells"]:
        cell = bench_step.Cell.parse(text, 4096, 2)
        for contender in cell.contenders:
            runs[f"{cell.name}: {contender.name}"] = parse_step, cell, contender
    for name, (parse, *arguments) in runs.items():
        try:
            parse(*arguments)
            reasons[name] = ""
        except (Exception, SystemExit) as error:  # argparse exits
            reasons[name] = f"{type(error).__name__}: {error}"
    return reasons


def test_megatron_accepts_the_command_lines_of_gpu_stages(ranks_with_engine):
    (reasons,) = ranks_with_engine(parse_command_lines, 1)
    assert len(reasons) == 3 + 15
    assert reasons == dict.fromkeys(reasons, "")


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_stage_runs_on_the_cpu(tmp_path):
    command = [sys.executable, str(gpu.ROOT / "tools/gpu.py"), "run", "--output", str(tmp_path)]
    command += ["--device", "cpu", "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert done.returncode == 0, (folder / "report.md").read_text()
    rows = gpu.newest_rows(folder)
    whole = {row["stage"]: row["status"] for row in rows if row["name"] == gpu.WHOLE}
    assert whole == {stage.name: "passed" for stage in gpu_stages.RUN}
    statuses = {}
    for row in rows:
        statuses.setdefault(row["stage"], []).append(row["status"])
    assert "failed" not in [status for found in statuses.values() for status in found]
    assert statuses["ranks"].count("passed") == 1 + 5
    assert statuses["tune"].count("measured") == 14
    assert statuses["compare"].count("measured") == 3
    assert (tmp_path / gpu.PACKED).stat().st_size < 16e6
