"""Transform a source lazily: cast, fold, upcycle, add tensors of zeros.

Each function returns a source whose ``read`` wraps that of its argument.
"""

import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.rows import FileFormat, QKVRow, TensorSlot, head_row
from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.table import ATTENTION_OUTPUT, EXPERT_BIAS, SHARED_EXPERT
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.collaborative import fold_mixing
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import fold

_KNOCKED = {
    "q_proj": "query",
    "q_b_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "kv_proj": "value",
}
"""Projection that each Hugging Face module computes."""
_DOUBLED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Projections that ``Mechanism.projections_to_double`` may return, by Hugging Face module."""


def cast(source: ModelSource, dtype: torch.dtype, *, allow_overflow: bool = False) -> ModelSource:
    """Round all tensors except the router's correction biases to ``dtype``.

    ``read`` raises CheckpointError if a finite number becomes infinite, unless ``allow_overflow``.
    """

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        if slot.row is EXPERT_BIAS:
            return parts
        rounded = [part.to(dtype) for part in parts]
        for name, part, short in zip(slot.hf_names(source.model), parts, rounded, strict=True):
            count = 0 if allow_overflow else count_not_finite(short) - count_not_finite(part)
            if count:
                raise CheckpointError(
                    f"{count:,} of {part.numel():,} numbers in {name} exceed the largest number "
                    f"of {str(dtype).removeprefix('torch.')}, {torch.finfo(dtype).max:g}. "
                    "Choose bfloat16 or float32, or pass --allow-overflow."
                )
        return rounded

    return replace(source, read=read)


def fold_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Fold the linear knocks and collaborative heads of ``kha`` into the projections.

    Raises:
        CheckpointError: There are none, or a mechanism cannot be folded with these settings.
    """
    if not kha.variants and kha.collaborative is None:
        raise CheckpointError(
            f"{source.path} has neither knocking heads nor collaborative heads to fold."
        )
    if kha.variants:
        source = _fold_knock(source)
    return source if kha.collaborative is None else _fold_collaborative(source)


def _fold_knock(source: ModelSource) -> ModelSource:
    """Fold linear knocks: ``W' = W T`` in the projections before them, biases too (eq. 8).

    Computed in float64 and rounded once to the stored dtype. QK-norm and RoPE come after the knock,
    so queries and keys fold as well as values.

    Raises:
        CheckpointError: A knock is not linear.
    """
    model = source.model
    knock = model.kha.knock
    if not knock.is_foldable:
        raise CheckpointError(
            f"{source.path} has {knock}, but only linear knocking heads can be folded. Export the "
            "model as kha."
        )
    matrices = {tensor.heads: head_row(tensor) for tensor in knock.tensors(model.head_sizes)}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        if meta or slot.layer is None:
            return parts
        named = zip(slot.row.hf_names(model), parts, strict=True)
        return [fold_part(name, part, slot.layer) for name, part in named]

    def fold_part(name: str, part: Tensor, layer: int) -> Tensor:
        for projection, rows, start in _knocked_rows(name, model):
            if projection in matrices:
                (weight,) = source.read(TensorSlot(matrices[projection], layer))
                part = fold(part, weight.T[None], head_rows=rows, start=start)
        return part

    kha = model.kha.without(Knock.name)
    return replace(source, model=replace(model, kha=kha), read=read)


def _knocked_rows(name: str, model: Architecture) -> list[tuple[str, int, int]]:
    """Return each knocked part of a tensor: projection, rows per head, and first row in a head."""
    module = name.split(".")[1]
    if module == "kv_b_proj":
        rows = model.qk_head_dim + model.v_head_dim
        return [("key", rows, 0), ("value", rows, model.qk_head_dim)]
    latent = model.multi_latent_attention
    rows = model.qk_head_dim + model.qk_pos_emb_head_dim if latent else model.kv_channels
    return [(_KNOCKED[module], rows, 0)] if module in _KNOCKED else []


def _fold_collaborative(source: ModelSource) -> ModelSource:
    """Fold collaborative heads: query head ``i`` is ``W_Q diag(m_i)``, and all keys are the same.

    The new head dim is the larger one of keys and values. Smaller heads are padded with zeros. RoPE
    rotates the same features as before. If keys were smaller, queries are multiplied by the change
    of the softmax scale.

    Raises:
        CheckpointError: QK-norm would count the zeros, a router would see the scale, or parameters
            of other mechanisms depend on the width of values.
    """
    model, shared = source.model, source.model.kha.collaborative
    assert shared is not None
    values, keys = model.kv_channels, shared.dim
    width = max(keys, values)
    rotated = int(values * model.rotary_percent)
    share = rotated / width
    if int(width * share) != rotated:  # all libraries truncate
        share = math.nextafter(share, 1.0)
    kha = model.kha.without(shared.name)
    folded = replace(model, kha=kha, kv_channels=width, rotary_percent=share)
    moh, why = kha.moh, None
    by_norms = moh is not None and moh.router == "query_norm" and not moh.quantized
    if model.qk_layernorm and keys < values:
        why = f"QK-norm over {keys} features would count the zeros up to {values}"
    elif moh is not None and by_norms and moh.scale == "paper" and keys < values:
        why = f"{moh} weighs heads by the norms of their queries, which folding scales"
    elif set(folded.head_tensors) - set(model.head_tensors):
        why = f"{kha} has parameters for heads of {values} features, and folded heads have {width}"
    if why:
        raise CheckpointError(
            f"{source.path}: collaborative.dim={keys} cannot be folded: {why}. Export it as kha."
        )
    rows = {tensor.name: head_row(tensor) for tensor in shared.tensors(model.head_sizes)}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        if slot.row is ATTENTION_OUTPUT:
            return [_pad_heads(parts[0], model.num_attention_heads, width, dim=1)]
        if not isinstance(slot.row, QKVRow):
            return parts
        held = dict(zip(model.qkv.parts, parts, strict=True))
        query, key, mixing = (
            source.read(TensorSlot(rows[f"{shared.name}_{part}"], slot.layer), meta=meta)[0]
            for part in ("query", "key", "mixing")
        )
        held["query"] = fold_mixing(query, mixing.double() * (width / keys) ** 0.5)
        held["key"] = key.repeat(model.num_query_groups, 1)
        return [
            _pad_heads(held[name], folded.qkv.groups * part.heads, part.features)
            for name, part in folded.qkv.parts.items()
        ]

    return replace(source, model=folded, read=read)


def _pad_heads(part: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """Pad each head along ``dim`` with zeros to ``features``."""
    split = part.unflatten(dim, (heads, -1))
    zeros = features - split.shape[dim + 1]
    if not zeros:
        return part
    return pad(split, (0, 0) * (split.dim() - dim - 2) + (0, zeros)).flatten(dim, dim + 1)


def upcycle_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Add head mechanisms without changing any bit of the model's output.

    Matrices start at the identity, projections of the input at zero. If a mechanism then halves its
    input, the projection before it is doubled (``Mechanism.projections_to_double``).

    Raises:
        ConfigError: There are no mechanisms, one of them has no such start, or the model's
            attention does not support it.
        CheckpointError: The model already has one of the mechanisms.
    """
    before, added = source.model.kha, [mechanism.name for mechanism in kha.mechanisms]
    if not added:
        raise ConfigError(
            "Expected head mechanisms to add. Pass --kha-preset, --kha-query, --kha-key, "
            "--kha-value, --gate or --heads."
        )
    doubled: Counter[str] = Counter(
        name for mechanism in kha.mechanisms for name in mechanism.projections_to_double()
    )
    if twice := [m for m in before.mechanisms if m.name in added]:
        raise CheckpointError(f"{source.path} already has {twice[0]}. Train it further instead.")
    if kha.attention not in (None, before.attention):
        raise ConfigError(
            f"Upcycling cannot change the attention to {kha.attention}. Leave attention out."
        )
    for name, variant in before.variants.items():
        if variant != "linear" and name in doubled:
            raise ConfigError(
                f"{kha} needs a doubled {name} projection, but the trained {name}={variant} after "
                f"it is not linear. Leave gate.{name} out, or train it from scratch."
            )
    old, model = source.model, replace(source.model, kha=before.merge(kha))
    new = {head_row(t): t for t in model.head_tensors if t not in old.head_tensors}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        device = "meta" if meta else "cpu"
        if slot.row in new:
            tensor = new[slot.row]
            weight = torch.zeros(tensor.shape, device=device)
            if not meta and not tensor.reads_input:
                initial_weight(weight if tensor.matrices else weight[None], tensor.initial)
            return slot.row.split(weight.to(_weights_dtype(source, slot)), model)
        held = source.read(slot, meta=meta)
        parts = dict(zip(slot.row.hf_names(old), held, strict=True))
        names = slot.row.hf_names(model)
        if len(names) > len(parts):  # rows next to queries, keys and values
            whole = torch.empty(slot.row.shape(model), dtype=held[0].dtype, device="meta")
            for name, part in zip(names, slot.row.split(whole, model), strict=True):
                parts.setdefault(name, torch.zeros_like(part, device=device))
        return [double(name, parts[name]) for name in names]

    def double(name: str, part: Tensor) -> Tensor:
        times = doubled[_DOUBLED.get(name.split(".")[1], "")]
        return part * 2**times if times else part

    return replace(source, model=model, read=read)


def add_zero_tensors(source: ModelSource, model: Architecture) -> ModelSource:
    """Add zeros for the expert biases and shared experts of ``model``."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        row, layer = slot.row, slot.layer
        addable = layer is not None and row in (EXPERT_BIAS, *SHARED_EXPERT)
        if not addable or row.when(source.model, layer or 0):
            return source.read(slot, meta=meta)
        dtype = torch.float32 if row is EXPERT_BIAS else _weights_dtype(source, slot)
        zeros = torch.zeros(row.shape(model), dtype=dtype, device="meta" if meta else "cpu")
        return row.split(zeros, model)

    return replace(source, model=model, read=read)


def _weights_dtype(source: ModelSource, slot: TensorSlot) -> torch.dtype:
    """Return the dtype of the layer's other weights."""
    return source.read(TensorSlot(ATTENTION_OUTPUT, slot.layer), meta=True)[0].dtype


def round_as_stored(source: ModelSource, files: FileFormat) -> ModelSource:
    """Round tensors as the files of an architecture do: norm weights are stored minus one."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        return files.read(slot, source.model, files.write(slot, source.model, parts))

    return replace(source, read=read)


def pad_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Pad the vocabulary to ``rows`` entries."""
    return replace(source, model=replace(source.model, padded_vocab_size=rows))


def count_not_finite(tensor: Tensor) -> int:
    """Return the number of NaN and infinite elements; 0 for a meta tensor."""
    # aminmax propagates NaN and takes a tenth of the time of isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())
