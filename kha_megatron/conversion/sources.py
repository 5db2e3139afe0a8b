"""Common interface for reading Megatron and Hugging Face checkpoints.

All tensor shapes are checked against the config when a checkpoint is opened.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.fused_experts import SplitExperts
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments
from kha_megatron.conversion.rows import EMBEDDING as HF_EMBEDDING
from kha_megatron.conversion.rows import LM_HEAD, STANDARD, FileFormat, TensorSlot
from kha_megatron.conversion.table import EH_PROJ, MODEL, locate_tensors, tensor_slots
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.errors import CheckpointError

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
            named = zip(slot.hf_names(self.model), self.read(slot, meta=True), strict=True)
            yield slot, [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in named]


def open_source(
    path: Path, *, tokenizer: Path | None = None, comparing: bool = False
) -> ModelSource:
    """Open a Hugging Face model or a Megatron checkpoint.

    Args:
        path: HF model directory, ``--save`` directory, or a single iteration.
        tokenizer: Use this tokenizer instead of the model's own.
        comparing: Don't load a tokenizer.
    """
    source = _open_hf(path) if is_hf_folder(path) else _open_megatron(path)
    if comparing:
        return source
    files = TokenizerFiles.open(source.checkpoint, tokenizer)
    rows, entries = source.model.padded_vocab_size, len(files.loaded or ())
    if entries > rows:
        raise CheckpointError(
            f"The tokenizer {files.origin} has a vocabulary size of {entries}, but the embedding "
            f"has only {rows} rows. Please pass the model's tokenizer with --tokenizer."
        )
    return replace(source, tokenizer=files)


def _open_hf(path: Path) -> ModelSource:
    checkpoint = HFCheckpoint.open(path)
    formats, model = family_of(checkpoint.config).files, from_hf_config(checkpoint.config)
    tensors = SplitExperts(checkpoint)
    infos = {k: i for k, i in tensors.entries.items() if not k.endswith(_RECOMPUTED)}
    # config.json often has a number of MTP layers even if the model was saved without them
    projections = (TensorSlot(EH_PROJ, model.num_layers + n) for n in range(formats.predictions))
    found = takewhile(lambda slot: formats.names(slot, model)[0] in infos, projections)
    model = replace(model, mtp_num_layers=len(list(found)) or None)
    wanted: dict[str, tuple[int, ...]] = {}
    # the limit keeps us from running out of memory if the config is corrupted
    for slot in islice(tensor_slots(model), 2 * len(infos) + 1000):
        shape, names = slot.row.shape(model), formats.names(slot, model)
        if min(shape) < 0 or math.prod(shape) > _MAX_ELEMENTS:
            raise CheckpointError(f"{CONFIG} leads to an invalid shape {shape} for {names[0]}.")
        parts = slot.row.split(torch.empty(shape, device="meta"), model)
        parts = formats.write(slot, model, parts)
        wanted |= {n: tuple(part.shape) for n, part in zip(names, parts, strict=True)}
    # models without shared experts may still have empty tensors for them
    spare = {n for n, info in infos.items() if ".shared_experts." in n and 0 in info.shape}
    copies = dict.fromkeys([LM_HEAD] * model.tied_embeddings, HF_EMBEDDING)
    for slot in (TensorSlot(row) for row in MODEL if row.when(model, 0)):
        copies |= dict.fromkeys(formats.copies(slot, model), slot.hf_names(model)[0])
    for copy, original in copies.items():
        if not {copy, original} <= infos.keys():
            continue
        if not torch.equal(tensors.tensor(copy), tensors.tensor(original)):
            raise CheckpointError(
                f"{copy} differs from {original} in {path}, but Megatron shares them in this model."
            )
        spare.add(copy)
    missing, unexpected = wanted.keys() - infos.keys(), infos.keys() - wanted.keys() - spare
    _check_tensors(path, CONFIG, infos, wanted, missing, unexpected)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        names = formats.names(slot, model)
        if not meta:
            return formats.read(slot, model, [tensors.tensor(name) for name in names])
        held = [torch.empty(infos[n].shape, dtype=infos[n].dtype, device="meta") for n in names]
        return formats.read(slot, model, held)

    return ModelSource(checkpoint, model, read, formats)


def _open_megatron(path: Path) -> ModelSource:
    checkpoint = MegatronCheckpoint.open(path)
    args, infos = checkpoint.args, checkpoint.keys()
    if EMBEDDING not in infos:
        raise CheckpointError(f"Tensor {EMBEDDING} not found in {path}. Is this a GPT checkpoint?")
    rows = infos[EMBEDDING].shape[0]
    model = from_arguments(args, KHAConfig.from_entries(args) or KHAConfig(), rows)
    stored, unexpected, missing = locate_tensors(infos, model)
    wanted = {
        key: (
            *infos[key].shape[: len(index) - (slot.expert is not None)],
            *(() if slot.expert is None else (model.num_experts,)),
            *slot.row.shape(model),
        )
        for slot, (key, index) in stored.items()
    }
    _check_tensors(path, "training arguments", infos, wanted, missing, unexpected)

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
    wanted: Mapping[str, tuple[int, ...]],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """Raise CheckpointError if the stored tensors aren't what we'd expect from the config."""
    missing, unexpected = sorted(missing), sorted(unexpected)
    wrong = []
    for name, info in infos.items():
        if info.shape != wanted.get(name, info.shape):
            wrong.append(f"{name} has shape {info.shape} instead of {wanted[name]}")
        if name in wanted and info.dtype not in FLOAT_DTYPES.values():
            wrong.append(f"{name} has unsupported dtype {info.dtype} (quantized model?)")
    if count := len(missing) + len(unexpected) + len(wrong):
        kinds = [_examples("missing", missing), _examples("unexpected", unexpected)]
        problems = "; ".join(filter(None, [*kinds, _examples("", wrong)]))
        raise CheckpointError(f"{path} does not match its {config} ({count} tensors): {problems}.")


def _examples(kind: str, problems: Sequence[str]) -> str:
    """List the first problems of a kind, e.g. ``missing a, b, c and 4 more``."""
    listed = ", ".join(problems[:_EXAMPLES])
    rest = len(problems) - _EXAMPLES
    if rest > 0:
        listed += f" and {rest} more"
    return f"{kind} {listed}".strip() if problems else ""
