"""``kha-megatron convert to-hf``: output, exit codes and bad input."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.conversion import megatron_model, to_hf
from kha_megatron.conversion.verify import TOLERANCE, Pair
from tests.conversion.checkpoints import VOCAB
from tests.conversion.fixtures import write_tokenizer


@pytest.fixture
def run(run):
    return lambda *words: run("convert", "to-hf", *words)


@pytest.fixture(scope="module")
def megatron_outputs():
    return []


@pytest.fixture(autouse=True)
def one_run_of_megatron(megatron_outputs, monkeypatch):
    """Run Megatron once for ``verify``, because all tests convert the same checkpoint."""
    original = megatron_model.run_megatron

    def run_once(*args, **options):
        if not megatron_outputs:
            megatron_outputs.append(original(*args, **options))
        return megatron_outputs[0]

    monkeypatch.setattr(megatron_model, "run_megatron", run_once)


def _files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_json_holds_the_numbers(run, sparse, tokenizer, tmp_path):
    out = tmp_path / "new" / "hf"
    code, stdout, stderr = run(sparse[0], out, "--json")
    assert code == 0
    assert "error" not in stderr
    report = json.loads(stdout)
    tensors = load_file(out / "model.safetensors")
    assert report["path"] == str(out)
    assert report["tensors"] == len(tensors)
    trained = [t for name, t in tensors.items() if not name.endswith("correction_bias")]
    assert report["parameters"] == sum(tensor.numel() for tensor in trained)
    assert report["size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert (report["shards"], report["dtype"]) == (1, "float32")
    assert report["tokenizer"] == str(tokenizer)
    assert report["verification"]["agrees"]
    compared = report["verification"]["tensors"]
    assert (compared["tensors"], compared["different"]) == (len(tensors), [])
    assert compared["parameters"] == [report["parameters"]] * 2
    numbers = report["verification"]["logits"]
    assert 0 < numbers["mean_difference"] <= numbers["max_difference"] < 1e-5
    assert (numbers["argmax"], numbers["tokens"]) == (1.0, 24)
    assert abs(numbers["kl"]) < 1e-9
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(_files(out))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hf"]


def test_no_verify_runs_no_model(run, sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(Pair, "open", None)
    code, stdout, _ = run(sparse[0], tmp_path / "hf", "--no-verify")
    assert code == 0
    assert stdout.splitlines()[-1].split() == ["verified", "no"]


def test_logits_that_do_not_fit_into_memory_are_skipped(run, sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(Pair, "fits_in_memory", False)
    code, stdout, stderr = run(sparse[0], tmp_path / "hf", "--json")
    assert (code, json.loads(stdout)["verification"]["logits"]) == (0, None)
    assert "Logits are not compared: both models need" in stderr


def test_dtype_and_shard_size_are_respected(run, sparse, tmp_path):
    words = ("--dtype", "bfloat16", "--max-shard-size", "20KB", "--no-verify", "--json")
    code, stdout, _ = run(sparse[0], tmp_path / "hf", *words)
    assert code == 0
    report = json.loads(stdout)
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert report["dtype"] == "bfloat16"
    assert report["shards"] == len(shards) > 1
    assert load_file(shards[0])["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_wrong_model_exits_with_1(run, sparse, tmp_path, monkeypatch):
    original = to_hf.HFPlan.write

    def mistaken(planned, target, **options):
        written = original(planned, target, **options)
        tensors = load_file(target / "model.safetensors")
        tensors["model.norm.weight"] *= 0.99
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        (target / "manifest.json").unlink()  # its hash would differ
        return written

    monkeypatch.setattr(to_hf.HFPlan, "write", mistaken)
    code, stdout, stderr = run(sparse[0], tmp_path / "hf", "--json")
    assert code == 1
    assert "The two models differ: 1 tensors different, such as model.norm.weight" in stderr
    difference = json.loads(stdout)["verification"]["logits"]["max_difference"]
    assert difference > TOLERANCE


def test_a_small_tokenizer_keeps_all_rows(run, sparse, tmp_path):
    words = ("--no-verify", "--tokenizer", write_tokenizer(tmp_path / "small", 47))
    code, _, stderr = run(sparse[0], tmp_path / "hf", *words)
    assert code == 0
    assert "Kept all 56 rows of the embedding" in stderr
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 56


def test_overwrite_replaces_a_model_and_nothing_else(run, sparse, tmp_path):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for words, message in (((), "is not empty"), (("--overwrite",), "holds no manifest.json")):
        code, stdout, stderr = run(sparse[0], out, "--no-verify", *words)
        assert (code, stdout) == (2, "")
        assert message in stderr
        assert _files(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    assert run(sparse[0], out, "--no-verify")[0] == 0
    whole = _files(out)
    (out / "config.json").write_text("{}")
    (out / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier model")
    assert run(sparse[0], out, "--no-verify", "--overwrite")[0] == 0
    assert _files(out) == whole
    assert json.loads(whole["config.json"])["vocab_size"] == VOCAB
    link = tmp_path / "link"
    link.symlink_to(out)
    code, _, stderr = run(out, link, "--no-verify", "--overwrite", "--dtype", "float16")
    assert code == 2
    assert "holds the source of this conversion" in stderr
    (out / ".git").mkdir()
    code, _, stderr = run(sparse[0], out, "--no-verify", "--overwrite")
    assert code == 2
    assert "holds .git, which is not from this command" in stderr
    (out / ".git").rmdir()
    assert _files(out) == whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int8"], "Unknown dtype 'int8'"),
        (["--max-shard-size", "5X"], "Expected --max-shard-size to be a size such as"),
        (["--tokenizer", "/nowhere"], "No tokenizer directory /nowhere"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(run, sparse, tmp_path, words, message):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    code, stdout, stderr = run(sparse[0], out, "--overwrite", *words)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert _files(out) == {"manifest.json": b"{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
