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
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import check_room, staged_folder
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.checkpoint.tracker import RELEASE, TRACKER, newest
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.megatron_keys import is_stacked, stack_of, written_key
from kha_megatron.conversion.sources import FLOAT_DTYPES, ModelSource, open_source
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.tensor_names import ATTENTION_OUTPUT, EMBEDDING, tensor_slots
from kha_megatron.conversion.transforms import cast
from kha_megatron.conversion.upcycling import upcycle_heads
from kha_megatron.errors import CheckpointError, OutputError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.megatron import STOCK_SCALING, command_line, to_arguments

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
        self,
        target: Path,
        *,
        workers: int | None = None,
        on_bytes: OnBytes = lambda count: None,
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
                real_target = os.path.realpath(target)
                args["tokenizer_type"] = "HuggingFaceTokenizer"
                args["tokenizer_model"] = os.path.join(real_target, _TOKENIZER)
            release = folder / RELEASE
            release.mkdir()
            with TorchDistWriter(release) as writer:

                def put(slot: TensorSlot, hf_tensors: list[Tensor]) -> None:
                    _write_slot(writer, source.model, slot, hf_tensors)

                not_finite = transfer(source, put, workers=workers, on_bytes=on_bytes)
                _write_extra_states(writer, source.model)
                common_state = {
                    "args": Namespace(**args),
                    "iteration": 0,
                    "checkpoint_version": 3.0,
                }
                writer.close(common_state, source.checkpoint.identity())
            (folder / TRACKER).write_text(RELEASE)
            shards = list(release.glob("*.distcp"))
        return self.summarize(
            target,
            architecture="megatron",
            shards=len(shards),
            not_finite=not_finite,
            arguments=command_line(args, str(target)),
        )


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

    Args:
        divisible_by: Pad the vocab to a multiple of ``divisible_by * tensor_parallel``. We keep the
            padding of Megatron checkpoints.
        tensor_parallel: TP size for the padding. You can still load the result with another one.
        gpt_model: Write a checkpoint for GPTModel instead of HybridModel.

    The other arguments are those of ``to_hf.plan_export``.
    """
    source = open_source(path, tokenizer=tokenizer)
    rows = source.model.vocabulary  # includes the padding of Megatron checkpoints
    if not source.padding_arguments:
        multiple = divisible_by * tensor_parallel
        rows = math.ceil(rows / multiple) * multiple
    model = replace(source.model, gpt_model=gpt_model, padded_vocab_size=rows)
    source = replace(source, model=model)
    if upcycle is not None:
        source = upcycle_heads(source, upcycle)
    if dtype is not None:
        source = cast(source, FLOAT_DTYPES[dtype], allow_overflow=allow_overflow)
    (embedding,) = source.read(TensorSlot(EMBEDDING), meta=True)
    args = to_arguments(source.model)
    args |= {
        "params_dtype": embedding.dtype,
        "bf16": embedding.dtype == torch.bfloat16,
        "fp16": embedding.dtype == torch.float16,
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
    args |= source.padding_arguments
    return MegatronPlan(source=source, args=args)


def _check_dtypes(source: ModelSource) -> None:
    """Raise CheckpointError if tensors that Megatron stores as one have different dtypes."""
    stored_together: dict[Any, list[TensorEntry]] = defaultdict(list)
    counts_in_model: Counter[torch.dtype] = Counter()
    for slot, entries in source.entries():
        layer = None if is_stacked(slot, source.model) else slot.layer
        stored_together[slot.mapping, layer] += entries
        counts_in_model.update(entry.dtype for entry in entries)
    for entries in stored_together.values():
        most_common = _most_common_dtype(entries, counts_in_model)
        for entry in entries:
            if entry.dtype != most_common:
                raise CheckpointError(
                    f"{entry.name} in {source.path} has dtype {entry.dtype}, but the tensors that "
                    f"Megatron stores together with it have {most_common}. Use --dtype to convert "
                    "all tensors to the same dtype."
                )


def _most_common_dtype(
    entries: list[TensorEntry],
    counts_in_model: Counter[torch.dtype],
) -> torch.dtype:
    """Return the most common dtype of some tensors. The rest of the model decides a draw."""
    counts = Counter(entry.dtype for entry in entries)

    def frequency(dtype: torch.dtype) -> tuple[int, int]:
        return counts[dtype], counts_in_model[dtype]

    return max(counts, key=frequency)


def _write_slot(
    writer: TorchDistWriter,
    model: ModelConfig,
    slot: TensorSlot,
    hf_tensors: list[Tensor],
) -> None:
    """Write a slot to its (possibly stacked) Megatron tensor."""
    mapping = slot.mapping
    stack = stack_of(slot, model)
    shape = (*stack.shape, *mapping.shape(model))
    names = mapping.megatron_names if mapping.write_aliases else [mapping.megatron]
    for name in names:
        key = written_key(name, slot, model)
        first_row = 0
        for block in mapping.join(hf_tensors, model):
            rows, *other_dims = block.shape
            offsets = (*stack.index, first_row, *[0] * len(other_dims))
            ones = [1] * len(stack.shape)
            stacked_block = block.reshape(*ones, *block.shape)
            writer.write(key, stacked_block, shape=shape, offsets=offsets)
            first_row += rows


def _write_extra_states(writer: TorchDistWriter, model: ModelConfig) -> None:
    """Write the ``_extra_state`` that Megatron requires for linear layers, norms and attention."""
    written = set()
    if not model.gpt_model:
        writer.write_object(
            "output_layer._extra_state",
            None,
            shape=(1,),
            offsets=(0,),
        )
    for slot in tensor_slots(model):
        stack = stack_of(slot, model)
        for module in _modules_with_state(slot):
            key = written_key(f"{module}._extra_state", slot, model)
            if (key, stack.index) in written:
                continue
            written.add((key, stack.index))
            writer.write_object(
                key,
                None,
                shape=stack.shape or (1,),
                offsets=stack.index or (0,),
            )


def _modules_with_state(slot: TensorSlot) -> list[str]:
    """Return the linear layers and norms of a slot.

    The slot of the output projection also includes the core attention, which has no tensors.
    """
    modules = []
    for name in slot.mapping.megatron_names:
        module, _, _ = name.rpartition(".")  # e.g. mlp.linear_fc1.weight -> mlp.linear_fc1
        _, _, module_name = module.rpartition(".")
        is_linear = module_name.startswith("linear_") or module == "eh_proj"
        if is_linear or "norm" in module_name:
            modules.append(module)
    if slot.mapping is ATTENTION_OUTPUT:
        modules.append("self_attention.core_attention")
    return modules
