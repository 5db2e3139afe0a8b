"""Lazy transforms of a :class:`ModelSource`, e.g. casting.

Each of these functions returns a new source. The tensors are transformed when you read them. The
modules ``folding`` and ``upcycling`` have further transforms for head mechanisms.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kha_megatron.announcements import announce
from kha_megatron.conversion.sources import PADDING_ARGUMENTS, ModelSource
from kha_megatron.conversion.tensor_mappings import NormMapping, TensorSlot, VocabularyMapping
from kha_megatron.conversion.tensor_names import (
    ATTENTION_OUTPUT,
    EXPERT_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    layer_mappings,
)
from kha_megatron.errors import CheckpointError
from kha_megatron.model.config import ModelConfig

_OPTIONAL_IN_MOE = (
    EXPERT_BIAS,
    *SHARED_EXPERT,
    SHARED_EXPERT_GATE,
)


def cast(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    allow_overflow: bool = False,
) -> ModelSource:
    """Cast all tensors to ``dtype`` (except for the correction bias of MoE routers).

    Finite values that overflow are an error, unless ``allow_overflow`` is set.
    """

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if slot.mapping is EXPERT_BIAS:
            return tensors
        names = slot.hf_names(source.model)
        rounded_tensors = []
        for name, tensor in zip(names, tensors, strict=True):
            rounded = tensor.to(dtype)
            if not allow_overflow:
                _check_overflow(name, tensor, rounded)
            rounded_tensors.append(rounded)
        return rounded_tensors

    return replace(source, read=read)


def _check_overflow(name: str, exact: Tensor, rounded: Tensor) -> None:
    """Raise CheckpointError if ``rounded`` has more NaN and Inf values than ``exact``."""
    overflows = count_not_finite(rounded) - count_not_finite(exact)
    if not overflows:
        return
    values = exact.numel()
    dtype = rounded.dtype
    maximum = torch.finfo(dtype).max
    raise CheckpointError(
        f"{overflows:,} of {values:,} values in {name} overflow {dtype} "
        f"(maximum {maximum:g}). Please use bfloat16 or float32, or "
        "pass --allow-overflow to convert these values to infinity."
    )


def add_zero_tensors(source: ModelSource, model: ModelConfig) -> ModelSource:
    """Add all-zero expert biases and shared experts where only ``model`` has them."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        mapping = slot.mapping
        if slot.layer is None or mapping not in _OPTIONAL_IN_MOE:
            return source.read(slot, meta=meta)
        if mapping in layer_mappings(source.model, slot.layer):
            return source.read(slot, meta=meta)
        dtype = torch.float32 if mapping is EXPERT_BIAS else weights_dtype(source, slot)
        shape = mapping.shape(model)
        device = "meta" if meta else "cpu"
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        return mapping.split(zeros, model)

    return replace(source, model=model, read=read)


def weights_dtype(source: ModelSource, slot: TensorSlot) -> torch.dtype:
    """Return the dtype of the weights in the layer of a slot."""
    weight_slot = TensorSlot(ATTENTION_OUTPUT, slot.layer)
    (weight,) = source.read(weight_slot, meta=True)
    return weight.dtype


def center_norms(source: ModelSource) -> ModelSource:
    """Subtract one from the weights of all norms, in float64.

    Does nothing if the model is stored like this already (``--apply-layernorm-1p``).
    """
    if source.model.layernorm_zero_centered_gamma:
        return source

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if not isinstance(slot.mapping, NormMapping):
            return tensors
        (weight,) = tensors
        return [weight.double() - 1]

    model = replace(source.model, layernorm_zero_centered_gamma=True)
    return replace(source, model=model, read=read)


def center_and_round_norms(source: ModelSource) -> ModelSource:
    """Subtract one from the weights of all norms like :func:`center_norms`, but keep their dtypes.

    This can round weights below 1/2, in which case we log a message.
    """
    if source.model.layernorm_zero_centered_gamma:
        return source
    centered = center_norms(source)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = centered.read(slot, meta=meta)
        if not isinstance(slot.mapping, NormMapping):
            return tensors
        (exact,) = tensors
        (stored,) = source.read(slot, meta=True)
        dtype = stored.dtype
        rounded = exact.to(dtype)
        if dtype == torch.float32 or exact.is_meta:
            return [rounded]
        if not torch.equal(exact, rounded.double()):
            announce(
                f"Rounding norm weights to {dtype}, because the architecture stores them minus "
                "one. To keep them exact, use --dtype float32 or --architecture kha.",
                once="rounded norms",
            )
        return [rounded]

    return replace(centered, read=read)


def drop_predictions(source: ModelSource, why: str) -> ModelSource:
    """Remove the layers for multi-token prediction."""
    if source.model.predictions:
        announce(f"Ignoring the multi-token prediction layers of {source.path}: {why}.")
    model = replace(source.model, mtp_num_layers=None)
    return replace(source, model=model)


def remove_padding(source: ModelSource) -> ModelSource:
    """Remove Megatron's vocab padding.

    The recorded vocab size is preferred, because tokenizers can be smaller than the model's vocab.
    Without one, rows are only removed if padding explains them.
    """
    if not source.padding_arguments:
        return source
    vocab_size = _unpadded_vocab_size(source)
    if vocab_size is not None:
        source = truncate_vocabulary(source, vocab_size)
    return replace(source, padding_arguments={})


def _unpadded_vocab_size(source: ModelSource) -> int | None:
    """Return the vocab size without padding, or None if it is unknown."""
    args = source.padding_arguments
    embedding_rows = source.model.vocabulary_rows
    tokenizer_size = source.tokenizer.vocab_size or 0
    recorded_size = args.get("vocab_size") or 0
    if recorded_size and tokenizer_size <= recorded_size <= embedding_rows:
        return recorded_size
    multiple = 1
    for name in PADDING_ARGUMENTS:
        multiple *= args.get(name) or 1
    if tokenizer_size and embedding_rows - tokenizer_size < multiple:
        return tokenizer_size
    return None


def truncate_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Keep only the first ``rows`` rows of the embedding and LM head."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if not isinstance(slot.mapping, VocabularyMapping):
            return tensors
        (weight,) = tensors
        return [weight[:rows]]

    model = replace(source.model, vocab_size=rows)
    return replace(source, model=model, read=read)


def count_not_finite(tensor: Tensor) -> int:
    """Count NaN and Inf values (0 for meta tensors)."""
    # aminmax propagates NaN, and it is 10x faster than isfinite
    if tensor.is_meta or not tensor.numel():
        return 0
    smallest, largest = tensor.aminmax()
    if smallest.isfinite() and largest.isfinite():
        return 0
    not_finite = ~tensor.isfinite()
    return int(not_finite.sum())
