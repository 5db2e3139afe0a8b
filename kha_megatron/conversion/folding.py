"""Fold head mechanisms into the projections of the attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from kha_megatron.announcements import announce
from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.tensor_mappings import (
    HeadMapping,
    QKVMapping,
    TensorSlot,
    head_mapping,
)
from kha_megatron.conversion.tensor_names import ATTENTION_OUTPUT
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import HeadFacts, Knock, Mechanism, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import Variant, fold
from kha_megatron.model.config import KNOCKED_VALUE, FoldedInto, ModelConfig

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
    """Fold KHA and ``own_projections`` into the weights of the attention.

    The result is a stock model, unless KHA on the values is ``mlp`` or ``gate``. See
    ``ModelConfig.kha_folded`` for such models.

    Args:
        source: The model.
        kha: Fold only those mechanisms of the model that are part of this config.

    Raises:
        CheckpointError: If there is nothing to fold, or if it is not possible.
    """
    if source.model.kha_folded:
        raise CheckpointError(f"The model in {source.path} is folded already.")
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
    """Fold the matrices of KHA into the preceding projection, including its bias.

    - ``linear`` (eq. 8): nothing remains. This is possible for queries and keys too, because
      QK-norm and RoPE come after KHA.
    - ``mlp`` and ``gate`` on the values: the value projection gets twice as many rows, ``2 * up``
      and ``gate`` of each head (without ``up`` for ``gate``), and a GLU remains. ``down`` is folded
      into ``o_proj`` if possible, see :func:`_folds_output`.
    - ``mlp`` and ``gate`` on queries or keys stay as they are.
    """
    model = source.model
    knock = model.kha.get(Knock)
    assert knock is not None
    folded_model = _fold_settings(source, knock)
    matrices = {}
    for parameter in knock.tensors(model.head_sizes):
        matrices[parameter.heads] = head_mapping(parameter)

    def read_matrices(
        projection: Projection,
        slot: TensorSlot,
        *,
        meta: bool = False,
    ) -> list[Tensor]:
        mapping = matrices[projection]
        return source.read(TensorSlot(mapping, slot.layer), meta=meta)

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        mapping = slot.mapping
        if isinstance(mapping, HeadMapping) and mapping.tensor.name == KNOCKED_VALUE:
            *_, down = read_matrices("value", slot, meta=meta)
            return [down]
        tensors = source.read(slot, meta=meta)
        if slot.layer is None:
            return tensors
        if mapping is ATTENTION_OUTPUT and "output" in folded_model.kha_folded:
            (weight,) = tensors
            *_, down = read_matrices("value", slot, meta=meta)
            return [_fold_down(weight, down)]
        folded = []
        names = mapping.hf_names(model)
        for name, tensor in zip(names, tensors, strict=True):
            for rows in _knocked_rows(name, model):
                variant = knock.variants.get(rows.projection)
                if variant == "linear" and not meta:
                    (weight,) = read_matrices(rows.projection, slot)
                    tensor = fold(
                        tensor,
                        weight.T[None],
                        head_rows=rows.per_head,
                        start=rows.start,
                    )
                elif variant is not None and rows.projection in folded_model.kha_folded:
                    value_matrices = read_matrices("value", slot, meta=meta)
                    tensor = _fold_up_and_gate(tensor, value_matrices)
            folded.append(tensor)
        return folded

    return replace(source, model=folded_model, read=read)


def _fold_settings(source: ModelSource, knock: Knock) -> ModelConfig:
    """Return the model after folding ``knock``."""
    model = source.model
    unchanged: dict[Projection, Variant] = {}
    for projection, variant in knock.variants.items():
        if variant != "linear":
            unchanged[projection] = variant
    kha_folded: tuple[FoldedInto, ...] = ()
    value = unchanged.pop("value", None)
    if value is not None:
        kha_folded = ("value",)
        if value == "mlp" and _folds_output(model.kha):
            kha_folded = ("value", "output")
    if len(unchanged) == len(knock.variants):
        raise CheckpointError(
            f"Only linear KHA can be folded into queries and keys, but the model in {source.path} "
            f"uses {knock}. Please export the model with `kha-megatron convert to-hf`."
        )
    kha = model.kha.without(Knock)
    if unchanged or value is not None:
        remaining = replace(
            knock,
            query=unchanged.get("query"),
            key=unchanged.get("key"),
            value=value,
        )
        kha = kha.merge(HeadsConfig(remaining))
    if unchanged:
        settings = [f"{projection}={variant}" for projection, variant in unchanged.items()]
        announce(
            f"KHA ({', '.join(settings)}) was not folded, because only linear KHA can be folded "
            "into queries and keys."
        )
    return replace(model, kha=kha, kha_folded=kha_folded)


def _folds_output(kha: HeadsConfig) -> bool:
    """Whether ``down`` can be moved from the values to ``o_proj``.

    This is not possible with GTA, because keys contain values.
    """
    if kha.attention is not None:
        return False
    others = kha.without(Knock).mechanisms
    return all(mechanism.keeps_value_features for mechanism in others)


def _fold_up_and_gate(projection: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Replace the rows of each value head by ``[2 * up, gate]``.

    The products are computed in float64.

    Args:
        projection: Weight of shape [num_heads * head_dim, hidden_size], or its bias.
        matrices: ``up``, ``gate`` and ``down``, or only ``gate``, as in Hugging Face ([out, in]).
    """
    up = None
    if len(matrices) == 1:
        (gate,) = matrices
    else:
        up, gate, _ = matrices
    head_dim = len(gate)
    heads = projection.unflatten(0, (-1, head_dim))
    num_heads, _, *other_dims = heads.shape
    folded = heads.new_empty(
        num_heads,
        2,
        head_dim,
        *other_dims,
    )
    if not folded.is_meta:
        for head in range(num_heads):
            value = heads[head].double()
            doubled = 2 * value
            if up is not None:
                doubled = up.double() @ doubled
            folded[head, 0] = doubled
            folded[head, 1] = gate.double() @ value
    return folded.flatten(0, 2)


def _fold_down(projection: Tensor, down: Tensor) -> Tensor:
    """Multiply the columns of each head by ``down`` (in float64).

    Args:
        projection: Weight of shape [hidden_size, num_heads * head_dim].
        down: Matrix as in Hugging Face, of shape [head_dim, head_dim].
    """
    if projection.is_meta:
        return projection
    matrix = down.double()
    folded = projection.clone().unflatten(1, (-1, len(down)))
    for head in range(folded.shape[1]):
        columns = folded[:, head]
        columns.copy_(columns.double() @ matrix)
    return folded.flatten(1)


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
            _KnockedRows(
                "value",
                per_head,
                start=model.qk_head_dim,
            ),
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
    if obstacle := _find_obstacle_to_folding(
        model,
        folded,
        key_dim,
    ):
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
            return [
                _pad_heads(
                    weight,
                    model.num_attention_heads,
                    head_dim,
                    dim=1,
                )
            ]
        if not isinstance(slot.mapping, QKVMapping):
            return tensors
        weights = {}
        for name, mapping in parameters.items():
            parameter_slot = TensorSlot(mapping, slot.layer)
            (weights[name],) = source.read(parameter_slot, meta=meta)
        projections = dict(
            zip(
                model.qkv.parts,
                tensors,
                strict=True,
            )
        )
        projections |= mechanism.fold(
            weights,
            model.head_sizes,
            scale,
        )
        layout = folded.qkv
        padded = []
        for name, part in layout.parts.items():
            heads = layout.groups * part.heads
            features = part.features
            if name == "value" and folded.kha_folded:  # pad 2 * up and gate separately
                heads *= 2
                features //= 2
            weight = _pad_heads(
                projections[name],
                heads,
                features,
            )
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


def _pad_heads(
    tensor: Tensor,
    heads: int,
    features: int,
    dim: int = 0,
) -> Tensor:
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
