"""A Megatron ``torch_dist`` checkpoint to a Hugging Face folder, one tensor at a time."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kha_megatron.config import KHAConfig
from kha_megatron.conversion import table
from kha_megatron.conversion.architecture import hf_config
from kha_megatron.conversion.hf_reader import INDEX, WEIGHTS
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.files import staged_folder
from kha_megatron.hf import KHAModelConfig
from kha_megatron.mcore.checkpoint import LAYERS, MegatronCheckpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    tensors: int
    parameters: int
    size: int
    """Bytes of all shards."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Where the tokenizer came from; None if the run had none that can be saved."""


@dataclass(frozen=True)
class Plan:
    """Everything checked and read but the tensors: nothing has been written yet."""

    checkpoint: MegatronCheckpoint
    config: KHAModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    tokenizer_source: str | None
    dtype: torch.dtype | None

    @property
    def size(self) -> int:
        """Bytes of the tensors to read."""
        return sum(
            torch.Size(info.shape).numel() * info.dtype.itemsize
            for info in self.checkpoint.keys().values()
        )


def plan(source: Path, *, dtype: str | None = None, tokenizer: Path | None = None) -> Plan:
    """Open a checkpoint and decide what the Hugging Face folder will hold.

    Args:
        source: a ``--save`` folder or one iteration of it.
        dtype: a key of ``DTYPES``; None keeps each tensor's own.
        tokenizer: a tokenizer folder instead of the one the run was trained with.

    Raises:
        CheckpointError: the checkpoint is damaged, or cannot be expressed; the message says why.
        ConfigError: the dtype or the tokenizer folder does not exist.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    checkpoint = MegatronCheckpoint.open(source)
    args = checkpoint.args
    loaded, tokenizer_source = _tokenizer(args, tokenizer)
    vocab_size = _vocab_size(checkpoint, loaded, tokenizer_source)
    config = hf_config(args, checkpoint.kha or KHAConfig(), vocab_size)
    config.architectures = ["KHAForCausalLM"]
    if loaded is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(loaded, name))
    _check_rows(checkpoint, config)
    return Plan(checkpoint, config, loaded, tokenizer_source, DTYPES.get(dtype))


def convert(
    planned: Plan,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: OnBytes = lambda count: None,
) -> Conversion:
    """Write the folder: safetensors shards, configuration, generation configuration, tokenizer.

    Memory: one shard of at most ``max_shard_bytes`` and one tensor.

    Args:
        planned: from :func:`plan`.
        target: a folder; it is replaced at the end, all at once.
        on_bytes: called with the bytes of each tensor read.

    Raises:
        CheckpointError: a shard of the source is damaged.
        OutputError: the disk refuses; what was at ``target`` is still there.
    """
    config = planned.config
    with staged_folder(target) as folder:
        shards = _write_shards(
            _cast(_tensors(planned, on_bytes), planned.dtype), folder, max_shard_bytes
        )
        config.dtype = planned.dtype or planned.checkpoint.keys()[_EMBEDDING].dtype
        config.save_pretrained(folder)
        GenerationConfig(
            **{name: getattr(config, name) for name in ("bos_token_id", "eos_token_id")},
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
        if planned.tokenizer is not None:
            planned.tokenizer.save_pretrained(folder)
    return Conversion(
        path=target,
        tensors=len(shards.names),
        parameters=shards.parameters,
        size=shards.size,
        shards=len(set(shards.names.values())),
        dtype=str(config.dtype).removeprefix("torch."),
        tokenizer=planned.tokenizer_source,
    )


_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER_NUMBER = re.compile(re.escape(LAYERS) + r"\d+\.")


def _vocab_size(
    checkpoint: MegatronCheckpoint, loaded: PreTrainedTokenizerBase | None, source: str | None
) -> int:
    """Rows of the embedding without Megatron's padding; all if padding does not explain them."""
    args, held = checkpoint.args, checkpoint.keys()
    if _EMBEDDING not in held:
        raise CheckpointError(f"{checkpoint.path} lacks {_EMBEDDING}: it holds no GPTModel")
    padded = held[_EMBEDDING].shape[0]
    entries = len(loaded) if loaded is not None else args.get("vocab_size")
    if entries is None:
        return padded
    if entries > padded:
        raise CheckpointError(
            f"the tokenizer {source} has {entries} entries, the embedding {padded} rows: name the "
            "tokenizer of this run with --tokenizer"
        )
    sizes = [args.get(n) for n in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")]
    multiple = math.prod(size or 1 for size in sizes)
    return entries if padded - entries < multiple else padded


def _tokenizer(
    args: dict[str, Any], override: Path | None
) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """The tokenizer to write, and where it comes from."""
    kind, model = args.get("tokenizer_type"), args.get("tokenizer_model")
    if override is None and kind != "HuggingFaceTokenizer":
        return None, None
    folder = Path(override or model or "")
    if not (override or model) or not folder.is_dir():
        raise ConfigError(
            f"no tokenizer: {override or model} is not a folder: name the run's tokenizer folder "
            "with --tokenizer"
        )
    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a damaged file fails wherever the loader first trips over it
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"no tokenizer: {folder} cannot be loaded ({type(error).__name__}: {first})"
        ) from error
    return loaded, str(folder)


def _check_rows(checkpoint: MegatronCheckpoint, config: KHAModelConfig) -> None:
    """Refuse a tensor that the configuration has no place for, and a place without its tensor."""
    held, layers = checkpoint.keys(), range(config.num_hidden_layers)
    found, wanted, rows = set(), set(), set()
    for row in table.MODEL:
        rows |= set(row.names)
        found |= {row.names[0] for name in row.names if name in held}
        wanted |= {row.names[0]} if row.when(config, 0) else set()
    for row in table.LAYER:
        place = f"{LAYERS}{{}}.{row.names[0]}"
        rows |= {LAYERS + name for name in row.names}
        found |= {place.format(i) for name in row.names for i in checkpoint.layers_with(name)}
        if row is not table.EXPERT_BIAS or checkpoint.args.get("moe_router_enable_expert_bias"):
            wanted |= {place.format(layer) for layer in layers if row.when(config, layer)}
    unknown = {key for key in held if _LAYER_NUMBER.sub(LAYERS, key) not in rows}
    for names, problem in (
        (unknown | found - wanted, "holds {} tensors that the kha architecture has no place for"),
        (wanted - found, "lacks {} tensors that its training arguments call for"),
    ):
        if names:
            raise CheckpointError(
                f"{checkpoint.path} {problem.format(len(names))}: {', '.join(sorted(names)[:5])}"
            )


def _tensors(planned: Plan, on_bytes: OnBytes) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, in the order of the model, read one Megatron tensor at a time."""
    checkpoint, config = planned.checkpoint, planned.config
    held = checkpoint.keys()

    def converted(row: table.Row, tensor: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
        on_bytes(tensor.nbytes)
        for name, part in row.layout.to_hf(tensor, config):
            yield prefix + name, part

    for row in table.MODEL:
        for name in row.names:
            if name in held:
                yield from converted(row, checkpoint.tensor(name), "")
    for layer in range(config.num_hidden_layers):
        for row in table.LAYER:
            prefix = f"model.layers.{layer}."
            name = next((n for n in row.names if checkpoint.has_layer_tensor(layer, n)), None)
            if name is not None:
                yield from converted(row, checkpoint.layer_tensor(layer, name), prefix)
            elif row is table.EXPERT_BIAS and row.when(config, layer):
                for hf_name, zeros in row.layout.to_hf(torch.zeros(config.num_experts), config):
                    yield prefix + hf_name, zeros


def _cast(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with memory of its own (safetensors refuses shared ones), in the dtype."""
    for name, tensor in tensors:
        keep = dtype is None or name.endswith(table.FLOAT32)
        wanted = tensor if keep else tensor.to(dtype)
        yield name, torch.clone(wanted, memory_format=torch.contiguous_format)


@dataclass
class _Shards:
    names: dict[str, str]
    size: int = 0
    parameters: int = 0


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> _Shards:
    """Fill shards in order, and name them as ``save_pretrained`` does."""
    written = _Shards({})
    waiting: dict[str, Tensor] = {}
    files: list[list[str]] = []

    def write() -> None:
        files.append(list(waiting))
        save_file(waiting, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        waiting.clear()

    pending = 0
    for name, tensor in tensors:
        if waiting and pending + tensor.nbytes > max_shard_bytes:
            write()
            pending = 0
        waiting[name] = tensor
        pending += tensor.nbytes
        written.size += tensor.nbytes
        written.parameters += tensor.numel()
    write()

    for number, names in enumerate(files, start=1):
        final = WEIGHTS
        if len(files) > 1:
            final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / final)
        written.names |= dict.fromkeys(names, final)
    if len(files) > 1:
        index = {"metadata": {"total_size": written.size}, "weight_map": written.names}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written
