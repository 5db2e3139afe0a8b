"""Lazy transformations of a model source, e.g. dtype casts, folding and upcycling.

Each function returns a new source that transforms tensors when they are read.
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
"""Projection computed by each Hugging Face module."""
_DOUBLED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Hugging Face modules of the projections in ``Mechanism.projections_to_double``."""


def cast(source: ModelSource, dtype: torch.dtype, *, allow_overflow: bool = False) -> ModelSource:
    """Cast all tensors to ``dtype``, except for the correction biases of routers.

    Unless ``allow_overflow`` is True, reading raises CheckpointError if a finite value overflows.
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
                    f"{count:,} of {part.numel():,} values in {name} overflow {dtype} (maximum "
                    f"{torch.finfo(dtype).max:g}). Please use bfloat16 or float32, or pass "
                    "--allow-overflow to convert these values to infinity."
                )
        return rounded

    return replace(source, read=read)


def fold_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Fold the linear matrices and collaborative heads of ``kha`` into the projections."""
    if not kha.variants and kha.collaborative is None:
        raise CheckpointError(
            f"Nothing to fold: the model in {source.path} uses neither KHA nor collaborative heads."
        )
    if kha.variants:
        source = _fold_knock(source)
    return source if kha.collaborative is None else _fold_collaborative(source)


def _fold_knock(source: ModelSource) -> ModelSource:
    """Fold linear matrices into the weights and biases of the preceding projections (eq. 8).

    Note that queries and keys can also be folded, because QK-norm and RoPE are applied after KHA.
    """
    model = source.model
    knock = model.kha.knock
    if not knock.is_foldable:
        raise CheckpointError(
            f"Only linear KHA can be folded, but the model in {source.path} uses {knock}. Please "
            "export the model with --architecture kha."
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
    """Return the projections in a tensor, with the rows per head and the first row in a head."""
    module = name.split(".")[1]
    if module == "kv_b_proj":
        rows = model.qk_head_dim + model.v_head_dim
        return [("key", rows, 0), ("value", rows, model.qk_head_dim)]
    latent = model.multi_latent_attention
    rows = model.qk_head_dim + model.qk_pos_emb_head_dim if latent else model.kv_channels
    return [(_KNOCKED[module], rows, 0)] if module in _KNOCKED else []


def _fold_collaborative(source: ModelSource) -> ModelSource:
    """Fold collaborative heads into ordinary heads with ``W_Q diag(m_i)`` as query head ``i``.

    All key heads become identical. The new head dim is the maximum of the key and value head dims,
    and smaller heads are zero-padded. RoPE still rotates the same features. Since the head dim
    determines the softmax scale, queries are multiplied by the change of this scale.
    """
    model, shared = source.model, source.model.kha.collaborative
    assert shared is not None
    values, keys = model.kv_channels, shared.dim
    width = max(keys, values)
    rotated = int(values * model.rotary_percent)
    share = rotated / width
    if int(width * share) != rotated:  # libraries truncate the product
        share = math.nextafter(share, 1.0)
    kha = model.kha.without(shared.name)
    folded = replace(model, kha=kha, kv_channels=width, rotary_percent=share)
    moh, why = kha.moh, None
    by_norms = moh is not None and moh.router == "query_norm" and not moh.quantized
    if model.qk_layernorm and keys < values:
        why = f"QK-norm over {keys} features would include the zero padding up to {values}"
    elif moh is not None and by_norms and moh.scale == "paper" and keys < values:
        why = f"{moh} depends on query norms, which change when the heads are folded"
    elif set(folded.head_tensors) - set(model.head_tensors):
        why = f"the parameters of {kha} have head dim {values}, but folded heads have {width}"
    if why:
        raise CheckpointError(
            f"The collaborative heads of {source.path} cannot be converted to standard heads: "
            f"{why}. Please use --architecture kha."
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
    """Zero-pad each of the ``heads`` along ``dim`` to ``features``."""
    split = part.unflatten(dim, (heads, -1))
    zeros = features - split.shape[dim + 1]
    if not zeros:
        return part
    return pad(split, (0, 0) * (split.dim() - dim - 2) + (0, zeros)).flatten(dim, dim + 1)


def upcycle_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Add head mechanisms such that the model's outputs are bit-exact.

    Matrices are initialized to the identity and input projections to zero. If a gate then halves
    its input, the preceding projection is doubled (see ``Mechanism.projections_to_double``).
    """
    before, added = source.model.kha, [mechanism.name for mechanism in kha.mechanisms]
    if not added:
        raise ConfigError(
            "No head mechanism to add. Please pass --kha-preset, --kha-query, --kha-key, "
            "--kha-value, --gate or --heads."
        )
    doubled: Counter[str] = Counter(
        name for mechanism in kha.mechanisms for name in mechanism.projections_to_double()
    )
    if twice := [m for m in before.mechanisms if m.name in added]:
        raise CheckpointError(f"The model in {source.path} already uses {twice[0]}.")
    if kha.attention not in (None, before.attention):
        raise ConfigError(
            f"Upcycling to attention={kha.attention} is not supported. Please remove this setting."
        )
    for name, variant in before.variants.items():
        if variant != "linear" and name in doubled:
            raise ConfigError(
                f"gate.{name} cannot be added without changing the outputs, because the trained "
                f"{name}={variant} is not linear. Please remove it or train from scratch."
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
        if len(names) > len(parts):  # new rows in linear_qkv
            whole = torch.empty(slot.row.shape(model), dtype=held[0].dtype, device="meta")
            for name, part in zip(names, slot.row.split(whole, model), strict=True):
                parts.setdefault(name, torch.zeros_like(part, device=device))
        return [double(name, parts[name]) for name in names]

    def double(name: str, part: Tensor) -> Tensor:
        times = doubled[_DOUBLED.get(name.split(".")[1], "")]
        return part * 2**times if times else part

    return replace(source, model=model, read=read)


def add_zero_tensors(source: ModelSource, model: Architecture) -> ModelSource:
    """Add the expert biases and shared experts that only ``model`` has, initialized to zero."""

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
    return source.read(TensorSlot(ATTENTION_OUTPUT, slot.layer), meta=True)[0].dtype


def round_as_stored(source: ModelSource, files: FileFormat) -> ModelSource:
    """Round norm weights as in an architecture whose files store them minus one."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        return files.read(slot, source.model, files.write(slot, source.model, parts))

    return replace(source, read=read)


def pad_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    return replace(source, model=replace(source.model, padded_vocab_size=rows))


def count_not_finite(tensor: Tensor) -> int:
    """Count NaN and infinite elements. The result is 0 for meta tensors."""
    # aminmax propagates NaN and takes a tenth of the time of isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())
