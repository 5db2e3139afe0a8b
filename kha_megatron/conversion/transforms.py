"""Change a source's model while it is converted: cast, fold, upcycle, add tensors of zeros.

Each function returns a source whose ``read`` wraps the given one's.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.rows import FileFormat, Place, QKVRow, VocabularyRow, head_row
from kha_megatron.conversion.sources import Source
from kha_megatron.conversion.table import ATTENTION_OUTPUT, EXPERT_BIAS, SHARED_EXPERT
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import CollaborativeHeads, Knock
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
"""Projection that each Hugging Face module makes."""
_DOUBLED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
"""Projections that ``Mechanism.projections_to_double`` may return, by Hugging Face module."""


def cast(source: Source, dtype: torch.dtype, *, allow_overflow: bool = False) -> Source:
    """Round everything but the router's correction biases to ``dtype``.

    Args:
        source: The tensors.
        dtype: The new dtype.
        allow_overflow: Let numbers become infinite. Otherwise ``read`` raises CheckpointError.
    """

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(place, meta=meta)
        if place.row is EXPERT_BIAS:
            return parts
        rounded = [part.to(dtype) for part in parts]
        for name, part, short in zip(place.hf_names(source.model), parts, rounded, strict=True):
            count = 0 if allow_overflow else not_finite(short) - not_finite(part)
            if count:
                raise CheckpointError(
                    f"{count:,} of {part.numel():,} numbers in {name} are beyond the largest "
                    f"number of {str(dtype).removeprefix('torch.')}, {torch.finfo(dtype).max:g}. "
                    "Choose bfloat16 or float32, or pass --allow-overflow."
                )
        return rounded

    return replace(source, read=read)


def folded(source: Source, kha: KHAConfig) -> Source:
    """Fold the mechanisms of ``kha`` that can be folded into the projections.

    Raises:
        CheckpointError: There are none, or one of them does not fold with these settings.
    """
    names = [mechanism.name for mechanism in kha.mechanisms if mechanism.name in _FOLDS]
    if not names:
        raise CheckpointError(
            f"{source.path} has no knocking heads to fold away, and no collaborative ones."
        )
    for name in names:
        source = _FOLDS[name](source)
    return source


def _fold_knock(source: Source) -> Source:
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
            f"{source.path} has {knock}, but only linear knocking heads can be folded. Export it "
            "as kha."
        )
    matrices = {tensor.heads: head_row(tensor) for tensor in knock.tensors(model.head_sizes)}

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(place, meta=meta)
        if meta or place.layer is None:
            return parts
        named = zip(place.row.hf_names(model), parts, strict=True)
        return [fold_part(name, part, place.layer) for name, part in named]

    def fold_part(name: str, part: Tensor, layer: int) -> Tensor:
        for projection, rows, start in _knocked_rows(name, model):
            if projection in matrices:
                (weight,) = source.read(Place(matrices[projection], layer))
                part = fold(part, weight.T[None], head_rows=rows, start=start)
        return part

    kha = model.kha.without(Knock.name)
    return replace(source, model=replace(model, kha=kha), read=read)


def _knocked_rows(name: str, model: Architecture) -> list[tuple[str, int, int]]:
    """Return what is knocked of a tensor: the projection, rows of one head, and the first row."""
    module = name.split(".")[1]
    if module == "kv_b_proj":
        rows = model.qk_head_dim + model.v_head_dim
        return [("key", rows, 0), ("value", rows, model.qk_head_dim)]
    latent = model.multi_latent_attention
    rows = model.qk_head_dim + model.qk_pos_emb_head_dim if latent else model.kv_channels
    return [(_KNOCKED[module], rows, 0)] if module in _KNOCKED else []


def _fold_collaborative(source: Source) -> Source:
    """Make ordinary heads of collaborative ones: ``W_Q diag(m_i)`` each, and the one key repeated
    for every key/value head.

    Heads become as wide as the wider of keys and values; zeros fill up the other. RoPE turns the
    features that it turned before. If keys were narrower, queries are multiplied by the change of
    the logits' scale.

    Raises:
        CheckpointError: QK-norm would count the zeros, a router would see the scale, or parameters
            of other mechanisms have the width of values.
    """
    model, shared = source.model, source.model.kha.collaborative
    assert shared is not None
    values, keys = model.kv_channels, shared.dim
    width = max(keys, values)
    turned = int(values * model.rotary_percent)
    share = turned / width
    if int(width * share) != turned:  # as all libraries compute it
        share = math.nextafter(share, 1.0)
    kha = model.kha.without(shared.name)
    apart = replace(model, kha=kha, kv_channels=width, rotary_percent=share)
    moh, why = kha.moh, None
    by_norms = moh is not None and moh.router == "query_norm" and not moh.quantized
    if model.qk_layernorm and keys < values:
        why = f"QK-norm over {keys} features would count the zeros up to {values}"
    elif moh is not None and by_norms and moh.scale == "paper" and keys < values:
        why = f"{moh} weighs heads by the norms of their queries, which folding scales"
    elif set(apart.head_tensors) - set(model.head_tensors):
        why = f"{kha} has parameters for heads of {values} features, and folded heads have {width}"
    if why:
        raise CheckpointError(
            f"{source.path}: collaborative.dim={keys} cannot be folded: {why}. Export it as kha."
        )
    rows = {tensor.name: head_row(tensor) for tensor in shared.tensors(model.head_sizes)}

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(place, meta=meta)
        if place.row is ATTENTION_OUTPUT:
            return [_filled(parts[0], model.num_attention_heads, width, dim=1)]
        if not isinstance(place.row, QKVRow):
            return parts
        held = dict(zip(model.qkv.parts, parts, strict=True))
        query, key, mixing = (
            source.read(Place(rows[f"{shared.name}_{part}"], place.layer), meta=meta)[0]
            for part in ("query", "key", "mixing")
        )
        held["query"] = fold_mixing(query, mixing.double() * (width / keys) ** 0.5)
        held["key"] = key.repeat(model.num_query_groups, 1)
        return [
            _filled(held[name], apart.qkv.groups * part.heads, part.features)
            for name, part in apart.qkv.parts.items()
        ]

    return replace(source, model=apart, read=read)


_FOLDS: dict[str, Callable[[Source], Source]] = {
    Knock.name: _fold_knock,
    CollaborativeHeads.name: _fold_collaborative,
}


def _filled(part: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """Fill the heads along ``dim`` up to ``features`` with zeros behind their own."""
    apart = part.unflatten(dim, (heads, -1))
    zeros = features - apart.shape[dim + 1]
    if not zeros:
        return part
    return pad(apart, (0, 0) * (apart.dim() - dim - 2) + (0, zeros)).flatten(dim, dim + 1)


def upcycled(source: Source, kha: KHAConfig) -> Source:
    """Add head mechanisms so that no bit of the model's output changes.

    Matrices begin at the identity and projections of the input at zero. If a mechanism halves
    something then, the projection before it is doubled (``Mechanism.projections_to_double``).

    Raises:
        ConfigError: Nothing would be added, a mechanism has no such start, or the model's attention
            cannot have it.
        CheckpointError: The model has one of the mechanisms already.
    """
    before, added = source.model.kha, [mechanism.name for mechanism in kha.mechanisms]
    if not added:
        raise ConfigError(
            f"Expected head mechanisms to add, got {kha}. Choose a --kha-preset, --kha-query, "
            "--kha-key, --kha-value or --heads."
        )
    doubled: Counter[str] = Counter(
        name for mechanism in kha.mechanisms for name in mechanism.projections_to_double()
    )
    if twice := [m for m in before.mechanisms if m.name in added]:
        raise CheckpointError(f"{source.path} has {twice[0]} already. Train it further instead.")
    if kha.attention not in (None, before.attention):
        raise ConfigError(
            f"Upcycling cannot change the kind of attention to {kha.attention}. Leave it out."
        )
    for name, variant in before.variants.items():
        if variant != "linear" and name in doubled:  # twice its input is not twice its output
            raise ConfigError(
                f"{kha} needs the {name} projection doubled, but the trained {name}={variant} "
                f"behind it is not linear. Leave gate.{name} out, or train with it from the start."
            )
    old, model = source.model, replace(source.model, kha=before.merge(kha))
    new = {head_row(t): t for t in model.head_tensors if t not in old.head_tensors}

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        device = "meta" if meta else "cpu"
        if place.row in new:
            tensor, dtype = new[place.row], _weights_dtype(source, place)
            weight = torch.zeros(tensor.shape, dtype=dtype, device=device)
            if not meta and not tensor.reads_input:
                initial_weight(weight if tensor.matrices else weight[None], tensor.starts)
            return place.row.split(weight, model)
        held = source.read(place, meta=meta)
        parts = dict(zip(place.row.hf_names(old), held, strict=True))
        names = place.row.hf_names(model)
        if len(names) > len(parts):  # rows beside queries, keys and values
            whole = torch.empty(place.row.shape(model), dtype=held[0].dtype, device="meta")
            for name, part in zip(names, place.row.split(whole, model), strict=True):
                parts.setdefault(name, torch.zeros_like(part, device=device))
        return [double(name, parts[name]) for name in names]

    def double(name: str, part: Tensor) -> Tensor:
        module = name.split(".")[1]
        times = doubled[_DOUBLED[module]] if module in _DOUBLED else 0
        return part * 2**times if times else part

    return replace(source, model=model, read=read)


def express(source: Source, model: Architecture) -> Source:
    """Add zeros for the expert biases and shared experts of ``model``."""

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        row, layer = place.row, place.layer
        addable = layer is not None and row in (EXPERT_BIAS, *SHARED_EXPERT)
        if not addable or row.when(source.model, layer or 0):
            return source.read(place, meta=meta)
        dtype = torch.float32 if row is EXPERT_BIAS else _weights_dtype(source, place)
        zeros = torch.zeros(row.shape(model), dtype=dtype, device="meta" if meta else "cpu")
        return row.split(zeros, model)

    return replace(source, model=model, read=read)


def _weights_dtype(source: Source, place: Place) -> torch.dtype:
    """Return the dtype of the layer's other weights."""
    return source.read(Place(ATTENTION_OUTPUT, place.layer), meta=True)[0].dtype


def as_stored(source: Source, files: FileFormat) -> Source:
    """Round what the files of an architecture round: norm weights that are stored minus one."""

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(place, meta=meta)
        return files.read(place, source.model, files.write(place, source.model, parts))

    return replace(source, read=read)


def padded(source: Source, rows: int) -> Source:
    """Pad the vocabulary to ``rows`` entries."""
    return replace(source, model=replace(source.model, padded_vocab_size=rows))


def first_entries(source: Source, entries: int) -> Source:
    """Leave out the rows of the vocabulary behind the first ``entries``."""

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        parts = source.read(place, meta=meta)
        return [part[:entries] for part in parts] if isinstance(place.row, VocabularyRow) else parts

    return replace(source, model=replace(source.model, vocab_size=entries), read=read)


def not_finite(tensor: Tensor) -> int:
    """Return how many elements are NaN or infinite; 0 for a meta tensor."""
    # aminmax is NaN if any element is, and takes a tenth of the time of isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())
