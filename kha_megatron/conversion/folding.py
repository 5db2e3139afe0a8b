"""Fold head mechanisms into the projections of a stock model."""

import math
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.tensor_mappings import QKVMapping, TensorSlot, head_mapping
from kha_megatron.conversion.tensor_names import ATTENTION_OUTPUT
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import HeadFacts, Knock, Mechanism, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import fold
from kha_megatron.model.config import ModelConfig

_KNOCKED: dict[str, Projection] = {
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

    without_knock = replace(model, kha=model.kha.without(Knock))
    return replace(source, model=without_knock, read=read)


@dataclass(frozen=True)
class _KnockedRows:
    """Rows of a weight that compute the queries, keys or values of each head."""

    projection: Projection
    per_head: int
    """Number of rows of each head, including those of other projections."""
    start: int
    """First row in each head."""


def _knocked_rows(name: str, model: ModelConfig) -> list[_KnockedRows]:
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
    key_dim = mechanism.own_projections["key"]
    head_dim = max(key_dim, value_dim)
    rotary_features = int(value_dim * model.rotary_percent)
    folded = replace(
        model,
        kha=model.kha.without(type(mechanism)),
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
    model: ModelConfig,
    folded: ModelConfig,
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
