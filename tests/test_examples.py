"""Examples print what they say you should see."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_launch_slurm_prints_what_it_promises(tmp_path):
    script = EXAMPLES / "launch_slurm.sh"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NEMORUN_HOME": str(tmp_path / "nemo"),
        "OUTPUT": str(tmp_path / "out"),
    }
    result = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    promised = script.read_text().split("# What you should see:")[1]
    for line in re.findall(r"#   (.+)", promised):
        assert line in result.stdout


def test_plug_spec_prints_what_it_promises():
    script = EXAMPLES / "plug_spec.py"
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    promised = script.read_text().split("# What you should see:")[1]
    for line in re.findall(r"#   (.+)", promised):
        assert line in result.stdout
