"""Open a Megatron or Hugging Face checkpoint as a source of Hugging Face tensors.

Opening checks the shapes of all tensors against the configuration. Transformations
(:mod:`kha_megatron.conversion.transforms`) wrap a source's ``read``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments
from kha_megatron.conversion.rows import STANDARD, FileFormat, TensorSlot, VocabularyRow
from kha_megatron.conversion.table import locate, tensor_slots
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.errors import CheckpointError, ConfigError

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embedding.word_embeddings.weight"
_MAX_ELEMENTS = 2**56
_PADDING = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
"""Megatron pads a vocabulary to a multiple of the product of these arguments."""
_RECOMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers of old transformers checkpoints that follow from the configuration."""


class Read(Protocol):
    """Read the Hugging Face tensors of a slot in the order of its names. This is thread-safe.

    With ``meta``, return meta tensors of the same shapes and dtypes. Raises CheckpointError if a
    file is damaged.
    """

    def __call__(self, slot: TensorSlot, *, meta: bool = False) -> list[Tensor]: ...


@dataclass(frozen=True)
class ModelSource:
    """A model's tensors, slot by slot."""

    checkpoint: HFCheckpoint | MegatronCheckpoint
    model: Architecture
    read: Read
    files: FileFormat = STANDARD
    """How the files of a Hugging Face directory differ from the table."""
    tokenizer: TokenizerFiles = field(default_factory=lambda: TokenizerFiles({}))
    padding_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that explain the padding of a Megatron vocabulary, if it was kept."""

    @property
    def path(self) -> Path:
        """The directory."""
        return self.checkpoint.path

    def entries(self) -> Iterator[tuple[TensorSlot, list[TensorEntry]]]:
        """Yield every slot with the names, dtypes and shapes of its tensors, in model order."""
        for slot in tensor_slots(self.model):
            named = zip(slot.hf_names(self.model), self.read(slot, meta=True), strict=True)
            yield slot, [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in named]


def open_source(
    path: Path, *, tokenizer: Path | None = None, padded: bool = False, comparing: bool = False
) -> ModelSource:
    """Open a Hugging Face directory (it has a ``config.json``) or a Megatron checkpoint.

    Args:
        path: The directory. For Megatron, the ``--save`` directory or one iteration in it.
        tokenizer: A tokenizer directory that replaces the model's own.
        padded: Keep the padding of a Megatron vocabulary.
        comparing: Ignore the tokenizer, and keep the padding.

    Raises:
        CheckpointError: The checkpoint is damaged or does not fit its configuration or tokenizer.
        ConfigError: The tokenizer cannot be loaded.
    """
    source = _open_hf(path) if is_hf_folder(path) else _open_megatron(path)
    if comparing:
        return source
    files = TokenizerFiles.open(source.checkpoint, tokenizer)
    source = replace(source, tokenizer=files)
    rows, entries = source.model.padded_vocab_size, len(files.loaded or ())
    if entries > rows:
        raise CheckpointError(
            f"The tokenizer {files.origin} has {entries} entries, but the embedding has {rows} "
            "rows. Pass the tokenizer of this model with --tokenizer."
        )
    if isinstance(source.checkpoint, HFCheckpoint):
        return source
    args = source.checkpoint.args
    if padded:
        kept = {name: args.get(name) for name in ("vocab_size", *_PADDING)}
        return replace(source, padding_arguments=kept)
    multiple = math.prod(args.get(name) or 1 for name in _PADDING)
    # the argument comes first, because a tokenizer may have fewer entries than its model
    for size in (args.get("vocab_size"), entries):
        if size and entries <= size <= rows < size + multiple:
            return truncate_vocabulary(source, size)
    return source  # padding does not explain the number of rows


def _open_hf(path: Path) -> ModelSource:
    checkpoint = HFCheckpoint.open(path)
    formats, model = family_of(checkpoint.config).files, from_hf_config(checkpoint.config)
    infos = {k: i for k, i in checkpoint.keys().items() if not k.endswith(_RECOMPUTED)}
    wanted: dict[str, tuple[int, ...]] = {}
    # a configuration with a huge number of layers fails on a missing tensor, not on memory
    for slot in islice(tensor_slots(model), 2 * len(infos) + 1000):
        shape, names = slot.row.shape(model), formats.names(slot, model)
        if min(shape) < 0 or math.prod(shape) > _MAX_ELEMENTS:
            raise CheckpointError(f"{CONFIG} gives {names[0]} an impossible shape {shape}.")
        parts = slot.row.split(torch.empty(shape, device="meta"), model)
        parts = formats.write(slot, model, parts)
        wanted |= {n: tuple(part.shape) for n, part in zip(names, parts, strict=True)}
    # models without shared experts may have tensors of width 0 for them
    spare = {n for n, info in infos.items() if ".shared_experts." in n and 0 in info.shape}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if model.tied_embeddings and {head, embedding} <= infos.keys():
        if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
            raise CheckpointError(
                f"{path}: {CONFIG} has tie_word_embeddings=True, but {head} differs from "
                f"{embedding}."
            )
        spare.add(head)
    missing, unexpected = wanted.keys() - infos.keys(), infos.keys() - wanted.keys() - spare
    if problem := _mismatch(CONFIG, infos, wanted, missing, unexpected):
        raise CheckpointError(f"{path} {problem}")

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        names = formats.names(slot, model)
        if not meta:
            return formats.read(slot, model, [checkpoint.tensor(name) for name in names])
        held = [torch.empty(infos[n].shape, dtype=infos[n].dtype, device="meta") for n in names]
        return formats.read(slot, model, held)

    return ModelSource(checkpoint, model, read, formats)


def _open_megatron(path: Path) -> ModelSource:
    checkpoint = MegatronCheckpoint.open(path)
    args, infos = checkpoint.args, checkpoint.keys()
    if EMBEDDING not in infos:
        raise CheckpointError(f"{path} has no tensor {EMBEDDING}. Expected a GPT model.")
    rows = infos[EMBEDDING].shape[0]
    model = from_arguments(args, KHAConfig.from_entries(args) or KHAConfig(), rows)
    stored, unexpected, missing = locate(infos, model)
    wanted = {
        key: (
            *infos[key].shape[: len(index) - (slot.expert is not None)],
            *(() if slot.expert is None else (model.num_experts,)),
            *slot.row.shape(model),
        )
        for slot, (key, index) in stored.items()
    }
    if problem := _mismatch("training arguments", infos, wanted, missing, unexpected):
        raise CheckpointError(f"{path} {problem}")

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        key, index = stored[slot]
        if meta:
            shape, dtype = slot.row.shape(model), infos[key].dtype
            return slot.row.split(torch.empty(shape, dtype=dtype, device="meta"), model)
        return slot.row.split(checkpoint.tensor(key, index), model)

    return ModelSource(checkpoint, model, read)


def truncate_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Return a source with the first ``rows`` entries of the vocabulary."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        return [part[:rows] for part in parts] if isinstance(slot.row, VocabularyRow) else parts

    return replace(source, model=replace(source.model, vocab_size=rows), read=read)


def _mismatch(
    caller: str,
    infos: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> str | None:
    """Return how the tensors of a checkpoint differ from those that ``caller`` requires."""
    for names, problem in (
        (missing, "lacks {} tensors"),
        (unexpected, "has {} other tensors than"),
    ):
        if listed := sorted(names):
            return f"{problem.format(len(listed))} its {caller} requires: {', '.join(listed[:5])}"
    for name, shape in wanted.items():
        if infos[name].shape != shape:
            return f"has {name} of shape {infos[name].shape}, but its {caller} requires {shape}."
        if infos[name].dtype not in FLOAT_DTYPES.values():
            return (
                f"has {name} in {infos[name].dtype}. Expected one of {', '.join(FLOAT_DTYPES)}. A "
                "quantized model cannot be converted."
            )
    return None


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name, None for None.

    Raises:
        ConfigError: The name is unknown.
    """
    if name is not None and name not in FLOAT_DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}. Choose one of {', '.join(FLOAT_DTYPES)}.")
    return None if name is None else FLOAT_DTYPES[name]
