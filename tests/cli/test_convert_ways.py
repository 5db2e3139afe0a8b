"""``kha-megatron convert`` to-megatron, fold and upcycle, and ``verify``."""

import json

import pytest
from safetensors.torch import load_file, save_file

from kha_megatron.hf import KHAModelConfig
from tests.conversion.models import CONFIGS, SIZES, make

LINEAR = KHAModelConfig(**SIZES, kha_query="linear", kha_value="linear")


@pytest.fixture
def qwen3(tmp_path):
    make(CONFIGS["qwen3"]).save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


def test_to_megatron_is_verified_and_prints_the_arguments_to_resume(run, qwen3, tmp_path):
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


def test_fold_then_verify(run, tmp_path):
    make(LINEAR).save_pretrained(tmp_path / "kha")
    out = tmp_path / "folded"
    code, stdout, _ = run("convert", "fold", tmp_path / "kha", out, "--json")
    assert code == 0
    report = json.loads(stdout)
    assert report["architecture"] == "qwen3"
    assert report["verification"]["tensors"]["remark"] == "the first folded"
    code, stdout, _ = run("verify", tmp_path / "kha", out)
    assert code == 0
    assert "all equal" in stdout
    (out / "manifest.json").unlink()
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    code, stdout, stderr = run("verify", tmp_path / "kha", out, "--json")
    assert code == 1
    assert not json.loads(stdout)["agrees"]
    assert json.loads(stdout)["tensors"]["different"] == ["model.layers.1.mlp.up_proj.weight"]
    assert "from layer 1 on" in stderr
    code, stdout, _ = run("verify", tmp_path / "kha", out, "--no-logits")
    assert code == 1
    assert "not compared" in stdout


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
    assert (code, json.loads(stdout)["agrees"]) == (0, True)


BAD = {
    "nothing to knock": (("upcycle",), "Expected head mechanisms to add"),
    "unknown side": (("upcycle", "--to", "onnx"), "'onnx' is not one of"),
    "nothing to fold": (("fold",), "has neither knocking heads nor"),
    "unknown architecture": (("to-hf", "--architecture", "gpt2"), "Unknown architecture 'gpt2'"),
    "dense as experts": (("to-hf", "--architecture", "qwen3_moe"), "qwen3_moe cannot express"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_writes_nothing(run, qwen3, tmp_path, case):
    (command, *words), message = BAD[case]
    code, stdout, stderr = run("convert", command, qwen3, tmp_path / "out", *words)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.startswith("error: ")
    assert len(stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3"]
