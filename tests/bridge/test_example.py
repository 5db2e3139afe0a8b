"""The example prints the output that it documents."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "bridge_round_trip.py"


def test_bridge_round_trip_prints_its_documented_output(bridge_ranks):
    result = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    documented = re.findall(r"#   (.+)", SCRIPT.read_text().split("# What you should see:")[1])
    assert len(documented) == 3
    for line in documented:
        assert line in result.stdout
