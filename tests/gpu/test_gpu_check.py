"""``make gpu-check``: its dry run, how it judges, and what it does when something goes wrong."""

import importlib
import inspect
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import gpu_benchmarks
import gpu_cases
import gpu_check
import gpu_losses
import gpu_processes
import gpu_report
import gpu_run
import pytest

from kha_megatron import compare, recipes

TOOLS = Path(gpu_cases.__file__).parent
CASES = {case.name: case for case in gpu_cases.CASES}


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """One dry run: its exit code, its report, and the folder."""
    folder = tmp_path_factory.mktemp("dry") / "out"
    copy = folder.parent / "copy.json"
    # 40 s where nothing else runs; the limit is for a machine on which much does
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--dry-run", "--minutes", "15"]
    done = subprocess.run(
        [*command, "--output", str(folder), "--json", str(copy)], capture_output=True, text=True
    )
    assert (folder / "report.json").is_file(), done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert json.loads(copy.read_text()) == report
    return done, report, folder


@pytest.mark.timeout(1200)
def test_dry_run_is_sound(dry):
    done, report, _ = dry
    wrong = [r for r in report["results"] if r["status"] in gpu_report.WRONG]
    assert not wrong, done.stderr
    assert done.returncode == 0
    assert report["sound"]
    assert report["dry"]


def test_dry_run_goes_through_every_stage(dry):
    _, report, _ = dry
    stages = {result["stage"] for result in report["results"]}
    assert stages == set(gpu_run.UNTIL)
    trained = [r for r in report["results"] if r["stage"] == "losses" and r["figures"]]
    assert [r["name"] for r in trained] == ["dense-local"]
    assert len(trained[0]["figures"]["losses"]) == gpu_cases.TINY["--train-iters"]


def test_dry_run_names_every_case_and_why_it_was_left_out(dry):
    _, report, folder = dry
    results = {r["name"]: r for r in report["results"] if r["stage"] == "losses"}
    assert set(CASES) <= set(results)
    assert all(r["detail"] for r in results.values())
    text = (folder / "report.md").read_text()
    assert all(f"| {name} |" in text for name in CASES)


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "out")])
    monkeypatch.setattr(gpu_check.gpu_machine, "examine", lambda: ({"torch": "2.11"}, {}))
    assert gpu_check.main() == 2
    assert "use --dry-run" in capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert {result["stage"] for result in results} == {"machine"}


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--only", "speed"], "--only speed: choose from"), (["--output", "."], "is not empty")],
)
def test_refuses_what_it_cannot_do(monkeypatch, capsys, words, why):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert why in capsys.readouterr().err


def curve(end, first=8.3):
    return [first + (end - first) * min(1.0, i / 100) for i in range(gpu_cases.STEPS)]


def test_judges_a_curve_by_its_bounds():
    case = CASES["dense-fp8-tensorwise"]
    near, far = case.bound.end * 0.9, case.bound.end * 1.1
    good = curve(4.0)
    assert gpu_cases.faults(case, good, good, gpu_cases.STEPS) == []
    assert gpu_cases.faults(case, curve(4.0 + near), good, gpu_cases.STEPS) == []
    (fault,) = gpu_cases.faults(case, curve(4.0 + far), good, gpu_cases.STEPS)
    assert fault.startswith("the last loss")
    (fault,) = gpu_cases.faults(case, curve(4.0, first=8.5), good, gpu_cases.STEPS)
    assert fault.startswith("the first loss")


def test_judges_a_run_by_itself():
    case, steps = CASES["dense-bf16"], gpu_cases.STEPS
    assert gpu_cases.faults(case, curve(8.2), None, steps)[0].startswith("it did not learn")
    assert gpu_cases.faults(case, curve(4.0)[:-1], None, steps) == [
        f"{steps - 1} losses of {steps}"
    ]
    broken = curve(4.0)
    broken[7] = math.nan
    assert gpu_cases.faults(case, broken, None, steps) == ["the loss is not finite at step 8"]


def test_cases_follow_one_that_comes_before_them_and_trains_on_the_same_machine():
    names = [case.name for case in gpu_cases.CASES]
    assert len(set(names)) == len(names)
    for case in filter(lambda case: case.like, gpu_cases.CASES):
        assert names.index(case.like) < names.index(case.name) or case.name.endswith("-local")
        assert CASES[case.like].moe == case.moe
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        assert any(case.flags.get("--fp8-recipe") == recipe for case in gpu_cases.CASES)


def test_missing_parts_are_named():
    case = CASES["dense-flash-attention"]
    assert gpu_cases.missing(case, {"te": True, "flash-attn": True}) is None
    assert "flash-attn" in gpu_cases.missing(case, {"te": True})
    assert "Transformer Engine" in gpu_cases.missing(case, {})


def task(tmp_path, name, code, limit=20.0):
    command = [sys.executable, "-c", code]
    log = tmp_path / f"{name}.log"
    return gpu_processes.Task(name=name, command=command, log=log, limit=limit, environment={})


def test_processes_are_ended_at_their_limit_and_at_the_deadline(tmp_path):
    tasks = [
        task(tmp_path, "quick", "print('last words')"),
        task(tmp_path, "hangs", "import time; time.sleep(60)", limit=1.0),
        task(tmp_path, "late", "import time; time.sleep(60)"),
        task(tmp_path, "never", "raise SystemExit(3)"),
    ]
    ended = {}
    start = time.monotonic()
    waiting = gpu_processes.run_all(
        tasks,
        at_once=1,
        deadline=start + 4,
        least=1.0,
        on_end=lambda process: ended.setdefault(process.task.name, process),
    )
    assert time.monotonic() - start < 15
    assert [t.name for t in waiting] == ["never"]
    assert list(ended) == ["quick", "hangs", "late"]
    assert (ended["quick"].code, ended["quick"].tail()) == (0, "last words")
    assert not ended["quick"].timed_out
    assert ended["hangs"].timed_out
    assert ended["late"].timed_out


def test_several_processes_at_once(tmp_path):
    tasks = [task(tmp_path, str(i), "import time; time.sleep(1.5)") for i in range(3)]
    running, most = [0], [0]

    def started(_):
        running[0] += 1
        most[0] = max(most[0], running[0])

    def ended(_):
        running[0] -= 1

    gpu_processes.run_all(
        tasks, at_once=2, deadline=time.monotonic() + 30, on_start=started, on_end=ended
    )
    assert most == [2]


def test_missed_targets_are_reported():
    ratio = {"median": 1.7, "low": 1.6, "high": 1.8, "count": 20}
    slow = {"work": "forward", "case": "mlp 8192", "kernels_over": {"copy": ratio}}
    quick = slow | {"kernels_over": {"copy": ratio | {"median": 1.5}}}
    (missed,) = gpu_benchmarks.missed_targets({"results": [slow, quick]}, "")
    assert "1.70 MISSED" in missed
    table = "| moe | 8192 | kha_mlp | 1.02 | MISSED (at most 1.01) |\n| moe | baseline | met |"
    (missed,) = gpu_benchmarks.missed_targets({"results": []}, table)
    assert missed.startswith("moe | 8192")


@pytest.mark.parametrize("benchmark", gpu_benchmarks.BENCHMARKS, ids=lambda b: b.tool)
def test_benchmarks_take_the_words_that_they_are_given(benchmark, monkeypatch):
    if not (TOOLS / benchmark.tool).is_file():
        pytest.skip(f"tools/{benchmark.tool} is not in this tree")
    tool = importlib.import_module(benchmark.tool.removesuffix(".py"))
    words = ["--device", "cuda", *benchmark.words, "--json", "x.json"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", [benchmark.tool, *words])
    given = tool.arguments(*(None for _ in inspect.signature(tool.arguments).parameters))
    assert (given.device, given.json) == ("cuda", Path("x.json"))


def test_only_faults_make_a_report_unsound():
    def report(*statuses):
        results = [gpu_report.Result(stage="s", name="n", status=s) for s in statuses]
        words = {"command": "c", "date": "d", "dry": False, "machine": {}, "seconds": 1.0}
        return gpu_report.Report(results=results, **words)

    assert report("passed", "missed", "skipped", "missing", "not reached").is_sound
    assert not report("passed", "failed").is_sound
    assert not report("stopped").is_sound


@pytest.mark.parametrize("engine", [False, True], ids=["local", "te"])
def test_the_real_training_can_be_planned(engine, tmp_path):
    command = gpu_losses.comparison(Path("data"), tmp_path / "out", engine=engine)
    given = dict(itertools.pairwise(command[: command.index("--")]))
    assert given["--recipe"] == "quickstart"
    planned = compare.plan(
        recipes.get_recipe(given["--recipe"]),
        compare.parse_variants(given["--variants"]),
        int(given["--seeds"]),
        output=tmp_path / "out",
        overrides=[*command[command.index("--") + 1 :], "--mock-data"],
        ranks=int(given["--nproc"]),
        device=given["--device"],
    )
    assert [run.variant.name for run in planned.runs] == ["baseline", "kha_mlp", "kha_linear"]
    arguments = planned.runs[0].arguments
    assert "--sequence-parallel" not in arguments
    assert arguments["--bf16"] == ()
    assert ("--moe-grouped-gemm" in arguments) == engine
