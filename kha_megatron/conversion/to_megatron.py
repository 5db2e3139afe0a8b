"""Any source to a ``torch_dist`` checkpoint that Megatron loads under any layout of ranks.

It is written as a *release*: Megatron then starts at iteration 0 and asks for neither optimizer nor
random states, with ``--load`` and with ``--pretrained-checkpoint``, without further flags. As an
``iter_0000000`` it would look for both, and count the run's iterations from the source's.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
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
from kha_megatron.conversion.engine import Conversion, OnBytes, Plan, transfer
from kha_megatron.conversion.megatron_arguments import STOCK_FACTOR, command_line, to_arguments
from kha_megatron.conversion.sources import Source, open_source, parse_dtype
from kha_megatron.conversion.table import Place, Row, places
from kha_megatron.conversion.transforms import Cast, Padded, Upcycled
from kha_megatron.errors import CheckpointError, ConfigError, OutputError
from kha_megatron.model.model import Model

_CORE_ATTENTION = "self_attention.core_attention"
_TOKENIZER = "tokenizer"
"""The folder of the tokenizer beside the release."""


@dataclass(frozen=True)
class MegatronPlan(Plan):
    """A model with the arguments that Megatron would have saved."""

    args: dict[str, Any]

    mark = TRACKER
    holds = TRACKER, RELEASE, _TOKENIZER

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        """See ``Plan``; the iterations of a training are never replaced."""
        super().check_target(target, overwrite=overwrite)
        if (last := newest(target)) and last.name != RELEASE:
            raise OutputError(
                f"{target} holds {last.name} of a training, which --overwrite would delete: name "
                "another folder"
            )

    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """``release/``, the tracker file that names it, and ``tokenizer/``; see ``Plan``."""
        source, args = self.source, dict(self.args)
        if (factor := args.get("rope_scaling_factor", STOCK_FACTOR)) != STOCK_FACTOR:
            announce(
                f"--rope-scaling-factor {factor:g} needs python -m kha_megatron.training: "
                f"Megatron's own scripts drop it and compute with {STOCK_FACTOR:g}"
            )
        with staged_folder(target) as folder:
            check_room(folder, self.size)
            if source.companions.write_tokenizer(folder / _TOKENIZER):
                args["tokenizer_type"] = "HuggingFaceTokenizer"
                args["tokenizer_model"] = str(target.resolve() / _TOKENIZER)
            release = folder / RELEASE
            release.mkdir()
            with TorchDistWriter(release) as writer:
                put = _Put(source, writer)
                wrong = transfer(source, put, workers=workers, on_bytes=on_bytes)
                put.extra_states()
                common = {"args": Namespace(**args), "iteration": 0, "checkpoint_version": 3.0}
                writer.close(common, source.identity())
            (folder / TRACKER).write_text(RELEASE)
            shards = len(list(release.glob("*.distcp")))
        return self.written(target, "megatron", shards, wrong, *command_line(args, str(target)))


def plan(
    path: Path,
    *,
    dtype: str | None = None,
    allow_overflow: bool = False,
    tokenizer: Path | None = None,
    upcycle: KHAConfig | None = None,
    divisible_by: int = Model.make_vocab_size_divisible_by,
    tensor_parallel: int = 1,
) -> MegatronPlan:
    """Open a checkpoint and decide what the Megatron checkpoint will hold.

    Args:
        path: a checkpoint of either side; the padding of a Megatron vocabulary is kept.
        dtype: a key of ``sources.DTYPES``; None keeps each tensor's own.
        allow_overflow: whether numbers that ``dtype`` cannot hold may become infinite.
        tokenizer: a tokenizer folder instead of the model's own.
        upcycle: what to knock of a model without knocking heads, from the identity: the logits stay
            the same bit for bit.
        divisible_by: the training's ``--make-vocab-size-divisible-by``.
        tensor_parallel: the training's tensor-parallel size: the padding of the vocabulary is a
            multiple of both. Megatron loads it with any other size as well.

    Raises:
        CheckpointError: the checkpoint is damaged, or Megatron cannot express it, or it has
            knocking heads already.
        ConfigError: the dtype or the tokenizer folder does not exist; nothing would be knocked, or
            not from the identity, or with a variant that the model's attention cannot carry.
    """
    asked = parse_dtype(dtype)
    if min(divisible_by, tensor_parallel) < 1:
        raise ConfigError(
            f"the vocabulary is padded to a multiple of {divisible_by} x {tensor_parallel}: both "
            "must be at least 1"
        )
    source = open_source(path, tokenizer=tokenizer, padded=True)
    if upcycle is not None:
        source = Upcycled(source, upcycle)
    multiple = 1 if source.padding_arguments else divisible_by * tensor_parallel
    source = Padded(source, math.ceil(source.model.vocab_size / multiple) * multiple)
    if asked is not None:
        source = Cast(source, asked, allow_overflow=allow_overflow)
    embedding = _one_dtype_each(source)
    args = to_arguments(source.model) | {
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
    return MegatronPlan(source, args | dict(source.padding_arguments))


def _one_dtype_each(source: Source) -> TensorEntry:
    """Look at the dtypes of what Megatron stacks into one tensor; returns the embedding.

    Raises:
        CheckpointError: they differ.
    """
    entries = [(place, entry) for place, held in source.entries() for entry in held]
    first: dict[tuple[Row, int | None], TensorEntry] = {}
    for place, entry in entries:
        stack = place.row, None if source.model.is_uniform else place.layer
        if (other := first.setdefault(stack, entry)).dtype != entry.dtype:
            raise CheckpointError(
                f"{source.path}: {entry.name} is {entry.dtype} and {other.name} is {other.dtype}, "
                "which are one tensor in Megatron: give --dtype"
            )
    return entries[0][1]


class _Put:
    """Writes the tensors of a place as chunks of what Megatron's model asks for."""

    def __init__(self, source: Source, writer: TorchDistWriter) -> None:
        self._model, self._writer = source.model, writer

    def __call__(self, place: Place, parts: list[Tensor]) -> None:
        row, model = place.row, self._model
        prefix, grid, position = self._stack(place)
        whole = (*grid, *row.shape(model))
        for name in row.names if row.both else row.names[:1]:
            start = 0
            for block in row.packing.join(parts, model):
                offsets = (*position, start, *(0 for _ in block.shape[1:]))
                chunk = block[(None,) * len(grid)]
                self._writer.write(prefix + name, chunk, shape=whole, offsets=offsets)
                start += block.shape[0]

    def extra_states(self) -> None:
        """What Megatron's linear layers and norms ask for besides their weights: nothing.

        Without FP8 all of them are None, but Megatron refuses a checkpoint that lacks them.
        """
        written = set()
        for place in places(self._model):
            prefix, grid, position = self._stack(place)
            modules = [name.rpartition(".")[0] for name in place.row.names]
            if place.layer is not None:
                modules.append(_CORE_ATTENTION)
            for module in filter(_has_state, modules):
                if (key := prefix + module, position) in written:
                    continue
                written.add((key, position))
                self._writer.write_object(
                    f"{key}._extra_state", None, shape=grid or (1,), offsets=position or (0,)
                )

    def _stack(self, place: Place) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Prefix of a place's key, the grid of such tensors under it, and the place in the grid."""
        prefix, grid, position = "", tuple[int, ...](), tuple[int, ...]()
        if place.layer is not None:
            uniform = self._model.is_uniform
            prefix = LAYERS if uniform else f"{LAYERS}{place.layer}."
            grid, position = ((self._model.num_layers,), (place.layer,)) if uniform else ((), ())
        if place.expert is not None:
            grid, position = (*grid, self._model.num_experts), (*position, place.expert)
        return prefix, grid, position


def _has_state(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name.startswith("linear_") or "norm" in name or module == _CORE_ATTENTION
