"""Import checkpoints into Megatron's ``torch_dist`` format.

The result is a ``release`` checkpoint: training starts at iteration 0, and there's no optimizer or
RNG state. You can load it with any parallel layout.
"""

import math
import os
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.megatron import LAYERS
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import check_room, staged_folder
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.checkpoint.tracker import RELEASE, TRACKER, newest
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.megatron_arguments import STOCK_SCALING, command_line, to_arguments
from kha_megatron.conversion.rows import TensorSlot
from kha_megatron.conversion.sources import FLOAT_DTYPES, ModelSource, open_source
from kha_megatron.conversion.table import MODEL, megatron_name, tensor_slots
from kha_megatron.conversion.transforms import cast, upcycle_heads
from kha_megatron.errors import CheckpointError, OutputError
from kha_megatron.model.model_config import ModelConfig

_CORE_ATTENTION = "self_attention.core_attention"
_TOKENIZER = "tokenizer"
"""Subdirectory for the tokenizer."""


@dataclass(frozen=True)
class MegatronPlan(Plan):
    """See :func:`plan_import`."""

    args: dict[str, Any]
    """Will be stored in the checkpoint."""

    marker = TRACKER
    patterns = TRACKER, RELEASE, _TOKENIZER

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        super().check_target(target, overwrite=overwrite)
        if (last := newest(target)) and last.name != RELEASE:
            raise OutputError(
                f"{target} contains checkpoints of a training run ({last.name}), which are never "
                "overwritten. Please choose another directory."
            )

    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        source, args = self.source, dict(self.args)
        _check_dtypes(source)
        if args.get("use_rope_scaling") and source.model.scaling != STOCK_SCALING:
            announce(
                "Please train this model with `python -m kha_megatron.training`, because "
                f"Megatron's own scripts always use {STOCK_SCALING}."
            )
        with staged_folder(target) as folder:
            check_room(folder, self.size)
            if source.tokenizer.write_tokenizer(folder / _TOKENIZER):
                args["tokenizer_type"] = "HuggingFaceTokenizer"
                args["tokenizer_model"] = os.path.join(os.path.realpath(target), _TOKENIZER)
            release = folder / RELEASE
            release.mkdir()
            with TorchDistWriter(release) as writer:

                def put(slot: TensorSlot, parts: list[Tensor]) -> None:
                    _write_slot(writer, source.model, slot, parts)

                not_finite = transfer(source, put, workers=workers, on_bytes=on_bytes)
                _write_extra_states(writer, source.model)
                common = {"args": Namespace(**args), "iteration": 0, "checkpoint_version": 3.0}
                writer.close(common, source.checkpoint.identity())
            (folder / TRACKER).write_text(RELEASE)
            shards = len(list(release.glob("*.distcp")))
        return self.summarize(
            target, "megatron", shards, not_finite, *command_line(args, str(target))
        )


def plan_import(
    path: Path,
    *,
    dtype: str | None = None,
    allow_overflow: bool = False,
    tokenizer: Path | None = None,
    upcycle: KHAConfig | None = None,
    divisible_by: int = ModelConfig.make_vocab_size_divisible_by,
    tensor_parallel: int = 1,
    gpt_model: bool = False,
) -> MegatronPlan:
    """Open a checkpoint and prepare to import it.

    We pad the vocab to a multiple of ``divisible_by * tensor_parallel`` (or keep the existing
    padding of Megatron checkpoints). Note that you can still load the result with a different TP
    size. ``gpt_model`` writes a checkpoint for GPTModel instead of HybridModel. The other arguments
    are the same as in ``to_hf.plan_export``.
    """
    source = open_source(path, tokenizer=tokenizer)
    multiple = 1 if source.padding_arguments else divisible_by * tensor_parallel
    rows = math.ceil(source.model.vocab_size / multiple) * multiple
    model = replace(source.model, gpt_model=gpt_model, padded_vocab_size=rows)
    source = replace(source, model=model)
    if upcycle is not None:
        source = upcycle_heads(source, upcycle)
    if dtype is not None:
        source = cast(source, FLOAT_DTYPES[dtype], allow_overflow=allow_overflow)
    first = source.read(TensorSlot(MODEL[0]), meta=True)[0].dtype
    args = to_arguments(source.model) | {
        "params_dtype": first,
        "bf16": first == torch.bfloat16,
        "fp16": first == torch.float16,
        "make_vocab_size_divisible_by": divisible_by,
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "data_parallel_random_init": False,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return MegatronPlan(source, args | dict(source.padding_arguments))


def _check_dtypes(source: ModelSource) -> None:
    """Raise CheckpointError if tensors that Megatron stores as one have different dtypes."""
    stored_together = defaultdict[Any, list[TensorEntry]](list)
    for slot, entries in source.entries():
        layer = None if _is_stacked(source.model, slot) else slot.layer
        stored_together[slot.row, layer] += entries
    in_model = Counter(e.dtype for entries in stored_together.values() for e in entries)
    for entries in stored_together.values():
        dtypes = Counter(entry.dtype for entry in entries)
        usual = max(dtypes, key=lambda dtype: (dtypes[dtype], in_model[dtype]))
        for entry in entries:
            if entry.dtype != usual:
                raise CheckpointError(
                    f"{entry.name} in {source.path} has dtype {entry.dtype}, but the tensors that "
                    f"Megatron stores together with it have {usual}. Use --dtype to convert all "
                    "tensors to the same dtype."
                )


def _write_slot(
    writer: TorchDistWriter, model: Architecture, slot: TensorSlot, parts: list[Tensor]
) -> None:
    """Write a slot to its (possibly stacked) Megatron tensor."""
    row = slot.row
    grid, position = _stack(model, slot)
    whole = (*grid, *row.shape(model))
    for name in row.names if row.both else row.names[:1]:
        start, key = 0, _key(model, slot, name)
        for block in row.join(parts, model):
            offsets = (*position, start, *(0 for _ in block.shape[1:]))
            chunk = block[(None,) * len(grid)]
            writer.write(key, chunk, shape=whole, offsets=offsets)
            start += block.shape[0]


def _write_extra_states(writer: TorchDistWriter, model: Architecture) -> None:
    """Megatron requires an ``_extra_state`` for each linear layer, norm and core attention."""
    written = set()
    if not model.gpt_model:
        writer.write_object("output_layer._extra_state", None, shape=(1,), offsets=(0,))
    for slot in tensor_slots(model):
        grid, position = _stack(model, slot)
        modules = [name.rpartition(".")[0] for name in slot.row.names]
        if slot.layer is not None:
            modules.append(_CORE_ATTENTION)
        for module in modules:
            name = module.rpartition(".")[2]
            is_linear = name.startswith("linear_") or module == "eh_proj"
            has_state = is_linear or "norm" in name or module == _CORE_ATTENTION
            key = _key(model, slot, f"{module}._extra_state")
            if has_state and (key, position) not in written:
                written.add((key, position))
                writer.write_object(key, None, shape=grid or (1,), offsets=position or (0,))


def _is_stacked(model: Architecture, slot: TensorSlot) -> bool:
    in_decoder = slot.layer is not None and slot.layer < model.num_layers
    return in_decoder and model.gpt_model and model.is_uniform


def _key(model: Architecture, slot: TensorSlot, name: str) -> str:
    return LAYERS + name if _is_stacked(model, slot) else megatron_name(name, slot.layer, model)


def _stack(model: Architecture, slot: TensorSlot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``(stacked dims, index into the stacked dims)``."""
    grid, position = tuple[int, ...](), tuple[int, ...]()
    if slot.layer is not None and _is_stacked(model, slot):
        grid, position = (model.num_layers,), (slot.layer,)
    if slot.expert is not None:
        grid, position = (*grid, model.num_experts), (*position, slot.expert)
    return grid, position
