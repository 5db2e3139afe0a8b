"""Recognise checkpoints in formats that we do not read, and explain how to convert them.

Only file names are looked at, except for ``.metadata``, which is read without running code.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.torch_dist import METADATA, TorchDistFolder
from kha_megatron.checkpoint.tracker import iteration_of
from kha_megatron.errors import CheckpointError

_SAVE_AS_HF = "Load it with the program that wrote it, and save a Hugging Face model from there."


class _Format(NamedTuple):
    """A file format that we do not read."""

    name: str
    """Noun phrase for error messages."""
    patterns: tuple[str, ...]
    """Glob patterns. A file that matches any of them is enough to recognise the format."""
    remedy: str
    """How to convert it, as a full sentence."""


_PEFT_ADAPTER = _Format(
    name="a PEFT adapter",
    patterns=("adapter_config.json",),
    remedy="Merge it into its base model with merge_and_unload, save the merged model with "
    "save_pretrained, and convert that.",
)
_HF_MODEL = _Format(
    name="a Hugging Face model",
    patterns=("config.json",),
    remedy="Convert it with `kha-megatron convert to-megatron`.",
)
_MEGATRON_FORMATS = (
    _Format(
        name="a Megatron checkpoint saved with --ckpt-format torch",
        patterns=("mp_rank_*/model*_rng.pt",),
        remedy="Run its training command once with --ckpt-convert-format torch_dist and "
        "--ckpt-convert-save DIR, and convert DIR.",
    ),
    _Format(
        name="a Megatron checkpoint saved with --dist-ckpt-format zarr",
        patterns=("*/.zarray",),
        remedy="Load it with a Megatron version that reads zarr, and save it with --ckpt-format "
        "torch_dist.",
    ),
)
_WEIGHT_FORMATS = (
    _Format(
        name="shards without model.safetensors.index.json",
        patterns=("model-*-of-*.safetensors",),
        remedy="Copy the index from where the model was downloaded.",
    ),
    _Format(
        name="weights of a variant",
        patterns=("model.*.safetensors",),
        remedy="Load the model with from_pretrained(..., variant=...) and save it with "
        "save_pretrained.",
    ),
    _Format(
        name="weights in Mistral's format",
        patterns=("consolidated*.safetensors",),
        remedy="Download the model in Hugging Face format (model*.safetensors and config.json).",
    ),
    _Format(
        name="weights in Meta's format",
        patterns=("consolidated.*.pth",),
        remedy="Download the model in Hugging Face format, or convert it with transformers' "
        "convert_llama_weights_to_hf.py.",
    ),
    _Format(
        name="a GGUF model of llama.cpp",
        patterns=("*.gguf",),
        remedy="Download the original model, or run AutoModelForCausalLM.from_pretrained(DIR, "
        "gguf_file=FILE).save_pretrained(OUT).",
    ),
    _Format(
        name="PyTorch weights in pickle files",
        patterns=("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"),
        remedy="Load the model with from_pretrained and save it with save_pretrained, which writes "
        "safetensors.",
    ),
    _Format(
        name="an FSDP checkpoint of Accelerate",
        patterns=("pytorch_model_fsdp*",),
        remedy="Run `accelerate merge-weights` on it.",
    ),
    _Format(
        name="a DeepSpeed checkpoint",
        patterns=(
            "zero_to_fp32.py",
            "*zero_pp_rank_*",
            "*/*zero_pp_rank_*",
            "*/mp_rank_*_model_states.pt",
        ),
        remedy="Run `python zero_to_fp32.py . OUT --safe_serialization` in it, and copy "
        "config.json and the tokenizer to OUT.",
    ),
    _Format(
        name="TensorFlow or Flax weights",
        patterns=("tf_model*.h5", "flax_model*.msgpack"),
        remedy="Load the model in transformers 4 with from_tf=True or from_flax=True, and save it "
        "with save_pretrained.",
    ),
    _Format(
        name="a NeMo checkpoint",
        patterns=("*.nemo", "model_config.yaml", "context/model.yaml"),
        remedy=_SAVE_AS_HF,
    ),
    _Format(
        name="an ONNX model",
        patterns=("*.onnx", "onnx/*.onnx"),
        remedy="Download the original model.",
    ),
    _Format(
        name="an OpenVINO model",
        patterns=("openvino_model.xml",),
        remedy="Download the original model.",
    ),
    _Format(
        name="a pickle file of PyTorch",
        patterns=("*.ckpt", "*.pth", "model*.pt"),
        remedy=_SAVE_AS_HF,
    ),
)
_NO_CONFIG = _Format(
    name="safetensors files but no config.json",
    patterns=("model*.safetensors",),
    remedy="Add the model's config.json.",
)
_SUBDIRECTORIES = _Format(
    name="Hugging Face models in subdirectories",
    patterns=("snapshots/*/config.json", "*/config.json"),
    remedy="Pass one of the subdirectories.",
)
_MEGATRON_FSDP = _Format(
    name="a Megatron checkpoint saved with --ckpt-format torch_dcp or fsdp_dtensor",
    patterns=(METADATA,),
    remedy="Only --ckpt-format torch_dist can be converted.",
)
_TORCH_DCP = _Format(
    name="a distributed checkpoint of PyTorch (DCP), e.g. of torchtitan",
    patterns=(METADATA,),
    remedy=_SAVE_AS_HF,
)


def refuse_adapter(path: Path) -> None:
    """Raise CheckpointError if a model directory contains a PEFT adapter."""
    _refuse(path, _PEFT_ADAPTER)


def refuse_hf_model(path: Path) -> None:
    """Raise CheckpointError if a directory contains a Hugging Face model or a PEFT adapter."""
    _refuse(path, _PEFT_ADAPTER)
    _refuse(path, _HF_MODEL)


def refuse_foreign_weights(path: Path) -> None:
    """Raise CheckpointError if a model directory has weights in a format that we do not read."""
    for file_format in _WEIGHT_FORMATS:
        _refuse(path, file_format)


def refuse_foreign_checkpoint(path: Path) -> None:
    """Raise CheckpointError if a path, or an iteration in it, has a format that we do not read."""
    if not path.is_dir():
        _refuse_file(path)
        return
    for directory in _with_iterations(path):
        for file_format in _MEGATRON_FORMATS:
            _refuse(directory, file_format)
        _refuse_distributed(directory)
    # the first match is reported
    formats = (_PEFT_ADAPTER, _HF_MODEL, _NO_CONFIG, *_WEIGHT_FORMATS, _SUBDIRECTORIES)
    for file_format in formats:
        _refuse(path, file_format)


def _refuse_file(path: Path) -> None:
    if not path.is_file():
        return
    for file_format in _WEIGHT_FORMATS:
        for pattern in file_format.patterns:
            if fnmatchcase(path.name, pattern):
                raise CheckpointError(f"{path} is {file_format.name}. {file_format.remedy}")


def _with_iterations(path: Path) -> Iterator[Path]:
    yield path
    for child in sorted(path.iterdir()):
        if iteration_of(child) is not None:
            yield child


def _refuse(path: Path, file_format: _Format) -> None:
    for pattern in file_format.patterns:
        files = sorted(path.glob(pattern))
        if files:
            name = files[0].relative_to(path)
            raise CheckpointError(
                f"{path} contains {file_format.name} ({name}). {file_format.remedy}"
            )


def _refuse_distributed(path: Path) -> None:
    """Raise CheckpointError for distributed checkpoints (DCP) in other formats than torch_dist.

    Returns if the directory may be an interrupted save in Megatron's ``torch_dist`` format.
    """
    if not (path / METADATA).is_file():
        return
    try:
        folder = TorchDistFolder(path, FileChecks(path, {}))
    except CheckpointError:
        return
    if "checkpoint_version" in folder.objects:
        _refuse(path, _MEGATRON_FSDP)
    # torch_dist names objects like common_state/shard_0_1
    is_written_by_megatron = any("/shard_" in key for key in folder.objects)
    if not is_written_by_megatron and iteration_of(path) is None:
        _refuse(path, _TORCH_DCP)
