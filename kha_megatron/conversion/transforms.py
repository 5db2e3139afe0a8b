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
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.sources import PADDING, ModelSource
from kha_megatron.conversion.tensor_mappings import (
    HeadMapping,
    NormMapping,
    QKVMapping,
    TensorSlot,
    VocabularyMapping,
    head_mapping,
)
from kha_megatron.conversion.tensor_names import (
    ATTENTION_OUTPUT,
    EXPERT_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    layer_mappings,
)
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import HeadFacts, HeadTensor, Knock, Mechanism
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.knock import PROJECTIONS, fold

_KNOCKED = {
    "self_attn.q_proj.weight": "query",
    "self_attn.q_proj.bias": "query",
    "self_attn.q_b_proj.weight": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.k_proj.bias": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.v_proj.bias": "value",
    "self_attn.kv_proj.weight": "value",
    "self_attn.kv_proj.bias": "value",
}
"""Tensors that compute the input of a KHA matrix."""
_DOUBLED = {
    "self_attn.q_proj.weight": "query",
    "self_attn.q_proj.bias": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.k_proj.bias": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.v_proj.bias": "value",
    "self_attn.o_proj.weight": "output",
}
"""Names of these tensors in ``Mechanism.projections_to_double``."""
_OPTIONAL_IN_MOE = (EXPERT_BIAS, *SHARED_EXPERT, SHARED_EXPERT_GATE)


def cast(source: ModelSource, dtype: torch.dtype, *, allow_overflow: bool = False) -> ModelSource:
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


def fold_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
    """Fold KHA-Linear and ``own_projections`` into the QKV weights of a stock model."""
    with_projections = []
    for mechanism in kha.other_mechanisms:
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
    knock = model.kha.knock
    if not knock.is_foldable:
        raise CheckpointError(
            f"Only linear KHA can be folded, but the model in {source.path} uses {knock}. Please "
            "export the model with --architecture kha."
        )
    matrices = {}
    for parameter in knock.tensors(model.head_sizes):
        matrices[parameter.heads] = head_mapping(parameter)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if meta or slot.layer is None:
            return tensors
        names = slot.mapping.hf_names(model)
        folded = []
        for name, tensor in zip(names, tensors, strict=True):
            for rows in _knocked_rows(name, model):
                matrix = matrices.get(rows.projection)
                if matrix is None:
                    continue
                (weight,) = source.read(TensorSlot(matrix, slot.layer))
                tensor = fold(
                    tensor,
                    weight.T[None],
                    head_rows=rows.per_head,
                    start=rows.start,
                )
            folded.append(tensor)
        return folded

    without_knock = replace(model, kha=model.kha.without(Knock.name))
    return replace(source, model=without_knock, read=read)


@dataclass(frozen=True)
class _KnockedRows:
    """Rows of a weight that compute the queries, keys or values of each head."""

    projection: str
    per_head: int
    """Number of rows of each head, including those of other projections."""
    start: int
    """First row in each head."""


def _knocked_rows(name: str, model: Architecture) -> list[_KnockedRows]:
    if name.startswith("self_attn.kv_b_proj."):
        per_head = model.qk_head_dim + model.v_head_dim
        return [
            _KnockedRows("key", per_head, start=0),
            _KnockedRows("value", per_head, start=model.qk_head_dim),
        ]
    if name not in _KNOCKED:
        return []
    projection = _KNOCKED[name]
    if model.multi_latent_attention:
        per_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    else:
        per_head = model.kv_channels
    return [_KnockedRows(projection, per_head, start=0)]


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
    rotary_features = int(value_dim * model.rotary_percent)
    folded = replace(
        model,
        kha=model.kha.without(mechanism.name),
        kv_channels=head_dim,
        rotary_percent=_rotary_percent(rotary_features, head_dim),
    )
    if obstacle := _find_obstacle_to_folding(model, folded, key_dim):
        raise CheckpointError(
            f"{mechanism} in {source.path} cannot be converted to standard heads: {obstacle}. "
            "Please use --architecture kha."
        )
    parameters = {}
    for parameter in mechanism.tensors(model.head_sizes):
        parameters[parameter.name] = head_mapping(parameter)
    scale = (head_dim / key_dim) ** 0.5

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if slot.mapping is ATTENTION_OUTPUT:
            (weight,) = tensors
            return [_pad_heads(weight, model.num_attention_heads, head_dim, dim=1)]
        if not isinstance(slot.mapping, QKVMapping):
            return tensors
        weights = {}
        for name, mapping in parameters.items():
            parameter_slot = TensorSlot(mapping, slot.layer)
            (weights[name],) = source.read(parameter_slot, meta=meta)
        projections = dict(zip(model.qkv.parts, tensors, strict=True))
        projections |= mechanism.fold(weights, model.head_sizes, scale)
        layout = folded.qkv
        padded = []
        for name, part in layout.parts.items():
            heads = layout.groups * part.heads
            weight = _pad_heads(projections[name], heads, part.features)
            padded.append(weight)
        return padded

    return replace(source, model=folded, read=read)


def _rotary_percent(rotary_features: int, head_dim: int) -> float:
    fraction = rotary_features / head_dim
    if int(head_dim * fraction) != rotary_features:  # libraries round the product down
        return math.nextafter(fraction, 1.0)
    return fraction


def _find_obstacle_to_folding(
    model: Architecture,
    folded: Architecture,
    key_dim: int,
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
    changed_parameters = set(folded.head_tensors) - set(model.head_tensors)
    if changed_parameters:
        return (
            f"the parameters of {folded.kha} have head dim {value_dim}, but folded heads have "
            f"{folded.kv_channels}"
        )
    return None


def _pad_heads(tensor: Tensor, heads: int, features: int, dim: int = 0) -> Tensor:
    """Zero-pad all heads to size ``features`` along ``dim``."""
    split = tensor.unflatten(dim, (heads, -1))
    feature_dim = dim + 1
    zeros = features - split.shape[feature_dim]
    if not zeros:
        return tensor
    unpadded_dims = split.dim() - 1 - feature_dim
    padding = (0, 0) * unpadded_dims + (0, zeros)
    padded = pad(split, padding)
    return padded.flatten(dim, feature_dim)


def upcycle_heads(source: ModelSource, kha: KHAConfig) -> ModelSource:
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
    new_parameters = set(model.head_tensors) - set(old_model.head_tensors)
    new_mappings = {head_mapping(parameter) for parameter in new_parameters}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        device = "meta" if meta else "cpu"
        mapping = slot.mapping
        if isinstance(mapping, HeadMapping) and mapping in new_mappings:
            weight = _initial_value(mapping.tensor, device)
            dtype = _weights_dtype(source, slot)
            return mapping.split(weight.to(dtype), model)
        old_names = mapping.hf_names(old_model)
        old_tensors = source.read(slot, meta=meta)
        tensors = dict(zip(old_names, old_tensors, strict=True))
        names = mapping.hf_names(model)
        if len(names) > len(tensors):  # new rows in linear_qkv
            dtype = old_tensors[0].dtype
            fused = torch.empty(mapping.shape(model), dtype=dtype, device="meta")
            templates = mapping.split(fused, model)
            for name, template in zip(names, templates, strict=True):
                if name not in tensors:
                    tensors[name] = torch.zeros_like(template, device=device)
        return [double(name, tensors[name]) for name in names]

    def double(name: str, tensor: Tensor) -> Tensor:
        projection = _DOUBLED.get(name, "")
        times = doubled[projection]
        return tensor * 2**times if times else tensor

    return replace(source, model=model, read=read)


def _check_upcycling(source: ModelSource, kha: KHAConfig) -> None:
    """Raise an error if head mechanisms cannot be added without changing the outputs."""
    trained = source.model.kha
    added = {mechanism.name for mechanism in kha.mechanisms}
    if not added:
        raise ConfigError(
            "No head mechanism to add. Please pass --kha-preset, --kha-query, --kha-key, "
            "--kha-value, --gate or --heads."
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
    for mechanism in kha.other_mechanisms:
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
        matrices = weight if tensor.matrices else weight[None]
        initial_weight(matrices, tensor.initial)
    return weight


def add_zero_tensors(source: ModelSource, model: Architecture) -> ModelSource:
    """Add all-zero expert biases and shared experts where only ``model`` has them."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        mapping = slot.mapping
        if slot.layer is None or mapping not in _OPTIONAL_IN_MOE:
            return source.read(slot, meta=meta)
        if mapping in layer_mappings(source.model, slot.layer):
            return source.read(slot, meta=meta)
        dtype = torch.float32 if mapping is EXPERT_BIAS else _weights_dtype(source, slot)
        shape = mapping.shape(model)
        device = "meta" if meta else "cpu"
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        return mapping.split(zeros, model)

    return replace(source, model=model, read=read)


def _weights_dtype(source: ModelSource, slot: TensorSlot) -> torch.dtype:
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
        if not isinstance(slot.mapping, NormMapping):
            return exact
        (stored,) = source.read(slot, meta=True)
        dtype = stored.dtype
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
    model = replace(source.model, mtp_num_layers=None)
    return replace(source, model=model)


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
    multiple = 1
    for name in PADDING:
        multiple *= args.get(name) or 1
    if recorded and entries <= recorded <= rows:
        source = truncate_vocabulary(source, recorded)
    elif entries and rows < entries + multiple:
        source = truncate_vocabulary(source, entries)
    return replace(source, padding_arguments={})


def truncate_vocabulary(source: ModelSource, rows: int) -> ModelSource:
    """Keep only the first ``rows`` rows of the embedding and LM head."""

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if not isinstance(slot.mapping, VocabularyMapping):
            return tensors
        return [tensor[:rows] for tensor in tensors]

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
