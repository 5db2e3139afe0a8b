"""Common interface for reading Megatron and Hugging Face checkpoints.

All tensor shapes are checked against the config when a checkpoint is opened.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.conversion.file_format import STANDARD, FileFormat
from kha_megatron.conversion.fused_experts import SplitExperts
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_keys import locate_tensors
from kha_megatron.conversion.tensor_mappings import Shape, TensorSlot
from kha_megatron.conversion.tensor_names import (
    EMBEDDING,
    LM_HEAD,
    PREDICTION_PROJECTION,
    tensor_slots,
)
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.errors import CheckpointError, show_value
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.megatron import model_from_checkpoint

FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MAX_ELEMENTS = 2**56
PADDING = (
    "make_vocab_size_divisible_by",
    "tensor_model_parallel_size",
)
"""Megatron pads the vocab to a multiple of the product of these arguments."""
_EXAMPLES = 3
"""Number of tensors that an error message names for each kind of problem."""
_RECOMPUTED = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
)
"""Buffers saved by old versions of transformers. We ignore them."""
Entries = Mapping[str, TensorEntry]


class Read(Protocol):
    """Read the HF tensors of a slot (thread-safe).

    With ``meta=True``, you get meta tensors with the same shapes and dtypes instead.
    """

    def __call__(self, slot: TensorSlot, *, meta: bool = False) -> list[Tensor]: ...


@dataclass(frozen=True)
class ModelSource:
    """An open checkpoint. Tensors are read lazily, one slot at a time."""

    checkpoint: HFCheckpoint | MegatronCheckpoint
    model: ModelConfig
    read: Read
    files: FileFormat = STANDARD
    tokenizer: TokenizerFiles = field(default_factory=lambda: TokenizerFiles({}))
    padding_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's arguments for the vocab size and its padding."""

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    def entries(self) -> Iterator[tuple[TensorSlot, list[TensorEntry]]]:
        """Yield each slot with the metadata of its tensors."""
        for slot in tensor_slots(self.model):
            entries = []
            names = slot.hf_names(self.model)
            tensors = self.read(slot, meta=True)
            for name, tensor in zip(names, tensors, strict=True):
                shape = tuple(tensor.shape)
                entries.append(TensorEntry(name, tensor.dtype, shape))
            yield slot, entries


def open_source(
    path: Path,
    *,
    tokenizer: Path | None = None,
    comparing: bool = False,
) -> ModelSource:
    """Open a Hugging Face model or a Megatron checkpoint.

    Args:
        path: HF model directory, ``--save`` directory, or a single iteration.
        tokenizer: Use this tokenizer instead of the model's own.
        comparing: Do not load a tokenizer.
    """
    source = _open_hf(path) if is_hf_folder(path) else _open_megatron(path)
    if comparing:
        return source
    tokenizer_files = TokenizerFiles.open(source.checkpoint, tokenizer)
    rows = source.model.vocabulary_rows
    vocab_size = len(tokenizer_files.loaded or ())
    if vocab_size > rows:
        raise CheckpointError(
            f"The tokenizer {tokenizer_files.origin} has a vocabulary size of {vocab_size}, but "
            f"the embedding has only {rows} rows. Please pass the model's tokenizer with "
            "--tokenizer."
        )
    return replace(source, tokenizer=tokenizer_files)


def _open_hf(path: Path) -> ModelSource:
    checkpoint = HFCheckpoint.open(path)
    file_format = family_of(checkpoint.config).file_format
    tensors = SplitExperts(checkpoint)
    entries = {}
    for name, entry in tensors.entries.items():
        if not name.endswith(_RECOMPUTED):
            entries[name] = entry
    model = from_hf_config(checkpoint.config)
    # config.json often has a number of MTP layers even if the model was saved without them
    predictions = _count_predictions(model, file_format, entries)
    model = replace(model, mtp_num_layers=predictions or None)
    expected = _expected_shapes(model, file_format, limit=2 * len(entries) + 1000)
    copies = _find_copies(model, file_format, entries)
    for copy, original in copies.items():
        stored_copy = tensors.tensor(copy)
        stored_original = tensors.tensor(original)
        if not torch.equal(stored_copy, stored_original):
            raise CheckpointError(
                f"{copy} differs from {original} in {path}, but Megatron shares them in this model."
            )
    missing = expected.keys() - entries.keys()
    known = expected.keys() | copies.keys() | _unused_experts(entries)
    unexpected = entries.keys() - known
    _check_tensors(path, CONFIG, entries, expected, missing, unexpected)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        names = file_format.names(slot, model)
        if meta:
            stored = [_meta_tensor(entries[name].shape, entries[name].dtype) for name in names]
        else:
            stored = [tensors.tensor(name) for name in names]
        return file_format.read(slot, model, stored)

    return ModelSource(checkpoint, model, read, file_format)


def _count_predictions(
    model: ModelConfig,
    file_format: FileFormat,
    entries: Entries,
) -> int:
    """Count the MTP layers that the files contain."""
    count = 0
    while count < file_format.predictions:
        projection = TensorSlot(PREDICTION_PROJECTION, model.layers + count)
        (name,) = file_format.names(projection, model)
        if name not in entries:
            break
        count += 1
    return count


def _expected_shapes(
    model: ModelConfig,
    file_format: FileFormat,
    limit: int,
) -> dict[str, Shape]:
    """Return the shapes of the tensors in the files of a model by name.

    At most ``limit`` slots are included. This keeps us from running out of memory if the config is
    corrupted.
    """
    shapes: dict[str, Shape] = {}
    for slot in islice(tensor_slots(model), limit):
        names = file_format.names(slot, model)
        shape = slot.mapping.shape(model)
        is_too_large = math.prod(shape) > _MAX_ELEMENTS
        if min(shape) < 0 or is_too_large:
            raise CheckpointError(f"{CONFIG} leads to an invalid shape {shape} for {names[0]}.")
        parts = slot.mapping.split(_meta_tensor(shape), model)
        stored = file_format.write(slot, model, parts)
        for name, tensor in zip(names, stored, strict=True):
            shapes[name] = tuple(tensor.shape)
    return shapes


def _meta_tensor(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _find_copies(
    model: ModelConfig,
    file_format: FileFormat,
    entries: Entries,
) -> dict[str, str]:
    """Map copies of the embedding and LM head to their originals, if the files contain both."""
    copies = file_format.copies(model)
    if model.tied_embeddings:
        copies[LM_HEAD.hf] = EMBEDDING.hf
    present = {}
    for copy, original in copies.items():
        if copy in entries and original in entries:
            present[copy] = original
    return present


def _unused_experts(entries: Entries) -> set[str]:
    """Return empty tensors, which models without shared experts may still have for them."""
    unused = set()
    for name, entry in entries.items():
        if ".shared_experts." in name and 0 in entry.shape:
            unused.add(name)
    return unused


def _open_megatron(path: Path) -> ModelSource:
    checkpoint = MegatronCheckpoint.open(path)
    args = checkpoint.args
    entries = checkpoint.keys()
    embedding = EMBEDDING.megatron
    if embedding not in entries:
        raise CheckpointError(f"Tensor {embedding} not found in {path}. Is this a GPT checkpoint?")
    padded_vocab_size = entries[embedding].shape[0]
    heads = HeadsConfig.from_entries(args) or HeadsConfig()
    model = model_from_checkpoint(args, heads, padded_vocab_size)
    located = locate_tensors(entries, model)
    expected = {}
    for slot, location in located.slots.items():
        shape = slot.mapping.shape(model)
        stacked_dims = len(location.index)
        if slot.expert is not None:
            # the last stacked dimension has one entry per expert
            shape = (model.experts, *shape)
            stacked_dims -= 1
        # the others are layers and pipeline stages, which depend on how the model was trained
        layers_shape = entries[location.key].shape[:stacked_dims]
        expected[location.key] = (*layers_shape, *shape)
    _check_tensors(
        path, "training arguments", entries, expected, located.missing, located.unexpected
    )

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        location = located.slots[slot]
        if meta:
            shape = slot.mapping.shape(model)
            tensor = _meta_tensor(shape, entries[location.key].dtype)
        else:
            tensor = checkpoint.tensor(location.key, location.index)
        return slot.mapping.split(tensor, model)

    padding = {}
    for name in ("vocab_size", *PADDING):
        padding[name] = args.get(name)
    return ModelSource(checkpoint, model, read, padding_arguments=padding)


def _check_tensors(
    path: Path,
    config: str,
    infos: Mapping[str, Any],
    expected: Mapping[str, Shape],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """Raise CheckpointError if the stored tensors are not what we'd expect from the config."""
    missing = sorted(missing)
    unexpected = [show_value(name) for name in sorted(unexpected)]
    wrong = []
    for name, info in infos.items():
        if name not in expected:
            continue
        if info.shape != expected[name]:
            wrong.append(f"{name} has shape {info.shape} instead of {expected[name]}")
        if info.dtype not in FLOAT_DTYPES.values():
            wrong.append(f"{name} has unsupported dtype {info.dtype} (quantized model?)")
    count = len(missing) + len(unexpected) + len(wrong)
    if not count:
        return
    problems = []
    if missing:
        examples = _list_examples(missing)
        problems.append(f"missing {examples}")
    if unexpected:
        examples = _list_examples(unexpected)
        problems.append(f"unexpected {examples}")
    if wrong:
        problems.append(_list_examples(wrong))
    listed = "; ".join(problems)
    raise CheckpointError(f"{path} does not match its {config} ({count} tensors): {listed}.")


def _list_examples(names: Sequence[str]) -> str:
    """List the first names, e.g. ``a, b, c and 4 more``."""
    listed = ", ".join(names[:_EXAMPLES])
    more = len(names) - _EXAMPLES
    if more > 0:
        listed += f" and {more} more"
    return listed
