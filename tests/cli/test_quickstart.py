"""``kha-megatron quickstart`` from text to a generated continuation."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from kha_megatron.checkpoint.tracker import newest
from kha_megatron.cli import app
from kha_megatron.cli.quickstart import SUMMARY_FILE, _next_steps, move_earlier_run
from kha_megatron.data import prepare
from kha_megatron.errors import OutputError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.plan.counts import count_model
from kha_megatron.recipes import get_recipe
from tests.checkpoint.saved import save
from tests.cli.commands import parse
from tests.recipes.conftest import nemorun_home  # noqa: F401

SMALL = shlex.split("""
--train-iters 6 --log-interval 2 --num-layers 2 --hidden-size 32 --kv-channels 8 --num-experts 4
--moe-ffn-hidden-size 16 --seq-length 12 --max-position-embeddings 12
--micro-batch-size 4 --global-batch-size 4
--lr 8e-3 --min-lr 8e-4
""")


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "chapter.tex").write_text("ten years of work")
    result = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path)])
    assert isinstance(result.exception, OutputError)
    assert "not written by" in str(result.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["chapter.tex"]


def test_an_earlier_training_with_a_checkpoint_is_kept(tmp_path):
    run = tmp_path / "run"
    for n in (1, 2):
        save(run / "checkpoints", 20, {}, kha_value=None)
        move_earlier_run(run)
        assert not run.exists()
        assert newest(tmp_path / f"run-{n}" / "checkpoints").is_dir()
    (run / "checkpoints" / "iter_0000005").mkdir(parents=True)  # incomplete
    move_earlier_run(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2"]


def _check(output, stdout, presets, mechanisms, iterations=6):
    summary = json.loads((output / SUMMARY_FILE).read_text())
    assert summary["finished"] is True
    assert summary["iterations"] == iterations
    assert 5.5 < summary["first_loss"] < 7.0  # uniform over a vocabulary of 512 is 6.24
    assert summary["last_loss"] < summary["first_loss"]
    assert min(summary["tokens_per_second"], summary["training_seconds"]) > 0
    assert summary["largest_logit_difference"] < 1e-4
    assert summary["argmax_agreement"] == 1.0
    tensors = load_file(next((output / "hf").glob("*.safetensors")))
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    bias = [size for name, size in sizes.items() if name.endswith("e_score_correction_bias")]
    assert bias == [4, 4]  # a buffer, no parameter
    assert summary["parameters"] == sum(sizes.values()) - sum(bias)
    run = get_recipe("quickstart").with_heads(HeadsConfig.from_preset(presets)).run_for(SMALL)
    assert summary["parameters"] == count_model(run.model).total
    for picture in summary["files"]["pictures"]:
        assert Path(picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"knocks {mechanisms} in 2 of 2 layers" in Path(summary["files"]["log"]).read_text()
    for name in ("data/tokenizer/tokenizer.json", "hf/config.json", "hf/tokenizer.json"):
        assert (output / name).stat().st_size > 0
    assert "the model continues 'def main('" in stdout
    assert "What to try next" in stdout
    assert not list(output.parent.rglob("*.partial-*"))


@pytest.mark.versions
def test_quickstart_on_an_earlier_text(run, tmp_path, nemorun_home):  # noqa: F811
    output = tmp_path / "quick start"
    output.mkdir()
    (output / SUMMARY_FILE).write_text("{}")
    prepare([Path(json.__file__).parent], output / "data", vocab_size=512)
    code, stdout, stderr = run("quickstart", "--output", output, "--", *SMALL, "--split", "4,1,0")
    assert code == 0, stderr[-4000:]
    assert "Reusing the dataset of an earlier run." in stderr
    _check(output, stdout, "kha_mlp", "value=mlp")
    assert (output / "pictures/loss.png").exists()
    assert not (output / "pictures/attention.png").exists()


@pytest.mark.whole
def test_quickstart_with_a_gate_in_a_process_of_its_own(tmp_path, nemorun_home):  # noqa: F811
    output = tmp_path / "quick start"
    words = ["quickstart", "--variant", "kha_mlp+gate_output", "--output", str(output), "--"]
    done = subprocess.run(
        [sys.executable, "-m", "kha_megatron", *words, *SMALL, "--train-iters", "24"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    mechanisms = "value=mlp gate(output=element)"
    _check(output, done.stdout, "kha_mlp+gate_output", mechanisms, iterations=24)
    assert (output / "pictures/attention.png").exists()
    assert "gate-score" in done.stdout
    gate = json.loads((output / "hf/config.json").read_text())["kha_gate"]
    assert gate["output"] == "element"


def test_the_next_steps_are_commands():
    lines = [line.strip() for line in _next_steps(Path("my runs")).splitlines()[2:]]
    for words in map(shlex.split, lines):
        assert Path(words[0]).absolute() == Path(sys.executable).with_name("kha-megatron")
        parse(words)
    assert shlex.split(lines[0])[1:] == ["generate", "my runs/hf", "import "]
