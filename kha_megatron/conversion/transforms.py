"""Lazy transforms of a :class:`ModelSource`, e.g. casting, folding and upcycling.

Each of these functions returns a new source. The tensors are transformed when you read them.
"""

import math
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.announcements import announce
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.rows import QKVRow, TensorSlot, VocabularyRow, head_row
from kha_megatron.conversion.sources import PADDING, ModelSource
from kha_megatron.conversion.table import ATTENTION_OUTPUT, EXPERT_BIAS, SHARED_EXPERT
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import HeadFacts, Knock, Mechanism
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import PROJECTIONS, fold

_KNOCKED = {
    "q_proj": "query",
    "q_b_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "kv_proj": "value",
}
"""Which projection an HF module computes."""
_DOUBLED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Maps HF modules to names in ``Mechanism.projections_to_double``."""


def cast(source: ModelSource, dtype: torch.dtype, *, allow_overflow: bool = False) -> ModelSource:
    """Cast all tensors to ``dtype`` (except for the correction bias of MoE routers).

    Finite values that overflow are an error, unless ``allow_overflow`` is set.
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
    """Fold KHA-Linear and ``own_projections`` into the QKV weights of a stock model."""
    own = [m for m in kha.other_mechanisms if m.own_projections and m.is_foldable]
    if not (kha.variants or own):
        raise CheckpointError(
            f"Nothing to fold: the model in {source.path} uses no KHA and no other mechanism that "
            "can be folded."
        )
    if kha.variants:
        source = _fold_knock(source)
    for mechanism in own:
        source = _fold_projections(source, mechanism)
    return source


def _fold_knock(source: ModelSource) -> ModelSource:
    """Fold KHA-Linear matrices into the preceding projection, including its bias (eq. 8).

    This is possible for queries and keys too, because QK-norm and RoPE come after KHA.
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
    """List ``(projection, rows per head, first row in each head)`` for a tensor."""
    module = name.split(".")[1]
    if module == "kv_b_proj":
        rows = model.qk_head_dim + model.v_head_dim
        return [("key", rows, 0), ("value", rows, model.qk_head_dim)]
    latent = model.multi_latent_attention
    rows = model.qk_head_dim + model.qk_pos_emb_head_dim if latent else model.kv_channels
    return [(_KNOCKED[module], rows, 0)] if module in _KNOCKED else []


def _fold_projections(source: ModelSource, mechanism: Mechanism) -> ModelSource:
    """Replace a mechanism's query and key projections by ordinary ones (see ``Mechanism.fold``).

    Queries, keys and values now need a common head dim, so we take the maximum and pad with zeros.
    This changes the softmax scale, so we scale the queries to compensate. RoPE still rotates the
    same features.
    """
    model = source.model
    values, keys = model.kv_channels, mechanism.own_dim or 0
    width = max(keys, values)
    rotated = int(values * model.rotary_percent)
    share = rotated / width
    if int(width * share) != rotated:  # libraries round the product down
        share = math.nextafter(share, 1.0)
    kha = model.kha.without(mechanism.name)
    folded = replace(model, kha=kha, kv_channels=width, rotary_percent=share)
    facts = HeadFacts(scales_queries=keys < values)
    why = next(filter(None, (m.unsupported_reason(facts) for m in kha.mechanisms)), None)
    if model.qk_layernorm and keys < values:
        why = f"QK-norm over {keys} features would include the zero padding up to {values}"
    elif not why and set(folded.head_tensors) - set(model.head_tensors):
        why = f"the parameters of {kha} have head dim {values}, but folded heads have {width}"
    if why:
        raise CheckpointError(
            f"{mechanism} in {source.path} cannot be converted to standard heads: {why}. "
            "Please use --architecture kha."
        )
    rows = {tensor.name: head_row(tensor) for tensor in mechanism.tensors(model.head_sizes)}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        if slot.row is ATTENTION_OUTPUT:
            return [_pad_heads(parts[0], model.num_attention_heads, width, dim=1)]
        if not isinstance(slot.row, QKVRow):
            return parts
        held = dict(zip(model.qkv.parts, parts, strict=True))
        weights = {
            name: source.read(TensorSlot(row, slot.layer), meta=meta)[0]
            for name, row in rows.items()
        }
        held |= mechanism.fold(weights, model.head_sizes, (width / keys) ** 0.5)
        return [
            _pad_heads(held[name], folded.qkv.groups * part.heads, part.features)
            for name, part in folded.qkv.parts.items()
        ]

    return replace(source, model=folded, read=read)


def _pad_heads(part: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """Zero-pad all heads to size ``features`` along ``dim``."""
    split = part.unflatten(dim, (heads, -1))
    zeros = features - split.shape[dim + 1]
    if not zeros:
        return part
    return pad(split, (0, 0) * (split.dim() - dim - 2) + (0, zeros)).flatten(dim, dim + 1)


def upcycle_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Add head mechanisms to a trained model. The outputs stay exactly the same.

    KHA matrices start as the identity, and input projections as zero. A sigmoid gate is then 1/2,
    so we double the preceding projection (see ``Mechanism.projections_to_double``).
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
    settings = {p: s for m in kha.other_mechanisms for p in PROJECTIONS if (s := m.setting_of(p))}
    for name, variant in before.variants.items():
        if variant != "linear" and name in doubled:
            raise ConfigError(
                f"{settings.get(name, name)} cannot be added without changing the outputs, because "
                f"the trained {name}={variant} is not linear. Remove it or train from scratch."
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
    """Add all-zero expert biases and shared experts where only ``model`` has them."""

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


def center_norms(source: ModelSource) -> ModelSource:
    """Subtract one from the weights of all norms, in float64.

    Does nothing if the model is stored like this already (``--apply-layernorm-1p``).
    """
    if source.model.layernorm_zero_centered_gamma:
        return source

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        return [part.double() - 1 for part in parts] if slot.row.is_norm else parts

    model = replace(source.model, layernorm_zero_centered_gamma=True)
    return replace(source, model=model, read=read)


def center_and_round_norms(source: ModelSource) -> ModelSource:
    """Same as :func:`center_norms`, but keep the dtype. This can round weights below 1/2."""
    if source.model.layernorm_zero_centered_gamma:
        return source
    centered = center_norms(source)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = centered.read(slot, meta=meta)
        if not slot.row.is_norm:
            return parts
        dtype = source.read(slot, meta=True)[0].dtype
        rounded = [part.to(dtype) for part in parts]
        if dtype != torch.float32 and any(map(_differ, parts, rounded)):
            announce(
                f"Rounding norm weights to {dtype}, because the architecture stores them minus "
                "one. To keep them exact, use --dtype float32 or --architecture kha.",
                once="rounded norms",
            )
        return rounded

    return replace(centered, read=read)


def _differ(exact: Tensor, rounded: Tensor) -> bool:
    return not exact.is_meta and not torch.equal(exact, rounded.double())


def drop_predictions(source: ModelSource, why: str) -> ModelSource:
    """Remove the layers for multi-token prediction."""
    if source.model.predictions:
        announce(f"Ignoring the multi-token prediction layers of {source.path}: {why}.")
    return replace(source, model=replace(source.model, mtp_num_layers=None))


def remove_padding(source: ModelSource) -> ModelSource:
    """Remove Megatron's vocab padding.

    The recorded vocab size is preferred, because tokenizers can be smaller than the model's vocab.
    Without one, rows are only removed if padding explains them.
    """
    args, rows = source.padding_arguments, source.model.padded_vocab_size
    if not args:
        return source
    recorded, entries = args.get("vocab_size") or 0, len(source.tokenizer.loaded or ())
    multiple = math.prod(args.get(name) or 1 for name in PADDING)
    if recorded and entries <= recorded <= rows:
        source = truncate_vocabulary(source, recorded)
    elif entries and rows < entries + multiple:
        source = truncate_vocabulary(source, entries)
    return replace(source, padding_arguments={})


def truncate_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Keep only the first ``rows`` rows of the embedding and LM head."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(slot, meta=meta)
        return [part[:rows] for part in parts] if isinstance(slot.row, VocabularyRow) else parts

    return replace(source, model=replace(source.model, vocab_size=rows), read=read)


def count_not_finite(tensor: Tensor) -> int:
    """Count NaN and Inf values (0 for meta tensors)."""
    # aminmax propagates NaN, and it's 10x faster than isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())
