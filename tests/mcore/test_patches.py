"""The diffs of ``patches/`` on a copy of the installed Megatron."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

MEGATRON = Path(find_spec("megatron").submodule_search_locations[0])
RAISES_ITSELF = "raise ImportError" in (MEGATRON / "core/transformer/spec_utils.py").read_text()
"""True from Megatron-Core 0.20 on, which contains the change of ``spec-import-error``."""
PATCHES = [
    patch
    for patch in sorted(Path(__file__).parents[2].glob("patches/megatron-core-*/*.patch"))
    if not (RAISES_ITSELF and patch.stem == "spec-import-error")
]


def run_patch(tree, *options):
    """Run ``patch -p1`` in ``tree``, without fuzz."""
    words = ["patch", "-p1", "--fuzz=0", "--silent", "--no-backup-if-mismatch", "-d", tree]
    subprocess.run([*words, *options], check=True)


@pytest.mark.fast
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_patch_applies_and_reverses_byte_for_byte(patch, tmp_path):
    lines = patch.read_text().splitlines()
    files = [Path(line.split()[1]).relative_to("b") for line in lines if line.startswith("+++ ")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(MEGATRON.parent / file, tmp_path / file)
    run_patch(tmp_path, "-i", patch)
    for file in files:
        assert (tmp_path / file).read_bytes() != (MEGATRON.parent / file).read_bytes()
        compile((tmp_path / file).read_bytes(), file, "exec")
    run_patch(tmp_path, "--reverse", "-i", patch)
    for file in files:
        assert (tmp_path / file).read_bytes() == (MEGATRON.parent / file).read_bytes()


def import_missing_module():
    from megatron.core.transformer.spec_utils import import_module

    try:
        return import_module(("no_such_module", "kha_mlp"))
    except ImportError as error:
        return str(error)


def test_the_patch_of_missing_modules_is_left_out_only_if_megatron_raises(ranks):
    """Without the patch, 0.19 returns None, and its builder trains plain attention."""
    (message,) = ranks(import_missing_module, 1)
    assert "no_such_module" in message if RAISES_ITSELF else message is None
