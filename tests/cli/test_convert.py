"""``kha-megatron convert`` and ``verify``: output, exit codes and bad input."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.conversion import megatron_model, to_hf
from kha_megatron.conversion.verify import LOGIT_TOLERANCE
from kha_megatron.hf import KHAModelConfig
from tests.conversion.checkpoints import VOCAB
from tests.conversion.forked import run_in_new_process
from tests.conversion.models import CONFIGS, SIZES, make


@pytest.fixture
def to_hf_format(run):
    return functools.partial(run, "convert", "to-hf")


@pytest.fixture
def qwen3(tmp_path):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


@pytest.fixture
def linear(tmp_path):
    config = KHAModelConfig(**SIZES, kha_query="linear", kha_value="linear")
    make(config).save_pretrained(tmp_path / "kha")
    return tmp_path / "kha"


def _files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _change(folder, name):
    """Change a tensor of a model, and delete the manifest with its hash."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[5] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()


def test_json_holds_the_numbers(to_hf_format, sparse, tokenizer, tmp_path):
    out = tmp_path / "new" / "hf"
    code, stdout, stderr = to_hf_format(sparse[0], out, "--json")
    assert code == 0
    assert "error" not in stderr
    report = json.loads(stdout)
    tensors = load_file(out / "model.safetensors")
    assert report["path"] == str(out)
    assert report["tensors"] == len(tensors)
    parameters = 0
    for name, tensor in tensors.items():
        if not name.endswith("correction_bias"):
            parameters += tensor.numel()
    assert report["parameters"] == parameters
    assert report["size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert report["shards"] == 1
    assert report["dtype"] == "float32"
    assert report["tokenizer"] == str(tokenizer)
    assert report["verification"]["agrees"]
    compared = report["verification"]["tensors"]
    assert compared["tensors"] == len(tensors)
    assert compared["different"] == []
    assert compared["parameters"] == [report["parameters"]] * 2
    numbers = report["verification"]["logits"]
    assert 0 < numbers["mean_difference"] <= numbers["max_difference"] < 1e-5
    assert numbers["argmax"] == 1.0
    assert numbers["tokens"] == 24
    assert abs(numbers["kl"]) < 1e-9
    (decoding,) = report["verification"]["decoding"]  # Megatron's checkpoint has none
    assert decoding["path"] == str(out)
    assert decoding["max_difference"] < 1e-5
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(_files(out))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hf"]


def test_dtype_and_shard_size_are_respected(to_hf_format, sparse, tmp_path):
    words = ("--dtype", "bfloat16", "--max-shard-size", "20KB", "--no-verify", "--json")
    code, stdout, _ = to_hf_format(sparse[0], tmp_path / "hf", *words)
    assert code == 0
    report = json.loads(stdout)
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert report["dtype"] == "bfloat16"
    assert report["shards"] == len(shards) > 1
    tensors = load_file(shards[0])
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_overwrite_replaces_a_model_and_nothing_else(to_hf_format, sparse, tmp_path):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    convert = functools.partial(to_hf_format, sparse[0], out, "--no-verify")
    for words, message in (
        ([], "is not empty"),
        (["--overwrite"], "contains no manifest.json"),
    ):
        code, stdout, stderr = convert(*words)
        assert code == 2
        assert stdout == ""
        assert message in stderr
        assert _files(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    code, _, _ = convert()
    assert code == 0
    converted = _files(out)
    assert json.loads(converted["config.json"])["vocab_size"] == VOCAB
    (out / "config.json").write_text("{}")
    (out / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier model")
    code, _, _ = convert("--overwrite")
    assert code == 0
    assert _files(out) == converted
    link = tmp_path / "link"
    link.symlink_to(out)
    words = ("--no-verify", "--overwrite", "--dtype", "float16")
    code, _, stderr = to_hf_format(out, link, *words)
    assert code == 2
    assert "contains the source checkpoint" in stderr
    (out / ".git").mkdir()
    code, _, stderr = convert("--overwrite")
    assert code == 2
    assert "contains .git, which was not written by this command" in stderr
    (out / ".git").rmdir()
    assert _files(out) == converted


def test_to_megatron_is_verified_and_prints_the_arguments_to_resume(
    run,
    qwen3,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(megatron_model, "run_megatron", run_in_new_process)
    out = tmp_path / "ckpt"
    words = ("--make-vocab-size-divisible-by", 8, "--workers", 2, "--json")
    code, stdout, _ = run("convert", "to-megatron", qwen3, out, *words)
    assert code == 0
    report = json.loads(stdout)
    assert report["architecture"] == "megatron"
    assert report["verification"]["agrees"]
    assert report["verification"]["logits"]["max_difference"] < 1e-5
    assert report["arguments"][:2] == ["--pretrained-checkpoint", str(out)]
    assert "--use-checkpoint-args" in report["arguments"]
    assert "--qk-layernorm" in report["arguments"]
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    code, _, stderr = run("convert", "to-megatron", qwen3, out, "--no-verify")
    assert code == 2
    assert "is not empty" in stderr
    words = ("--no-verify", "--overwrite", "--dtype", "bfloat16")
    code, stdout, _ = run("convert", "to-megatron", qwen3, out, *words)
    assert code == 0
    assert "--bf16" in stdout
    assert "--load RUN --save RUN" in " ".join(stdout.split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fold_prints_what_rounding_does_to_mixtures_of_heads(run, tmp_path, dtype):
    config = KHAModelConfig(
        **SIZES,
        kha_query="linear",
        kha_moh={"shared": 2, "active": 2},
    )
    make(config).to(getattr(torch, dtype)).save_pretrained(tmp_path / "kha")
    words = ("--architecture", "kha", "--json")
    code, stdout, stderr = run("convert", "fold", tmp_path / "kha", tmp_path / "out", *words)
    assert code == 0
    logits = json.loads(stdout)["verification"]["logits"]
    message = f"can select other heads. Logits differ by up to {logits['max_difference']:.2g}."
    assert (message in stderr) == (dtype == "bfloat16")


def test_fold_then_verify(run, linear, tmp_path):
    out = tmp_path / "folded"
    code, stdout, _ = run("convert", "fold", linear, out, "--json")
    assert code == 0
    report = json.loads(stdout)
    assert report["architecture"] == "qwen3"
    assert report["verification"]["tensors"]["remark"] == "the first folded"
    code, stdout, _ = run("verify", linear, out)
    assert code == 0
    assert "all equal" in stdout
    _change(out, "model.layers.1.mlp.up_proj.weight")
    code, stdout, stderr = run("verify", linear, out, "--json")
    assert code == 1
    comparison = json.loads(stdout)
    assert not comparison["agrees"]
    assert comparison["tensors"]["different"] == ["model.layers.1.mlp.up_proj.weight"]
    assert "starting at layer 1" in stderr
    code, stdout, _ = run("verify", linear, out, "--no-logits")
    assert code == 1
    assert "not compared" in stdout


def test_a_wrong_model_exits_with_1(run, linear, tmp_path, monkeypatch):
    original = to_hf.HFPlan.write

    def mistaken(plan, target, **options):
        result = original(plan, target, **options)
        _change(target, "model.norm.weight")
        return result

    monkeypatch.setattr(to_hf.HFPlan, "write", mistaken)
    code, stdout, stderr = run("convert", "fold", linear, tmp_path / "out", "--json")
    assert code == 1
    assert "The two models differ: different tensors: 1, e.g. model.norm.weight" in stderr
    logits = json.loads(stdout)["verification"]["logits"]
    assert logits["max_difference"] > LOGIT_TOLERANCE


def test_upcycle_to_either_side(run, qwen3, tmp_path):
    words = ("--kha-preset", "kha_linear", "--kha-value", "mlp", "--no-verify", "--json")
    code, _, _ = run("convert", "upcycle", qwen3, tmp_path / "ckpt", *words)
    assert code == 0
    code, _, _ = run("convert", "upcycle", qwen3, tmp_path / "hf", "--to", "hf", *words)
    assert code == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    variants = [config[f"kha_{name}"] for name in ("query", "key", "value")]
    assert variants == ["linear", "linear", "mlp"]
    code, stdout, _ = run("verify", tmp_path / "hf", tmp_path / "ckpt", "--no-logits", "--json")
    assert code == 0
    assert json.loads(stdout)["agrees"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("to-hf --dtype int8", "'int8' is not one of"),
        ("to-hf --tokenizer /nowhere", "Tokenizer directory /nowhere not found"),
        ("to-hf --architecture gpt2", "Unknown architecture 'gpt2'"),
        ("to-hf --architecture qwen3_moe", "cannot be exported as qwen3_moe"),
        ("upcycle", "No head mechanism to add"),
        ("upcycle --to onnx", "'onnx' is not one of"),
        ("fold", "uses no KHA and no other mechanism"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(run, qwen3, tmp_path, words, message):
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    command, *options = words.split()
    code, stdout, stderr = run("convert", command, qwen3, out, "--overwrite", *options)
    assert code == 2
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert _files(out) == {"manifest.json": b"{}"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qwen3"]
