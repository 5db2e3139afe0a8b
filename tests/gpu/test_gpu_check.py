"""Test ``make gpu-check`` and ``make gpu-bench``: stages, refusals and reports."""

import re
import subprocess
import sys
from pathlib import Path

import bench
import gpu
import pytest
import torch

from kha_megatron.heads.kernels.tilings import KERNEL_VARIANTS


def run(monkeypatch, *words):
    """Run ``tools/gpu.py`` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(gpu.main())
    return stopped.value.code


@pytest.mark.parametrize(
    ("command", "stages", "end"),
    [("check", gpu.CHECKS, "10"), ("check", gpu.CHECKS, "5"), ("bench", gpu.BENCHMARKS, "25")],
)
def test_a_dry_run_lists_stages_in_order_with_their_times(
    monkeypatch,
    capsys,
    command,
    stages,
    end,
):
    assert run(monkeypatch, command, "--dry-run", *["--minutes", "5"] * (end == "5")) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == list(stages)
    times = [float(row[1]) for row in rows]
    assert times == sorted(times)
    assert rows[-1][1] == end


@pytest.mark.whole
def test_the_first_stage_has_each_kernel_and_a_layer():
    command = [*gpu.PYTEST, *gpu.CHECKS["first"].words, "--collect-only"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    for variant in KERNEL_VARIANTS:
        assert f"test_equals_float64_with_every_gradient[{variant}-" in done.stdout
    assert "test_local_layers_with_kernels_equal_those_without[mlp]" in done.stdout


MISSING = ["--without", "te,flash-attn"]


@pytest.mark.parametrize(
    ("available", "words", "why"),
    [
        (False, [], f"torch {torch.__version__} needs CUDA {torch.version.cuda}, and no driver"),
        (False, ["--only", "speed"], "--only speed: choose from"),
        (True, [], "lacks Transformer Engine with its compiled extension"),
        (True, MISSING, "needs them with --without te,flash-attn,apex."),
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
    assert run(monkeypatch, "check", "--output", str(tmp_path / "out"), *words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


SUITE = """
import time
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


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_failures_details_and_skips_are_reported(tmp_path, monkeypatch, hangs):
    file = tmp_path / "test_it.py"
    file.write_text(SUITE + "\ndef test_hangs():\n    time.sleep(3000)\n" * hangs)
    session = gpu.Session(tmp_path)
    # a process is stopped 30 s after its limit
    monkeypatch.setattr(session, "left", lambda stage: -10.0 if hangs else 100)
    gpu.run_tests(session, "losses", [str(file)])
    found = {(r.name, r.status): r.detail for r in session.results}
    assert found["test_passes", "passed"] == "loss 8.3 at first"
    assert "too far" in found["test_fails", "failed"]
    report = Path(session.report().rpartition(": ")[2]).read_text()
    assert "| test_fails | failed |" in report
    assert session.exit_code == 1
    if hangs:
        assert found["pytest", "stopped"].startswith("not finished; ")
    else:
        assert ": 1 passed, 1 failed, 1 skipped, 1 not reached in " in report
        assert found["1 of its tests", "skipped"] == "needs a thing"
        assert found["1 of its tests", "not reached"] == "NOT REACHED: no time was left"


def test_running_out_of_time_exits_with_three(tmp_path):
    session = gpu.Session(tmp_path, scale=0)
    gpu.run_benchmark(session, "decode")
    assert [result.status for result in session.results] == ["not reached"]
    assert session.exit_code == 3


def test_bundle_excludes_packages_of_the_gpu_machine():
    script = (gpu.ROOT / "tools/gpu_bundle.sh").read_text()
    (left_out,) = re.findall(r"grep -vE '(.*?)' \"\$work/all.txt\"", script)
    pinned = (gpu.ROOT / "constraints.txt").read_text().splitlines()
    left = {line.partition("==")[0] for line in pinned if re.search(left_out, line)}
    others = {name for name in left if not name.startswith(("nvidia-", "cuda-"))}
    assert others == {"torch", "triton", "transformer-engine"}


@pytest.mark.parametrize("name", gpu.BENCHMARKS)
def test_benchmarks_take_their_options(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    subject, *words = gpu.BENCHMARKS[name].words
    assert bench.arguments(subject, ["--device", "cuda", *words]).device == "cuda"
