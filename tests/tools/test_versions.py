"""``make test-versions``: what it prints about newer releases, and without a package index."""

import json
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


def test_only_releases_beyond_the_bounds_are_listed():
    packages = [
        {"name": "torch", "version": "2.15.0", "latest_version": "99.1"},
        {"name": "transformers", "version": "5.8.0", "latest_version": "5.8.1"},
        {"name": "anyio", "version": "4.9.0", "latest_version": "99.2"},  # a dependency of others
    ]
    command = [sys.executable, ROOT / "tools" / "newer_releases.py"]
    text = json.dumps(packages)
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("newer release: torch 99.1 (tested: 2.15.0, allowed: torch<")
