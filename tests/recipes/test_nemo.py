"""The recipes from NeMo-Run's own command line, found through the installed entry point."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEMO = Path(sys.executable).with_name("nemo")

RANK = """
import os, sys
from pathlib import Path
words = [os.environ["OMP_NUM_THREADS"], *sys.argv]
Path(__file__).with_name("rank" + os.environ["RANK"]).write_text("|".join(words))
sys.exit(sys.argv[-1] == "fail")
"""

WORKSPACE = """
from dataclasses import replace
from kha_megatron import recipes
one = ["--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "1"]
recipe = recipes.get_recipe("quickstart").updated(one)
recipe = replace(recipe, name="table9/small", ranks=1, entry={script!r})
recipes.RECIPES = {{recipe.name: recipe}}
"""


@pytest.fixture
def nemo(tmp_path, nemorun_home):
    (tmp_path / "rank.py").write_text(RANK)
    script = WORKSPACE.format(script=str(tmp_path / "rank.py"))
    (tmp_path / "workspace.py").write_text(script)  # NeMo-Run imports it before anything else

    def call(*words):
        return subprocess.run(
            [NEMO, "kha", "train", "-y", "recipe=table9/small", *words],
            cwd=tmp_path,
            env=os.environ | {"INCLUDE_WORKSPACE_FILE": "true"},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.mark.whole
def test_recipe_trains_with_its_arguments_and_directories(nemo, data, tmp_path):
    done = nemo("megatron='--odd \"a b\"'", f"data={data}", f"output={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    words = (tmp_path / "rank0").read_text().split("|")
    assert words[0] == "1"
    assert words[-1] == "a b"
    assert words[words.index("--kha-preset") + 1] == "kha_mlp"
    assert words[words.index("--data-path") + 1] == str(data / "corpus")
    assert words[words.index("--save") + 1] == str(tmp_path / "runs" / "checkpoints")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--tensor-model-parallel-size=3", 2),
        pytest.param("--mock-data --x fail", 1, marks=pytest.mark.whole),
    ],
)
def test_failure_sets_the_exit_code(nemo, tmp_path, words, code):
    done = nemo(f"megatron='{words}'")
    assert done.returncode == code
    assert (tmp_path / "rank0").exists() == (code == 1)
    assert code == 1 or "error: " in done.stderr
