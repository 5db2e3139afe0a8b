"""``kha-megatron quickstart`` as a user types it: the whole product once, and what it refuses."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from kha_megatron.checkpoint.tracker import newest
from kha_megatron.cli import app
from kha_megatron.cli.quickstart import _next_steps, move_earlier_run
from kha_megatron.config import KHAConfig
from kha_megatron.errors import OutputError
from kha_megatron.plan.counts import count
from kha_megatron.recipes import get_recipe
from tests.cli.commands import parse
from tests.recipes.conftest import data, nemorun_home  # noqa: F401

SMALL = shlex.split("""
--train-iters 6 --log-interval 2 --num-layers 2 --hidden-size 32 --kv-channels 8 --num-experts 4
--moe-ffn-hidden-size 16 --seq-length 64 --micro-batch-size 4 --global-batch-size 4
--lr 8e-3 --min-lr 8e-4
""")


@pytest.fixture
def taken(tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("ten years of work")
    return folder


def test_a_folder_that_is_not_ours_is_left_alone(taken):
    result = CliRunner().invoke(app, ["quickstart", "--output", str(taken)])
    assert isinstance(result.exception, OutputError)
    assert [file.name for file in taken.iterdir()] == ["chapter.tex"]


def test_an_earlier_training_is_kept_if_it_saved_anything(tmp_path, dense):
    run = tmp_path / "run"
    for n in (1, 2):
        shutil.copytree(dense[0], run / "checkpoints")
        move_earlier_run(run)
        assert not run.exists()
        assert newest(tmp_path / f"run-{n}" / "checkpoints").is_dir()
    (run / "checkpoints" / "iter_0000005").mkdir(parents=True)  # cut short
    move_earlier_run(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2"]


@pytest.mark.parametrize(
    ("variant", "knocks"),
    [
        pytest.param([], "value=mlp", id="as it is"),
        pytest.param(
            ["--variant", "kha_mlp,gate_output"],
            "value=mlp gate(output=element)",
            marks=pytest.mark.whole,
            id="gated",
        ),
    ],
)
def test_slow_the_whole_way(tmp_path, nemorun_home, variant, knocks):  # noqa: F811
    """Real text, real NeMo-Run, real Megatron on two ranks, real conversion and pictures."""
    output = tmp_path / "quick start"
    words = ["quickstart", *variant, "--output", str(output), "--", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "kha_megatron", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((output / "quickstart.json").read_text())
    assert summary["finished"] is True
    assert summary["iterations"] == 6
    assert 5.5 < summary["first_loss"] < 7.0  # a vocabulary of 512 guessed evenly is 6.24
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["tokens_per_second"] > 0
    assert summary["training_seconds"] > 1
    assert summary["largest_logit_difference"] < 1e-4
    assert summary["argmax_agreement"] == 1.0
    tensors = load_file(next((output / "hf").glob("*.safetensors")))
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    bias = [size for name, size in sizes.items() if name.endswith("e_score_correction_bias")]
    assert bias == [4, 4]  # the experts' load moves them, gradients do not
    assert summary["parameters"] == sum(sizes.values()) - sum(bias)
    presets = variant[1].split(",") if variant else ["kha_mlp"]
    run = get_recipe("quickstart").having(KHAConfig.from_presets(presets)).run_for(SMALL)
    assert summary["parameters"] == count(run.model, run.kha).total

    files = ("data/corpus.bin", "data/tokenizer/tokenizer.json", "hf/config.json")
    pictures = ("knock_value.png", "loss.png")
    for name in (*files, "hf/tokenizer.json", "run/checkpoints/latest_checkpointed_iteration.txt"):
        assert (output / name).stat().st_size > 0, name
    assert list((output / "hf").glob("*.safetensors"))
    assert str(output / "pictures" / pictures[1]) in summary["files"]["pictures"]
    for picture in summary["files"]["pictures"]:
        with open(picture, "rb") as stream:
            assert stream.read(8) == b"\x89PNG\r\n\x1a\n"
    with open(summary["files"]["log"]) as log:
        assert f"knocks {knocks} in 2 of 2 layers" in log.read()
    assert (output / "pictures/attention.png").exists() == bool(variant)
    assert ("gate-score" in done.stdout) == bool(variant)
    gate = json.loads((output / "hf/config.json").read_text()).get("kha_gate", {})
    assert gate.get("output") == ("element" if variant else None)
    assert "the model continues 'def main('" in done.stdout
    assert "What to try next" in done.stdout
    assert not list(tmp_path.rglob("*.partial-*"))


def test_the_next_steps_are_commands():
    lines = [line.strip() for line in _next_steps(Path("my runs")).splitlines()[2:]]
    for words in map(shlex.split, lines):
        assert Path(words[0]).absolute() == Path(sys.executable).with_name("kha-megatron")
        parse(words)
    assert shlex.split(lines[0])[1:] == ["generate", "my runs/hf", "import "]


@pytest.mark.whole
def test_bad_input_found_by_a_rank_makes_launch_exit_2(data, tmp_path, nemorun_home):  # noqa: F811
    """Empty data files pass the launcher's checks; Megatron refuses them."""
    words = ["launch", "quickstart", "--data", str(data), "--output", str(tmp_path / "run")]
    words += ["--nproc", "1", "--", "--tensor-model-parallel-size", "1"]
    words += ["--expert-model-parallel-size", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "kha_megatron", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert "error: training failed: rank 0 failed with exit code 2" in done.stderr
    assert "AutoTokenizer" in done.stderr  # the last lines of that rank
