"""The examples print what they promise, and their executors exist in NeMo-Run."""

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


@pytest.mark.parametrize("name", ["launch_slurm.sh", "plug_spec.py"])
def test_example_prints_what_it_promises(name, tmp_path):
    script = EXAMPLES / name
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NEMORUN_HOME": str(tmp_path / "nemo"),
        "OUTPUT": str(tmp_path / "out"),
    }
    command = ["bash" if script.suffix == ".sh" else sys.executable, script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    promised = script.read_text().split("# What you should see:")[1]
    for line in re.findall(r"#   (.+)", promised):
        assert line in result.stdout


@pytest.mark.parametrize("name", ["docker", "lepton"])
def test_dry_run_of_an_executor_starts_the_recipe(name, nemorun_home, capfd):  # noqa: F811
    script = EXAMPLES / f"launch_{name}.py"
    command = [sys.executable, script, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torchrun" in done.stdout
    assert "nemo_run.core.runners.fdl_runner" in done.stdout
    (config,) = nemorun_home.rglob("train_config.yaml")
    words = config.read_text()
    assert "kha_megatron.recipes.nemo.run_rank" in words
    for word in ("kha_megatron.training", "--mock-data", "/runs/one/checkpoints"):
        assert word in words


@pytest.mark.parametrize("name", ["docker", "kubeflow", "skypilot", "lepton"])
def test_executor_has_the_fields_that_the_example_sets(name):
    """NeMo-Run constructs Kubeflow's and SkyPilot's executors only with their clients installed."""
    run = pytest.importorskip("nemo_run", reason="needs the launch extra")
    tree = ast.parse((EXAMPLES / f"launch_{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = {ast.unparse(call.func).removeprefix("run."): call for call in calls}
    ((executor, call),) = [item for item in made.items() if item[0].endswith("Executor")]
    known = {item.name for item in fields(getattr(run, executor)) if item.init}
    assert {keyword.arg for keyword in call.keywords} <= known
