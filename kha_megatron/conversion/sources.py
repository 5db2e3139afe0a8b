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
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.fused_experts import SplitExperts
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.rows import EMBEDDING as HF_EMBEDDING
from kha_megatron.conversion.rows import LM_HEAD, STANDARD, FileFormat, TensorSlot
from kha_megatron.conversion.table import EH_PROJ, MODEL, locate_tensors, tensor_slots
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.errors import CheckpointError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.megatron import model_from_checkpoint

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embedding.word_embeddings.weight"
_MAX_ELEMENTS = 2**56
PADDING = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
"""Megatron pads the vocab to a multiple of the product of these arguments."""
_EXAMPLES = 3
"""Number of tensors that an error message names for each kind of problem."""
_RECOMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers saved by old versions of transformers. We ignore them."""


class Read(Protocol):
    """Read the HF tensors of a slot (thread-safe).

    With ``meta=True``, you get meta tensors with the same shapes and dtypes instead.
    """

    def __call__(self, slot: TensorSlot, *, meta: bool = False) -> list[Tensor]: ...


@dataclass(frozen=True)
class ModelSource:
    """An open checkpoint. Tensors are read lazily, one slot at a time."""

    checkpoint: HFCheckpoint | MegatronCheckpoint
    model: Architecture
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
            tensors = self.read(slot, meta=True)
            for name, tensor in zip(slot.hf_names(self.model), tensors, strict=True):
                entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape)))
            yield slot, entries


def open_source(
    path: Path, *, tokenizer: Path | None = None, comparing: bool = False
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
    files = TokenizerFiles.open(source.checkpoint, tokenizer)
    rows = source.model.padded_vocab_size
    entries = len(files.loaded or ())
    if entries > rows:
        raise CheckpointError(
            f"The tokenizer {files.origin} has a vocabulary size of {entries}, but the embedding "
            f"has only {rows} rows. Please pass the model's tokenizer with --tokenizer."
        )
    return replace(source, tokenizer=files)


def _open_hf(path: Path) -> ModelSource:
    checkpoint = HFCheckpoint.open(path)
    formats = family_of(checkpoint.config).files
    tensors = SplitExperts(checkpoint)
    infos = {}
    for name, info in tensors.entries.items():
        if not name.endswith(_RECOMPUTED):
            infos[name] = info
    model = from_hf_config(checkpoint.config)
    # config.json often has a number of MTP layers even if the model was saved without them
    model = replace(model, mtp_num_layers=_count_predictions(model, formats, infos) or None)
    expected = _expected_shapes(model, formats, limit=2 * len(infos) + 1000)
    copies = _find_copies(model, formats, infos)
    for copy, original in copies.items():
        if not torch.equal(tensors.tensor(copy), tensors.tensor(original)):
            raise CheckpointError(
                f"{copy} differs from {original} in {path}, but Megatron shares them in this model."
            )
    missing = expected.keys() - infos.keys()
    unexpected = infos.keys() - expected.keys() - copies.keys() - _unused_experts(infos)
    _check_tensors(path, CONFIG, infos, expected, missing, unexpected)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        stored = []
        for name in formats.names(slot, model):
            if meta:
                info = infos[name]
                stored.append(torch.empty(info.shape, dtype=info.dtype, device="meta"))
            else:
                stored.append(tensors.tensor(name))
        return formats.read(slot, model, stored)

    return ModelSource(checkpoint, model, read, formats)


def _count_predictions(
    model: Architecture, formats: FileFormat, infos: Mapping[str, TensorEntry]
) -> int:
    """Count the MTP layers that the files contain."""
    count = 0
    while count < formats.predictions:
        projection = TensorSlot(EH_PROJ, model.num_layers + count)
        if formats.names(projection, model)[0] not in infos:
            break
        count += 1
    return count


def _expected_shapes(
    model: Architecture, formats: FileFormat, limit: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the files of a model by name.

    At most ``limit`` slots are included. This keeps us from running out of memory if the config is
    corrupted.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in islice(tensor_slots(model), limit):
        names = formats.names(slot, model)
        shape = slot.row.shape(model)
        if min(shape) < 0 or math.prod(shape) > _MAX_ELEMENTS:
            raise CheckpointError(f"{CONFIG} leads to an invalid shape {shape} for {names[0]}.")
        tensors = slot.row.split(torch.empty(shape, device="meta"), model)
        for name, tensor in zip(names, formats.write(slot, model, tensors), strict=True):
            shapes[name] = tuple(tensor.shape)
    return shapes


def _find_copies(
    model: Architecture, formats: FileFormat, infos: Mapping[str, TensorEntry]
) -> dict[str, str]:
    """Map copies of the embedding and LM head to their originals, if the files contain both."""
    copies = {}
    if model.tied_embeddings:
        copies[LM_HEAD] = HF_EMBEDDING
    for row in MODEL:
        if row.when(model, 0):
            slot = TensorSlot(row)
            copies |= dict.fromkeys(formats.copies(slot, model), slot.hf_names(model)[0])
    present = {}
    for copy, original in copies.items():
        if copy in infos and original in infos:
            present[copy] = original
    return present


def _unused_experts(infos: Mapping[str, TensorEntry]) -> set[str]:
    """Return empty tensors, which models without shared experts may still have for them."""
    unused = set()
    for name, info in infos.items():
        if ".shared_experts." in name and 0 in info.shape:
            unused.add(name)
    return unused


def _open_megatron(path: Path) -> ModelSource:
    checkpoint = MegatronCheckpoint.open(path)
    args = checkpoint.args
    infos = checkpoint.keys()
    if EMBEDDING not in infos:
        raise CheckpointError(f"Tensor {EMBEDDING} not found in {path}. Is this a GPT checkpoint?")
    rows = infos[EMBEDDING].shape[0]
    model = model_from_checkpoint(args, HeadsConfig.from_entries(args) or HeadsConfig(), rows)
    stored, unexpected, missing = locate_tensors(infos, model)
    expected = {}
    for slot, (key, index) in stored.items():
        shape = slot.row.shape(model)
        stacked_dims = len(index)
        if slot.expert is not None:
            shape = (model.experts, *shape)
            stacked_dims -= 1
        expected[key] = (*infos[key].shape[:stacked_dims], *shape)
    _check_tensors(path, "training arguments", infos, expected, missing, unexpected)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        key, index = stored[slot]
        if meta:
            shape, dtype = slot.row.shape(model), infos[key].dtype
            return slot.row.split(torch.empty(shape, dtype=dtype, device="meta"), model)
        return slot.row.split(checkpoint.tensor(key, index), model)

    padding = {name: args.get(name) for name in ("vocab_size", *PADDING)}
    return ModelSource(checkpoint, model, read, padding_arguments=padding)


def _check_tensors(
    path: Path,
    config: str,
    infos: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """Raise CheckpointError if the stored tensors are not what we'd expect from the config."""
    missing = sorted(missing)
    unexpected = sorted(unexpected)
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
        problems.append(f"missing {_list_examples(missing)}")
    if unexpected:
        problems.append(f"unexpected {_list_examples(unexpected)}")
    if wrong:
        problems.append(_list_examples(wrong))
    listed = "; ".join(problems)
    raise CheckpointError(f"{path} does not match its {config} ({count} tensors): {listed}.")


def _list_examples(names: Sequence[str]) -> str:
    """List the first names, e.g. ``a, b, c and 4 more``."""
    listed = ", ".join(names[:_EXAMPLES])
    if len(names) > _EXAMPLES:
        listed += f" and {len(names) - _EXAMPLES} more"
    return listed
