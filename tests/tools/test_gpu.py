"""The benchmarks of models on a GPU, at sizes that say only whether they run."""

import json
import subprocess
import sys

import pytest
import torch

from tests.tools.conftest import TOOLS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: no CUDA device"),
]
SIZES = ["--shapes", "tiny", "--tokens", "64", "--sequence", "64"]
VARIANTS = ["mlp", "mlp/kernels", "linear/folded+kernels"]


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        (["layer", *SIZES, "--repetitions", "2"], "milliseconds"),
        (["memory", *SIZES], "bytes"),
        (["step", "--shapes", "tiny", "--layers", "1", "--repetitions", "1"], "seconds"),
    ],
)
def test_every_variant_runs(tmp_path, words, figures):
    report = tmp_path / "report.json"
    command = [sys.executable, str(TOOLS / "bench.py"), *words, "--json", str(report)]
    done = subprocess.run(
        [*command, "--variants", *VARIANTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for result in json.loads(report.read_text())["results"]:
        assert set(result[figures]) | set(result["skipped"]) == {"stock", *VARIANTS}
        assert {"stock", "mlp"} <= set(result[figures])


def test_models_decode(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(TOOLS / "bench.py"), "decode", "--shape", "small", "--new", "8"]
    command += ["--batches", "2", "--repetitions", "2", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(report.read_text())["results"]
    assert [result["cache"] for result in results] == ["dynamic", "static"]
    assert all(result["targets"]["folded"]["met"] for result in results)
