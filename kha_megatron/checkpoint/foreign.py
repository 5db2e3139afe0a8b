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
    files: tuple[str, ...]
    """Glob patterns. Each of them is enough to recognise the format."""
    remedy: str


PEFT = _Format(
    "a PEFT adapter",
    ("adapter_config.json",),
    "Merge it into its base model with merge_and_unload, save the merged model with "
    "save_pretrained, and convert that.",
)
_HF_MODEL = _Format(
    "a Hugging Face model",
    ("config.json",),
    "Convert it with `kha-megatron convert to-megatron`.",
)
_MEGATRON = (
    _Format(
        "a Megatron checkpoint saved with --ckpt-format torch",
        ("mp_rank_*/model*_rng.pt",),
        "Run its training command once with --ckpt-convert-format torch_dist and "
        "--ckpt-convert-save DIR, and convert DIR.",
    ),
    _Format(
        "a Megatron checkpoint saved with --dist-ckpt-format zarr",
        ("*/.zarray",),
        "Load it with a Megatron version that reads zarr, and save it with --ckpt-format "
        "torch_dist.",
    ),
)
_WEIGHTS = (
    _Format(
        "shards without model.safetensors.index.json",
        ("model-*-of-*.safetensors",),
        "Copy the index from where the model was downloaded.",
    ),
    _Format(
        "weights of a variant",
        ("model.*.safetensors",),
        "Load the model with from_pretrained(..., variant=...) and save it with save_pretrained.",
    ),
    _Format(
        "weights in Mistral's format",
        ("consolidated*.safetensors",),
        "Download the model in Hugging Face format (model*.safetensors and config.json).",
    ),
    _Format(
        "weights in Meta's format",
        ("consolidated.*.pth",),
        "Download the model in Hugging Face format, or convert it with transformers' "
        "convert_llama_weights_to_hf.py.",
    ),
    _Format(
        "a GGUF model of llama.cpp",
        ("*.gguf",),
        "Download the original model, or run AutoModelForCausalLM.from_pretrained(DIR, "
        "gguf_file=FILE).save_pretrained(OUT).",
    ),
    _Format(
        "PyTorch weights in pickle files",
        ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"),
        "Load the model with from_pretrained and save it with save_pretrained, which writes "
        "safetensors.",
    ),
    _Format(
        "an FSDP checkpoint of Accelerate",
        ("pytorch_model_fsdp*",),
        "Run `accelerate merge-weights` on it.",
    ),
    _Format(
        "a DeepSpeed checkpoint",
        ("zero_to_fp32.py", "*zero_pp_rank_*", "*/*zero_pp_rank_*", "*/mp_rank_*_model_states.pt"),
        "Run `python zero_to_fp32.py . OUT --safe_serialization` in it, and copy config.json and "
        "the tokenizer to OUT.",
    ),
    _Format(
        "TensorFlow or Flax weights",
        ("tf_model*.h5", "flax_model*.msgpack"),
        "Load the model in transformers 4 with from_tf=True or from_flax=True, and save it with "
        "save_pretrained.",
    ),
    _Format(
        "a NeMo checkpoint",
        ("*.nemo", "model_config.yaml", "context/model.yaml"),
        _SAVE_AS_HF,
    ),
    _Format("an ONNX model", ("*.onnx", "onnx/*.onnx"), "Download the original model."),
    _Format("an OpenVINO model", ("openvino_model.xml",), "Download the original model."),
    _Format("a pickle file of PyTorch", ("*.ckpt", "*.pth", "model*.pt"), _SAVE_AS_HF),
)
_NO_CONFIG = _Format(
    "safetensors files but no config.json",
    ("model*.safetensors",),
    "Add the model's config.json.",
)
_SUBDIRECTORIES = _Format(
    "Hugging Face models in subdirectories",
    ("snapshots/*/config.json", "*/config.json"),
    "Pass one of the subdirectories.",
)
_MEGATRON_FSDP = _Format(
    "a Megatron checkpoint saved with --ckpt-format torch_dcp or fsdp_dtensor",
    (METADATA,),
    "Only --ckpt-format torch_dist can be converted.",
)
_TORCH_DCP = _Format(
    "a distributed checkpoint of PyTorch (DCP), e.g. of torchtitan",
    (METADATA,),
    _SAVE_AS_HF,
)


def refuse_adapter(path: Path) -> None:
    """Raise CheckpointError if a model directory contains a PEFT adapter."""
    _refuse(path, PEFT)


def refuse_hf_model(path: Path) -> None:
    """Raise CheckpointError if a directory contains a Hugging Face model or a PEFT adapter."""
    _refuse(path, PEFT)
    _refuse(path, _HF_MODEL)


def refuse_foreign_weights(path: Path) -> None:
    """Raise CheckpointError if a model directory has weights in a format that we do not read."""
    for known in _WEIGHTS:
        _refuse(path, known)


def refuse_foreign_checkpoint(path: Path) -> None:
    """Raise CheckpointError if a path, or an iteration in it, has a format that we do not read."""
    if not path.is_dir():
        _refuse_file(path)
        return
    for directory in _with_iterations(path):
        for known in _MEGATRON:
            _refuse(directory, known)
        _refuse_distributed(directory)
    for known in (PEFT, _HF_MODEL, _NO_CONFIG, *_WEIGHTS, _SUBDIRECTORIES):
        _refuse(path, known)


def _refuse_file(path: Path) -> None:
    if not path.is_file():
        return
    for known in _WEIGHTS:
        for pattern in known.files:
            if fnmatchcase(path.name, pattern):
                raise CheckpointError(f"{path} is {known.name}. {known.remedy}")


def _with_iterations(path: Path) -> Iterator[Path]:
    yield path
    for child in sorted(path.iterdir()):
        if iteration_of(child) is not None:
            yield child


def _refuse(path: Path, known: _Format) -> None:
    for pattern in known.files:
        files = sorted(path.glob(pattern))
        if files:
            name = files[0].relative_to(path)
            raise CheckpointError(f"{path} contains {known.name} ({name}). {known.remedy}")


def _refuse_distributed(path: Path) -> None:
    """Tell the distributed checkpoints of other programs from an interrupted save of Megatron."""
    if not (path / METADATA).is_file():
        return
    try:
        folder = TorchDistFolder(path, FileChecks(path, {}))
    except CheckpointError:
        return
    if "checkpoint_version" in folder.objects:
        _refuse(path, _MEGATRON_FSDP)
    is_written_by_megatron = any("/shard_" in key for key in folder.objects)
    if not is_written_by_megatron and iteration_of(path) is None:
        _refuse(path, _TORCH_DCP)
