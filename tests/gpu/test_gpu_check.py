"""Test ``make gpu-check``: its dry run and its report of failures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import bench
import gpu_check
import pytest

from kha_megatron.heads.knock import MATRICES

TOOLS = Path(gpu_check.__file__).parent


@pytest.mark.whole
def test_a_dry_run_goes_through_all_stages(tmp_path):
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--dry-run", "--minutes", "15"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(dict.fromkeys(r["stage"] for r in report["results"])) == list(gpu_check.UNTIL)
    assert {r["status"] for r in report["results"]} <= {"passed", "skipped"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| eager |" in text  # a benchmark's own table
    collected = (tmp_path / "out" / "first.log").read_text()
    for variant in MATRICES:
        assert f"test_equals_float64_with_every_gradient[{variant}-" in collected
    assert "test_local_layers_with_kernels_equal_those_without[mlp]" in collected


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "Use --dry-run"),
        (["--only", "speed"], "--only speed: choose from"),
        (["--output", "."], "is not empty"),
    ],
)
def test_a_missing_gpu_and_invalid_options_exit_with_two(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(gpu_check.main())
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
"""


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_failures_details_and_skips_are_reported(tmp_path, monkeypatch, hangs):
    file = tmp_path / "test_it.py"
    file.write_text(SUITE + "\ndef test_hangs():\n    time.sleep(3000)\n" * hangs)
    monkeypatch.setitem(gpu_check.TESTS, "losses", [str(file)])
    check = gpu_check.Check(folder=tmp_path, dry=False, seconds=100)
    # a process is stopped 30 s after its limit
    monkeypatch.setattr(check, "left", lambda stage: -10.0 if hangs else 100)
    gpu_check.tests(check, "losses")
    found = {(r.name, r.status): r.detail for r in check.results}
    assert found["test_passes", "passed"] == "loss 8.3 at first"
    assert "too far" in found["test_fails", "failed"]
    if hangs:
        assert found["pytest", "stopped"].startswith("not finished; ")
    else:
        assert "1 passed, 1 failed, 1 skipped" in found["pytest", "failed"]
        assert found["1 of its tests", "skipped"] == "needs a thing"


def test_bundle_excludes_packages_of_the_gpu_machine():
    script = (TOOLS / "gpu_bundle.sh").read_text()
    (left_out,) = re.findall(r"grep -vE '(.*?)' \"\$work/all.txt\"", script)
    pinned = (TOOLS.parent / "constraints.txt").read_text().splitlines()
    left = {line.partition("==")[0] for line in pinned if re.search(left_out, line)}
    others = {name for name in left if not name.startswith(("nvidia-", "cuda-"))}
    assert others == {"torch", "triton", "transformer-engine"}


@pytest.mark.parametrize("name", gpu_check.BENCHMARKS)
def test_benchmarks_take_their_options(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    given = bench.arguments(name, ["--device", "cuda", *gpu_check.BENCHMARKS[name][0]])
    assert given.device == "cuda"
