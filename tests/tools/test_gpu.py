"""The benchmarks on a GPU, at sizes that only show that they run."""

import json
import subprocess
import sys

import pytest
import torch
from measuring import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: no CUDA device"),
]
SIZES = ["--shapes", "tiny", "--variants", "mlp", "mlp/kernels", "linear/folded"]


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (["layer", *SIZES, "--tokens", "64", "--repetitions", "2"], "milliseconds"),
        (["decode", "--shape", "small", "--new", "8", "--batches", "2"], "tokens_per_second"),
    ],
)
def test_every_contender_runs(tmp_path, words, figures):
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "tools/bench.py"), *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for result in json.loads(report.read_text())["results"]:
        assert set(result[figures]) >= {"mlp"}
