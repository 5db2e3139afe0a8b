"""Import checkpoints into Megatron's ``torch_dist`` format.

The result is a ``release`` checkpoint: training starts at iteration 0, and there is no optimizer or
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
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.rows import TensorSlot
from kha_megatron.conversion.sources import FLOAT_DTYPES, ModelSource, open_source
from kha_megatron.conversion.table import MODEL, megatron_name, tensor_slots
from kha_megatron.conversion.transforms import cast, upcycle_heads
from kha_megatron.errors import CheckpointError, OutputError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.megatron import STOCK_SCALING, command_line, to_arguments

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
        last = newest(target)
        if last is not None and last.name != RELEASE:
            raise OutputError(
                f"{target} contains checkpoints of a training run ({last.name}), which are never "
                "overwritten. Please choose another directory."
            )

    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        source = self.source
        args = dict(self.args)
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
        arguments = command_line(args, str(target))
        return self.summarize(target, "megatron", shards, not_finite, *arguments)


def plan_import(
    path: Path,
    *,
    dtype: str | None = None,
    allow_overflow: bool = False,
    tokenizer: Path | None = None,
    upcycle: HeadsConfig | None = None,
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
    first_tensor, *_ = source.read(TensorSlot(MODEL[0]), meta=True)
    params_dtype = first_tensor.dtype
    args = to_arguments(source.model) | {
        "params_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "fp16": params_dtype == torch.float16,
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
    counts_in_model: Counter[torch.dtype] = Counter()
    for entries in stored_together.values():
        counts_in_model.update(entry.dtype for entry in entries)
    for entries in stored_together.values():
        counts = Counter(entry.dtype for entry in entries)
        most_common = max(counts, key=lambda dtype: (counts[dtype], counts_in_model[dtype]))
        for entry in entries:
            if entry.dtype != most_common:
                raise CheckpointError(
                    f"{entry.name} in {source.path} has dtype {entry.dtype}, but the tensors that "
                    f"Megatron stores together with it have {most_common}. Use --dtype to convert "
                    "all tensors to the same dtype."
                )


def _write_slot(
    writer: TorchDistWriter, model: Architecture, slot: TensorSlot, parts: list[Tensor]
) -> None:
    """Write a slot to its (possibly stacked) Megatron tensor."""
    row = slot.row
    stack = _stack(model, slot)
    shape = (*stack.shape, *row.shape(model))
    names = row.names if row.both else row.names[:1]
    for name in names:
        key = _key(model, slot, name)
        start = 0
        for block in row.join(parts, model):
            rows, *other_dims = block.shape
            offsets = (*stack.index, start, *[0] * len(other_dims))
            chunk = block[(None,) * len(stack.shape)]
            writer.write(key, chunk, shape=shape, offsets=offsets)
            start += rows


def _write_extra_states(writer: TorchDistWriter, model: Architecture) -> None:
    """Megatron requires an ``_extra_state`` for each linear layer, norm and core attention."""
    written = set()
    if not model.gpt_model:
        writer.write_object("output_layer._extra_state", None, shape=(1,), offsets=(0,))
    for slot in tensor_slots(model):
        stack = _stack(model, slot)
        modules = [name.rpartition(".")[0] for name in slot.row.names]
        if slot.layer is not None:
            modules.append(_CORE_ATTENTION)
        for module in modules:
            name = module.rpartition(".")[2]
            is_linear = name.startswith("linear_") or module == "eh_proj"
            has_state = is_linear or "norm" in name or module == _CORE_ATTENTION
            key = _key(model, slot, f"{module}._extra_state")
            if has_state and (key, stack.index) not in written:
                written.add((key, stack.index))
                writer.write_object(
                    key,
                    None,
                    shape=stack.shape or (1,),
                    offsets=stack.index or (0,),
                )


def _is_stacked(model: Architecture, slot: TensorSlot) -> bool:
    in_decoder = slot.layer is not None and slot.layer < model.num_layers
    return in_decoder and model.gpt_model and model.is_uniform


def _key(model: Architecture, slot: TensorSlot, name: str) -> str:
    if _is_stacked(model, slot):
        return LAYERS + name
    return megatron_name(name, slot.layer, model)


@dataclass(frozen=True)
class _Stack:
    """Dimensions along which Megatron stacks the tensors of several layers or experts."""

    shape: tuple[int, ...]
    index: tuple[int, ...]
    """Position of a slot in the stack."""


def _stack(model: Architecture, slot: TensorSlot) -> _Stack:
    shape = []
    index = []
    if slot.layer is not None and _is_stacked(model, slot):
        shape.append(model.num_layers)
        index.append(slot.layer)
    if slot.expert is not None:
        shape.append(model.num_experts)
        index.append(slot.expert)
    return _Stack(tuple(shape), tuple(index))
