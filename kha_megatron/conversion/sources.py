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
from kha_megatron.checkpoint.torch_dist import StoredTensor
from kha_megatron.conversion.file_format import STANDARD, FileFormat
from kha_megatron.conversion.fused_experts import SplitExperts
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_keys import TensorLocation, locate_tensors
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
"""Number of elements for which the size in bytes safely fits into an int64, as PyTorch requires."""
PADDING_ARGUMENTS = (
    "make_vocab_size_divisible_by",
    "tensor_model_parallel_size",
)
"""Megatron pads the vocab to a multiple of the product of these arguments."""
_MAX_EXAMPLES = 3
"""Number of tensors that an error message names for each kind of problem."""
_IGNORED_BUFFERS = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
)
"""Ends of the names of buffers that old versions of transformers saved. They are computed again."""
Entries = Mapping[str, TensorEntry]
"""Metadata of tensors by name."""


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
    """Config of the model that ``read`` returns tensors of, i.e. including all transforms."""
    read: Read
    file_format: FileFormat = STANDARD
    """Format of the files of ``checkpoint`` (Hugging Face only)."""
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
    with_tokenizer: bool = True,
) -> ModelSource:
    """Open a Hugging Face model or a Megatron checkpoint.

    Args:
        path: HF model directory, ``--save`` directory, or a single iteration.
        tokenizer: Use this tokenizer instead of the model's own.
        with_tokenizer: Set to False if only the tensors are needed, not the tokenizer.
    """
    source = _open_hf(path) if is_hf_folder(path) else _open_megatron(path)
    if not with_tokenizer:
        return source
    tokenizer_files = TokenizerFiles.open(source.checkpoint, tokenizer)
    embedding_rows = source.model.vocabulary_rows
    vocab_size = tokenizer_files.vocab_size
    if vocab_size is not None and vocab_size > embedding_rows:
        raise CheckpointError(
            f"The tokenizer {tokenizer_files.path} has a vocabulary size of {vocab_size}, but "
            f"the embedding has only {embedding_rows} rows. Please pass the model's tokenizer with "
            "--tokenizer."
        )
    return replace(source, tokenizer=tokenizer_files)


def _open_hf(path: Path) -> ModelSource:
    checkpoint = HFCheckpoint.open(path)
    file_format = family_of(checkpoint.config).file_format
    tensors = SplitExperts(checkpoint)
    entries = {}
    for name, entry in tensors.entries.items():
        if not name.endswith(_IGNORED_BUFFERS):
            entries[name] = entry
    model = from_hf_config(checkpoint.config)
    # config.json often has a number of MTP layers even if the model was saved without them
    predictions = _count_predictions(model, file_format, entries)
    model = replace(model, mtp_num_layers=predictions or None)
    expected_shapes = _expected_shapes(model, file_format, stored_tensors=len(entries))
    copies = _find_stored_copies(model, file_format, entries)
    _check_copies(path, tensors, copies)
    known_names = expected_shapes.keys() | copies.keys() | _find_empty_shared_experts(entries)
    _check_tensors(
        path,
        entries,
        expected_shapes,
        missing=expected_shapes.keys() - entries.keys(),
        unexpected=entries.keys() - known_names,
        config_name=CONFIG,
    )

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
    while file_format.supports_predictions(count + 1):
        projection = TensorSlot(PREDICTION_PROJECTION, model.layers + count)
        (name,) = file_format.names(projection, model)
        if name not in entries:
            break
        count += 1
    return count


def _expected_shapes(
    model: ModelConfig,
    file_format: FileFormat,
    *,
    stored_tensors: int,
) -> dict[str, Shape]:
    """Return the shapes of the tensors in the files of a model by name.

    Each slot has at least one tensor. If the config leads to many more slots than the number of
    stored tensors, it is corrupted, and we do not list all of them to avoid running out of memory.
    """
    max_slots = 2 * stored_tensors + 1000
    shapes: dict[str, Shape] = {}
    for slot in islice(tensor_slots(model), max_slots):
        names = file_format.names(slot, model)
        shape = slot.mapping.shape(model)
        is_negative = min(shape) < 0
        is_too_large = math.prod(shape) > _MAX_ELEMENTS
        if is_negative or is_too_large:
            raise CheckpointError(f"{CONFIG} leads to an invalid shape {shape} for {names[0]}.")
        hf_tensors = slot.mapping.split(_meta_tensor(shape), model)
        stored = file_format.write(slot, model, hf_tensors)
        for name, tensor in zip(names, stored, strict=True):
            shapes[name] = tuple(tensor.shape)
    return shapes


def _meta_tensor(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _find_stored_copies(
    model: ModelConfig,
    file_format: FileFormat,
    entries: Entries,
) -> dict[str, str]:
    """Map copies of the embedding and LM head to their originals, if the files contain both."""
    copies = file_format.copies(model)
    if model.tied_embeddings:
        copies[LM_HEAD.hf] = EMBEDDING.hf
    stored_copies = {}
    for copy, original in copies.items():
        if copy in entries and original in entries:
            stored_copies[copy] = original
    return stored_copies


def _check_copies(path: Path, tensors: SplitExperts, copies: Mapping[str, str]) -> None:
    """Raise CheckpointError if a copy is not equal to its original."""
    for copy, original in copies.items():
        stored_copy = tensors.tensor(copy)
        stored_original = tensors.tensor(original)
        if not torch.equal(stored_copy, stored_original):
            raise CheckpointError(
                f"{copy} differs from {original} in {path}, but Megatron shares them in this model."
            )


def _find_empty_shared_experts(entries: Entries) -> set[str]:
    """Return tensors without elements, which models without shared experts may have for them."""
    names = set()
    for name, entry in entries.items():
        if ".shared_experts." in name and 0 in entry.shape:
            names.add(name)
    return names


def _open_megatron(path: Path) -> ModelSource:
    checkpoint = MegatronCheckpoint.open(path)
    args = checkpoint.args
    entries = checkpoint.keys()
    embedding = EMBEDDING.megatron
    if embedding not in entries:
        raise CheckpointError(f"Tensor {embedding} not found in {path}. Is this a GPT checkpoint?")
    padded_vocab_size = entries[embedding].shape[0]
    heads = HeadsConfig.from_entries_or_empty(args)
    model = model_from_checkpoint(args, heads, padded_vocab_size)
    located = locate_tensors(entries, model)
    expected_shapes = {}
    for slot, location in located.locations.items():
        stored_shape = entries[location.key].shape
        expected_shapes[location.key] = _expected_stacked_shape(slot, location, stored_shape, model)
    _check_tensors(
        path,
        entries,
        expected_shapes,
        missing=located.missing,
        unexpected=located.unexpected,
        config_name="training arguments",
    )

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        location = located.locations[slot]
        if meta:
            shape = slot.mapping.shape(model)
            tensor = _meta_tensor(shape, entries[location.key].dtype)
        else:
            tensor = checkpoint.tensor(location.key, location.index)
        return slot.mapping.split(tensor, model)

    padding_arguments = {}
    for name in ("vocab_size", *PADDING_ARGUMENTS):
        padding_arguments[name] = args.get(name)
    return ModelSource(checkpoint, model, read, padding_arguments=padding_arguments)


def _expected_stacked_shape(
    slot: TensorSlot,
    location: TensorLocation,
    stored_shape: Shape,
    model: ModelConfig,
) -> Shape:
    """Return the shape of the Megatron tensor that contains a slot.

    If layers are stacked, their number is that of ``stored_shape``. Missing and additional layers
    are reported by name instead.
    """
    shape = slot.mapping.shape(model)
    layer_dims = len(location.index)
    if slot.expert is not None:
        shape = (model.experts, *shape)
        layer_dims -= 1
    return (*stored_shape[:layer_dims], *shape)


def _check_tensors(
    path: Path,
    entries: Mapping[str, TensorEntry | StoredTensor],
    expected_shapes: Mapping[str, Shape],
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    config_name: str,
) -> None:
    """Raise CheckpointError if the stored tensors are not what we'd expect from the config."""
    invalid = []
    for name, entry in entries.items():
        if name not in expected_shapes:
            continue
        expected_shape = expected_shapes[name]
        if entry.shape != expected_shape:
            invalid.append(f"{name} has shape {entry.shape} instead of {expected_shape}")
        if entry.dtype not in FLOAT_DTYPES.values():
            invalid.append(f"{name} has unsupported dtype {entry.dtype} (quantized model?)")
    missing_names = sorted(missing)
    unexpected_names = [show_value(name) for name in sorted(unexpected)]
    problems = []
    if missing_names:
        problems.append(f"missing {_list_examples(missing_names)}")
    if unexpected_names:
        problems.append(f"unexpected {_list_examples(unexpected_names)}")
    if invalid:
        problems.append(_list_examples(invalid))
    if problems:
        count = len(missing_names) + len(unexpected_names) + len(invalid)
        raise CheckpointError(
            f"{path} does not match its {config_name} ({count} tensors): {'; '.join(problems)}."
        )


def _list_examples(names: Sequence[str]) -> str:
    """List the first names, e.g. ``a, b, c and 4 more``."""
    listed = ", ".join(names[:_MAX_EXAMPLES])
    more = len(names) - _MAX_EXAMPLES
    if more > 0:
        listed += f" and {more} more"
    return listed
