"""Lazy transforms of a :class:`ModelSource`, e.g. casting, folding and upcycling.

Each of these functions returns a new source. The tensors are transformed when you read them.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.announcements import announce
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.rows import QKVRow, TensorSlot, VocabularyRow, head_row
from kha_megatron.conversion.sources import PADDING, ModelSource
from kha_megatron.conversion.table import ATTENTION_OUTPUT, EXPERT_BIAS, SHARED_EXPERT
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import HeadFacts, HeadTensor, Knock, Mechanism
from kha_megatron.heads.config import HeadsConfig
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
        tensors = source.read(slot, meta=meta)
        if slot.row is EXPERT_BIAS:
            return tensors
        rounded_tensors = []
        for name, tensor in zip(slot.hf_names(source.model), tensors, strict=True):
            rounded = tensor.to(dtype)
            rounded_tensors.append(rounded)
            if allow_overflow:
                continue
            overflows = count_not_finite(rounded) - count_not_finite(tensor)
            if overflows:
                raise CheckpointError(
                    f"{overflows:,} of {tensor.numel():,} values in {name} overflow {dtype} "
                    f"(maximum {torch.finfo(dtype).max:g}). Please use bfloat16 or float32, or "
                    "pass --allow-overflow to convert these values to infinity."
                )
        return rounded_tensors

    return replace(source, read=read)


def fold_heads(source: ModelSource, kha: HeadsConfig) -> ModelSource:
    """Fold KHA-Linear and ``own_projections`` into the QKV weights of a stock model."""
    with_projections = []
    for mechanism in kha.mechanisms:
        if mechanism.own_projections and mechanism.is_foldable:
            with_projections.append(mechanism)
    if not (kha.variants or with_projections):
        raise CheckpointError(
            f"Nothing to fold: the model in {source.path} uses no KHA and no other mechanism that "
            "can be folded."
        )
    if kha.variants:
        source = _fold_knock(source)
    for mechanism in with_projections:
        source = _fold_projections(source, mechanism)
    return source


def _fold_knock(source: ModelSource) -> ModelSource:
    """Fold KHA-Linear matrices into the preceding projection, including its bias (eq. 8).

    This is possible for queries and keys too, because QK-norm and RoPE come after KHA.
    """
    model = source.model
    knock = model.kha.get(Knock)
    assert knock is not None
    if not knock.is_foldable:
        raise CheckpointError(
            f"Only linear KHA can be folded, but the model in {source.path} uses {knock}. Please "
            "export the model with --architecture kha."
        )
    matrices = {tensor.heads: head_row(tensor) for tensor in knock.tensors(model.head_sizes)}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if meta or slot.layer is None:
            return tensors
        folded = []
        for name, tensor in zip(slot.row.hf_names(model), tensors, strict=True):
            for rows in _knocked_rows(name, model):
                if rows.projection in matrices:
                    matrix = TensorSlot(matrices[rows.projection], slot.layer)
                    (weight,) = source.read(matrix)
                    tensor = fold(
                        tensor,
                        weight.T[None],
                        head_rows=rows.per_head,
                        start=rows.start,
                    )
            folded.append(tensor)
        return folded

    kha = model.kha.without(Knock)
    return replace(source, model=replace(model, kha=kha), read=read)


@dataclass(frozen=True)
class _KnockedRows:
    """Rows of a weight that compute the queries, keys or values of each head."""

    projection: str
    per_head: int
    """Number of rows of each head, including those of other projections."""
    start: int
    """First row in each head."""


def _knocked_rows(name: str, model: Architecture) -> list[_KnockedRows]:
    module = name.split(".")[1]
    if module == "kv_b_proj":
        per_head = model.qk_head_dim + model.v_head_dim
        return [
            _KnockedRows("key", per_head, start=0),
            _KnockedRows("value", per_head, start=model.qk_head_dim),
        ]
    if module not in _KNOCKED:
        return []
    if model.multi_latent_attention:
        per_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    else:
        per_head = model.kv_channels
    return [_KnockedRows(_KNOCKED[module], per_head, start=0)]


def _fold_projections(source: ModelSource, mechanism: Mechanism) -> ModelSource:
    """Replace a mechanism's query and key projections by ordinary ones (see ``Mechanism.fold``).

    Queries, keys and values now need a common head dim, so we take the maximum and pad with zeros.
    This changes the softmax scale, so we scale the queries to compensate. RoPE still rotates the
    same features.
    """
    model = source.model
    value_dim = model.kv_channels
    key_dim = mechanism.own_dim or 0
    head_dim = max(key_dim, value_dim)
    folded = replace(
        model,
        kha=model.kha.without(type(mechanism)),
        kv_channels=head_dim,
        rotary_percent=_rotary_percent(int(value_dim * model.rotary_percent), head_dim),
    )
    if obstacle := _find_obstacle_to_folding(model, folded, key_dim):
        raise CheckpointError(
            f"{mechanism} in {source.path} cannot be converted to standard heads: {obstacle}. "
            "Please use --architecture kha."
        )
    rows = {tensor.name: head_row(tensor) for tensor in mechanism.tensors(model.head_sizes)}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if slot.row is ATTENTION_OUTPUT:
            return [_pad_heads(tensors[0], model.num_attention_heads, head_dim, dim=1)]
        if not isinstance(slot.row, QKVRow):
            return tensors
        weights = {}
        for name, row in rows.items():
            (weights[name],) = source.read(TensorSlot(row, slot.layer), meta=meta)
        projections = dict(zip(model.qkv.parts, tensors, strict=True))
        projections |= mechanism.fold(weights, model.head_sizes, (head_dim / key_dim) ** 0.5)
        padded = []
        for name, part in folded.qkv.parts.items():
            heads = folded.qkv.groups * part.heads
            padded.append(_pad_heads(projections[name], heads, part.features))
        return padded

    return replace(source, model=folded, read=read)


def _rotary_percent(rotary_features: int, head_dim: int) -> float:
    fraction = rotary_features / head_dim
    if int(head_dim * fraction) != rotary_features:  # libraries round the product down
        return math.nextafter(fraction, 1.0)
    return fraction


def _find_obstacle_to_folding(
    model: Architecture, folded: Architecture, key_dim: int
) -> str | None:
    """Return why the heads of ``model`` cannot be padded as in ``folded``, or None."""
    value_dim = model.kv_channels
    pads_keys = key_dim < value_dim
    if model.qk_layernorm and pads_keys:
        return f"QK-norm over {key_dim} features would include the zero padding up to {value_dim}"
    facts = HeadFacts(scales_queries=pads_keys)
    for mechanism in folded.kha.mechanisms:
        if reason := mechanism.unsupported_reason(facts):
            return reason
    if set(folded.head_tensors) - set(model.head_tensors):
        return (
            f"the parameters of {folded.kha} have head dim {value_dim}, but folded heads have "
            f"{folded.kv_channels}"
        )
    return None


def _pad_heads(tensor: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """Zero-pad all heads to size ``features`` along ``dim``."""
    split = tensor.unflatten(dim, (heads, -1))
    zeros = features - split.shape[dim + 1]
    if not zeros:
        return tensor
    unpadded_dims = split.dim() - dim - 2
    padded = pad(split, (0, 0) * unpadded_dims + (0, zeros))
    return padded.flatten(dim, dim + 1)


def upcycle_heads(source: ModelSource, kha: HeadsConfig) -> ModelSource:
    """Add head mechanisms to a trained model. The outputs stay exactly the same.

    KHA matrices start as the identity, and input projections as zero. A sigmoid gate is then 1/2,
    so we double the preceding projection (see ``Mechanism.projections_to_double``).
    """
    old_model = source.model
    _check_upcycling(source, kha)
    model = replace(old_model, kha=old_model.kha.merge(kha))
    doubled: Counter[str] = Counter()
    for mechanism in kha.mechanisms:
        doubled.update(mechanism.projections_to_double())
    new_tensors = {}
    for tensor in model.head_tensors:
        if tensor not in old_model.head_tensors:
            new_tensors[head_row(tensor)] = tensor

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        device = "meta" if meta else "cpu"
        if slot.row in new_tensors:
            initial = _initial_value(new_tensors[slot.row], device)
            return slot.row.split(initial.to(_weights_dtype(source, slot)), model)
        old_tensors = source.read(slot, meta=meta)
        tensors = dict(zip(slot.row.hf_names(old_model), old_tensors, strict=True))
        names = slot.row.hf_names(model)
        if len(names) > len(tensors):  # new rows in linear_qkv
            shape = slot.row.shape(model)
            fused = torch.empty(shape, dtype=old_tensors[0].dtype, device="meta")
            for name, template in zip(names, slot.row.split(fused, model), strict=True):
                if name not in tensors:
                    tensors[name] = torch.zeros_like(template, device=device)
        return [double(name, tensors[name]) for name in names]

    def double(name: str, tensor: Tensor) -> Tensor:
        projection = _DOUBLED.get(name.split(".")[1], "")
        times = doubled[projection]
        return tensor * 2**times if times else tensor

    return replace(source, model=model, read=read)


def _check_upcycling(source: ModelSource, kha: HeadsConfig) -> None:
    """Raise an error if head mechanisms cannot be added without changing the outputs."""
    trained = source.model.kha
    added = {mechanism.name for mechanism in kha.mechanisms}
    if not added:
        raise ConfigError(
            "No head mechanism to add. Please pass --kha-preset, --kha-query, --kha-key, "
            "--kha-value or --heads."
        )
    doubled: set[str] = set()
    for mechanism in kha.mechanisms:
        doubled.update(mechanism.projections_to_double())
    for mechanism in trained.mechanisms:
        if mechanism.name in added:
            raise CheckpointError(f"The model in {source.path} already uses {mechanism}.")
    if kha.attention not in (None, trained.attention):
        raise ConfigError(
            f"Upcycling to attention={kha.attention} is not supported. Please remove this setting."
        )
    settings = {}
    for mechanism in kha.without(Knock).mechanisms:
        for projection in PROJECTIONS:
            if setting := mechanism.setting_of(projection):
                settings[projection] = setting
    for projection, variant in trained.variants.items():
        if variant != "linear" and projection in doubled:
            raise ConfigError(
                f"{settings.get(projection, projection)} cannot be added without changing the "
                f"outputs, because the trained {projection}={variant} is not linear. Remove it or "
                "train from scratch."
            )


def _initial_value(tensor: HeadTensor, device: str) -> Tensor:
    weight = torch.zeros(tensor.shape, device=device)
    if device != "meta" and not tensor.reads_input:
        initial_weight(weight if tensor.matrices else weight[None], tensor.initial)
    return weight


def add_zero_tensors(source: ModelSource, model: Architecture) -> ModelSource:
    """Add all-zero expert biases and shared experts where only ``model`` has them."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        row = slot.row
        if slot.layer is None or row not in (EXPERT_BIAS, *SHARED_EXPERT):
            return source.read(slot, meta=meta)
        if row.when(source.model, slot.layer):
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
        tensors = source.read(slot, meta=meta)
        if not slot.row.is_norm:
            return tensors
        return [tensor.double() - 1 for tensor in tensors]

    model = replace(source.model, layernorm_zero_centered_gamma=True)
    return replace(source, model=model, read=read)


def center_and_round_norms(source: ModelSource) -> ModelSource:
    """Same as :func:`center_norms`, but keep the dtype. This can round weights below 1/2."""
    if source.model.layernorm_zero_centered_gamma:
        return source
    centered = center_norms(source)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        exact = centered.read(slot, meta=meta)
        if not slot.row.is_norm:
            return exact
        dtype = source.read(slot, meta=True)[0].dtype
        rounded = [weight.to(dtype) for weight in exact]
        if dtype != torch.float32 and any(map(_differ, exact, rounded)):
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
    args = source.padding_arguments
    if not args:
        return source
    rows = source.model.padded_vocab_size
    recorded = args.get("vocab_size") or 0
    entries = len(source.tokenizer.loaded or ())
    multiple = math.prod(args.get(name) or 1 for name in PADDING)
    if recorded and entries <= recorded <= rows:
        source = truncate_vocabulary(source, recorded)
    elif entries and rows < entries + multiple:
        source = truncate_vocabulary(source, entries)
    return replace(source, padding_arguments={})


def truncate_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Keep only the first ``rows`` rows of the embedding and LM head."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if not isinstance(slot.row, VocabularyRow):
            return tensors
        return [tensor[:rows] for tensor in tensors]

    return replace(source, model=replace(source.model, vocab_size=rows), read=read)


def count_not_finite(tensor: Tensor) -> int:
    """Count NaN and Inf values (0 for meta tensors)."""
    # aminmax propagates NaN, and it is 10x faster than isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())
