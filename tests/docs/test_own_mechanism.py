"""Run the code of `docs/own_mechanism.md`: from a formula to an exported model."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = "docs/own_mechanism.md"


@pytest.mark.whole
@pytest.mark.slow
def test_the_page_trains_compares_and_exports_a_mechanism(tmp_path):
    file, check, load = (text for _, text in blocks(PAGE, "python"))
    (commands,) = (text for _, text in blocks(PAGE, "bash"))
    (tmp_path / "my_heads.py").write_text(file)
    (tmp_path / "test_my_heads.py").write_text(check)
    (tmp_path / "load.py").write_text(load + "print(model.model.layers[0].self_attn.blend_scale)")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    program = "pytest -q test_my_heads.py\n" + commands + "python load.py\n"
    done = subprocess.run(
        ["bash", "-e"],
        input=program,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NEMORUN_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for words in ("1 passed", "blend", "same most likely token  100.00%", "ReplicatedWeight()"):
        assert words in done.stdout, words
    assert (tmp_path / "hf/blend/heads_blend_kha.py").is_file()
    assert "blend" in (tmp_path / "compare/blend/report.json").read_text()
