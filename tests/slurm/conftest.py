"""Fixtures for jobs on a real Slurm."""

import subprocess
from pathlib import Path

import pytest

import kha_megatron
from tests.slurm.cluster import KHA


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    source = Path(kha_megatron.__file__).parent
    words = ["data", "prepare", "--from", source, "--glob", "*.py", "--out", folder]
    subprocess.run([KHA, *words], check=True, capture_output=True)
    return folder
