"""The diffs of ``patches/`` on a copy of the installed Megatron."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

PATCHES = sorted(Path(__file__).parents[2].glob("patches/megatron-core-*/*.patch"))


def run_patch(tree, *options):
    """Run ``patch -p1`` in ``tree``, without fuzz."""
    words = ["patch", "-p1", "--fuzz=0", "--silent", "--no-backup-if-mismatch", "-d", tree]
    subprocess.run([*words, *options], check=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_patch_applies_and_reverses_byte_for_byte(patch, tmp_path):
    megatron = Path(find_spec("megatron").submodule_search_locations[0])
    lines = patch.read_text().splitlines()
    files = [Path(line.split()[1]).relative_to("b") for line in lines if line.startswith("+++ ")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(megatron.parent / file, tmp_path / file)
    run_patch(tmp_path, "-i", patch)
    for file in files:
        assert (tmp_path / file).read_bytes() != (megatron.parent / file).read_bytes()
        compile((tmp_path / file).read_bytes(), file, "exec")
    run_patch(tmp_path, "--reverse", "-i", patch)
    for file in files:
        assert (tmp_path / file).read_bytes() == (megatron.parent / file).read_bytes()
