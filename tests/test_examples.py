"""The examples print the output that they document, and their executors exist in NeMo-Run."""

import os
import re
import subprocess
import sys
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
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    documented = script.read_text().split("# What you should see:")[1]
    for line in re.findall(r"#   (.+)", documented):
        assert line in result.stdout


@pytest.mark.parametrize(
    "name",
    ["docker", "slurm", pytest.param("lepton", marks=pytest.mark.whole)],
)
def test_dry_run_of_an_executor_starts_the_recipe(name, nemorun_home):  # noqa: F811
    command = [sys.executable, LAUNCH, name, "--dry-run"]
    wide = os.environ | {"COLUMNS": "2000"}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=wide,
    )
    assert result.returncode == 0, result.stderr
    assert "torchrun" in result.stdout
    assert "nemo_run.core.runners.fdl_runner" in result.stdout
    if name == "docker":
        for setting in ("shm_size", "ipc_mode", "ulimits"):
            assert setting in result.stdout
    if name == "slurm":
        assert "--rdzv-endpoint $head_node_ip:$((10000 + SLURM_JOB_ID % 20000))" in result.stdout
        assert "export PET_RDZV_CONF=is_host=1,read_timeout=600" in result.stdout
        assert "node_address=$(scontrol show node" in result.stdout
        assert re.search(r"retries=2 *\n", result.stdout)
    (config,) = nemorun_home.rglob("train_config.yaml")
    config = config.read_text()
    assert "kha_megatron.recipes.nemo.run_rank" in config
    for argument in ("kha_megatron.training", "--mock-data", "/runs/one/checkpoints"):
        assert argument in config
    assert ("--exit-duration-in-mins" in config) == (name == "slurm")
