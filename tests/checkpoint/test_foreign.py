"""Name the formats of checkpoints that are not read, and what to do about them."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion.sources import open_source
from kha_megatron.errors import CheckpointError
from tests.faults import fuzz

FILES = {
    "--ckpt-format torch": (
        ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"],
        "iter_0000010 contains a Megatron checkpoint saved with --ckpt-format torch .*"
        "--ckpt-convert-format torch_dist",
    ),
    "--ckpt-format torch, PP, release": (
        ["latest_checkpointed_iteration.txt", "release/mp_rank_01_003/model_optim_rng.pt"],
        "--ckpt-format torch .mp_rank_01_003/model_optim_rng.pt.",
    ),
    "--ckpt-format torch, distributed optimizer": (
        ["mp_rank_00/distrib_optim.pt", "mp_rank_00/model_rng.pt"],
        "--ckpt-format torch .mp_rank_00/model_rng.pt.",
    ),
    "zarr": (
        ["iter_0000010/metadata.json", "iter_0000010/decoder.layers.w/.zarray"],
        "iter_0000010 contains a Megatron checkpoint saved with --dist-ckpt-format zarr",
    ),
    "adapter": (["adapter_config.json", "adapter_model.bin"], "PEFT adapter .* merge_and_unload"),
    "Meta": (["params.json", "consolidated.00.pth"], "Meta's format .*convert_llama_weights_to_hf"),
    "Mistral": (["params.json", "consolidated.safetensors"], "Mistral's format"),
    "GGUF": (["model-Q4_K_M.gguf"], "GGUF model of llama.cpp .model-Q4_K_M.gguf.*gguf_file="),
    "pickle": (["config.json", "pytorch_model.bin"], "pickle files .*save_pretrained"),
    "pickle shards": (
        ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
        "pickle files .*save_pretrained",
    ),
    "no index": (["config.json", "model-00001-of-00002.safetensors"], "shards without model.safe"),
    "variant": (
        ["config.json", "model.fp16.safetensors"],
        r"variant .*from_pretrained\(\.\.\., var",
    ),
    "Accelerate": (["pytorch_model_fsdp_0/__0_0.distcp"], "accelerate merge-weights"),
    "DeepSpeed": (
        ["latest", "global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py"],
        "DeepSpeed checkpoint .*zero_to_fp32.py . OUT --safe_serialization",
    ),
    "DeepSpeed, ZeRO only": (
        ["latest", "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        "DeepSpeed checkpoint",
    ),
    "TensorFlow": (["config.json", "tf_model.h5"], "from_tf=True"),
    "Flax": (["config.json", "flax_model.msgpack"], "from_flax=True"),
    "NeMo": (["llama.nemo"], "NeMo checkpoint .llama.nemo.*Hugging Face"),
    "NeMo 2": (["context/model.yaml", "weights/common.pt"], "NeMo checkpoint"),
    "ONNX": (["config.json", "onnx/model_q4.onnx"], "ONNX"),
    "OpenVINO": (["config.json", "openvino_model.xml"], "OpenVINO"),
    "Lightning": (["last.ckpt"], "pickle file of PyTorch .last.ckpt."),
    "no config.json": (["model.safetensors"], "no config.json .model.safetensors"),
    "Trainer": (
        ["checkpoint-500/config.json", "checkpoint-500/model.safetensors"],
        "models in subdirectories .checkpoint-500/config.json.*Pass one",
    ),
    "cache of the Hub": (
        ["refs/main", "snapshots/0123abc/config.json"],
        "models in subdirectories .snapshots/0123abc/config.json",
    ),
}
"""By format: its files and the expected message."""
CONTENTS = {
    "metadata.json": '{"sharded_backend": "zarr", "sharded_backend_version": 1}',
    "latest_checkpointed_iteration.txt": "10",
    "config.json": '{"model_type": "llama"}',
}


def write(folder, files):
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CONTENTS.get(file.name, "not read"))


@pytest.mark.parametrize("name", FILES)
def test_foreign_formats_are_named(tmp_path, name):
    files, message = FILES[name]
    write(tmp_path, files)
    for reader in (open_source, HFCheckpoint.open):
        with pytest.raises(CheckpointError, match=message) as caught:
            reader(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_hugging_face_model_is_no_megatron_checkpoint(tmp_path):
    write(tmp_path, ["config.json", "model.safetensors"])
    with pytest.raises(CheckpointError, match=r"a Hugging Face model \(config.json\)\. Convert it"):
        MegatronCheckpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["a.gguf", "a.nemo", "pytorch_model.bin", "last.ckpt"])
def test_foreign_files_are_named(tmp_path, name):
    write(tmp_path, [name])
    with pytest.raises(CheckpointError, match=rf"{name} is .+\. .*save"):
        open_source(tmp_path / name)


def test_distributed_checkpoints_of_other_programs_are_named(tmp_path):
    """They are written by PyTorch itself."""
    model = {"model": {"w": torch.ones(3)}}
    state = {"args": {"num_layers": 2}, "checkpoint_version": 3.0, "iteration": 10}
    dcp.save(model, checkpoint_id=tmp_path / "step-10", no_dist=True)
    with pytest.raises(CheckpointError, match=r"step-10 contains a distributed .*\(DCP\)"):
        open_source(tmp_path / "step-10")
    dcp.save(
        model | state,
        checkpoint_id=tmp_path / "save" / "iter_0000010",
        no_dist=True,
    )
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(CheckpointError, match="--ckpt-format torch_dcp or fsdp_dtensor"):
        open_source(tmp_path / "save")


@pytest.mark.parametrize("name", ["iter_0000010", "copy"])
def test_interrupted_saves_are_still_called_incomplete(tmp_path, name):
    fuzz.torch_dist(tmp_path / name)
    for mark in ("metadata.json", "integrity.json"):
        (tmp_path / name / mark).unlink()
    with pytest.raises(CheckpointError, match=r"(is incomplete|no complete checkpoint)"):
        open_source(tmp_path / name)


def test_other_files_next_to_a_checkpoint_do_not_matter(tmp_path):
    """A model that was published in several formats, and a directory with old checkpoints."""
    hf = tmp_path / "hf"
    megatron = tmp_path / "save"
    write(hf, [name for files, _ in FILES.values() for name in files if "adapter" not in name])
    save_file({"a": torch.ones(2)}, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert list(HFCheckpoint.open(hf).keys()) == ["a"]
    fuzz.torch_dist(megatron / "iter_0000020")
    write(megatron, FILES["--ckpt-format torch"][0])
    shutil.copytree(tmp_path / "hf", megatron / "exported")
    assert MegatronCheckpoint.open(megatron).path == megatron / "iter_0000020"
