"""``make test-versions``: what it prints about newer releases, and without a package index."""

import os
import subprocess
import sys
from pathlib import Path

import kha_megatron

ROOT = Path(kha_megatron.__file__).parents[1]


def test_an_index_out_of_reach_is_an_error(tmp_path):
    closed = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    environment = os.environ | closed | {"UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path)}
    environment["VENV"] = sys.prefix
    command = [ROOT / "tools" / "test_versions.sh", "newest"]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: the package index is out of reach" in done.stderr


def newer_releases(*words, stdin=""):
    command = [sys.executable, ROOT / "tools" / "newer_releases.py", *words]
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_only_releases_beyond_the_bounds_are_listed():
    releases = [
        "torch==99.1",
        "vllm==99.3",  # of an extra that is not installed
        "transformers==5.8.1",
        "transformer-engine==2.20.9",  # the extra for developers has a pin
        "anyio==99.2",  # a dependency of others
    ]
    first, second = newer_releases(stdin="\n".join(releases))
    assert first.startswith("newer release: torch 99.1 (allowed: torch<")
    assert second.startswith("newer release: vllm 99.3 (allowed: vllm<")


def test_newer_releases_of_all_dependencies_are_looked_up():
    names = newer_releases("--names")
    assert {"torch", "megatron-core", "vllm", "transformer-engine"} <= set(names)
    assert len(names) == len(set(names))
    assert "kha-megatron" not in names
