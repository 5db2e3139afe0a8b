"""The examples print the output that they document, and their executors exist in NeMo-Run."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.recipes.conftest import nemorun_home  # noqa: F401

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCH = EXAMPLES / "launch_executor.py"


@pytest.mark.parametrize("name", ["launch_slurm.sh", "plug_spec.py"])
def test_example_prints_its_documented_output(name, tmp_path):
    script = EXAMPLES / name
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NEMORUN_HOME": str(tmp_path / "nemo"),
        "OUTPUT": str(tmp_path / "out"),
    }
    command = ["bash" if script.suffix == ".sh" else sys.executable, script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    documented = script.read_text().split("# What you should see:")[1]
    for line in re.findall(r"#   (.+)", documented):
        assert line in result.stdout


@pytest.mark.parametrize("name", ["docker", pytest.param("lepton", marks=pytest.mark.whole)])
def test_dry_run_of_an_executor_starts_the_recipe(name, nemorun_home):  # noqa: F811
    command = [sys.executable, LAUNCH, name, "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "torchrun" in result.stdout
    assert "nemo_run.core.runners.fdl_runner" in result.stdout
    (config,) = nemorun_home.rglob("train_config.yaml")
    config = config.read_text()
    assert "kha_megatron.recipes.nemo.run_rank" in config
    for argument in ("kha_megatron.training", "--mock-data", "/runs/one/checkpoints"):
        assert argument in config


def test_executors_have_the_fields_that_the_example_sets():
    """NeMo-Run creates Kubeflow's and SkyPilot's executors only if their clients are installed."""
    run = pytest.importorskip("nemo_run", reason="needs the launch extra")
    calls = [n for n in ast.walk(ast.parse(LAUNCH.read_text())) if isinstance(n, ast.Call)]
    executors = [call for call in calls if ast.unparse(call.func).endswith("Executor")]
    assert len(executors) == 4
    for call in executors:
        executor = getattr(run, ast.unparse(call.func).removeprefix("run."))
        known = {field.name for field in fields(executor) if field.init}
        assert {keyword.arg for keyword in call.keywords} <= known
