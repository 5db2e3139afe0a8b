"""Fold head mechanisms into the projections of the attention."""

import math
from collections.abc import Mapping, Sequence
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

_KNOCKED_PROJECTIONS: dict[str, Projection] = {
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
"""Tensors that compute the input of a KHA matrix, except for ``kv_b_proj`` of MLA. ``kv_proj`` is
the one of GTA, where keys contain values."""


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
    projecting_mechanisms = []
    for mechanism in kha.mechanisms:
        if mechanism.own_projections and mechanism.is_foldable:
            projecting_mechanisms.append(mechanism)
    if not (kha.variants or projecting_mechanisms):
        raise CheckpointError(
            f"Nothing to fold: the model in {source.path} uses no KHA and no other mechanism that "
            "can be folded."
        )
    if kha.variants:
        source = _fold_knock(source)
    for mechanism in projecting_mechanisms:
        source = _fold_own_projections(source, mechanism)
    return source


def _fold_knock(source: ModelSource) -> ModelSource:
    """Fold the matrices of KHA into the preceding projection, including its bias.

    - ``linear`` (eq. 8): nothing remains. This is possible for queries and keys too, because
      QK-norm and RoPE come after KHA.
    - ``mlp`` and ``gate`` on the values: the value projection gets twice as many rows, ``2 * up``
      and ``gate`` of each head (without ``up`` for ``gate``), and a GLU remains. ``down`` is folded
      into ``o_proj`` if possible, see :func:`_can_fold_down`.
    - ``mlp`` and ``gate`` on queries or keys stay as they are.
    """
    knock = source.model.kha.get(Knock)
    assert knock is not None
    _check_variants(source, knock)
    folded_model = _model_with_folded_knock(source.model, knock)
    folder = _KnockFolder(source, knock, folded_model)
    return replace(source, model=folded_model, read=folder.read)


def _check_variants(source: ModelSource, knock: Knock) -> None:
    """Log the variants that cannot be folded. Raise CheckpointError if this applies to all."""
    unfoldable = []
    for projection, variant in knock.variants.items():
        if projection != "value" and variant != "linear":
            unfoldable.append(f"{projection}={variant}")
    if len(unfoldable) == len(knock.variants):
        raise CheckpointError(
            f"Only linear KHA can be folded into queries and keys, but the model in {source.path} "
            f"uses {knock}. Please export the model with `kha-megatron convert to-hf`."
        )
    if unfoldable:
        announce(
            f"KHA ({', '.join(unfoldable)}) was not folded, because only linear KHA can be folded "
            "into queries and keys."
        )


def _model_with_folded_knock(model: ModelConfig, knock: Knock) -> ModelConfig:
    nonlinear: dict[Projection, Variant] = {}
    for projection, variant in knock.variants.items():
        if variant != "linear":
            nonlinear[projection] = variant
    value = nonlinear.get("value")
    kha_folded: tuple[FoldedInto, ...] = ()
    if value == "mlp" and _can_fold_down(model.kha):
        kha_folded = ("value", "output")
    elif value is not None:
        kha_folded = ("value",)
    kha = model.kha.without(Knock)
    if nonlinear:
        remaining_knock = replace(
            knock,
            query=nonlinear.get("query"),
            key=nonlinear.get("key"),
            value=value,
        )
        kha = kha.merge(HeadsConfig(remaining_knock))
    return replace(model, kha=kha, kha_folded=kha_folded)


def _can_fold_down(kha: HeadsConfig) -> bool:
    """Return True if ``down`` can be moved from the values to ``o_proj``.

    This is not possible with GTA, because keys contain values.
    """
    if kha.attention is not None:
        return False
    other_mechanisms = kha.without(Knock).mechanisms
    return all(mechanism.keeps_value_features for mechanism in other_mechanisms)


@dataclass(frozen=True)
class _KnockRows:
    """Rows of a weight that compute the queries, keys or values of each head."""

    projection: Projection
    rows_per_head: int
    """Number of rows of each head, including those of other projections."""
    start: int
    """First row in each head."""


def _find_knock_rows(name: str, model: ModelConfig) -> list[_KnockRows]:
    """Return the rows of an HF tensor that KHA matrices are folded into ([] for other tensors)."""
    if name.startswith("self_attn.kv_b_proj."):
        rows_per_head = model.qk_head_dim + model.v_head_dim
        return [
            _KnockRows("key", rows_per_head, start=0),
            _KnockRows("value", rows_per_head, start=model.qk_head_dim),
        ]
    if name not in _KNOCKED_PROJECTIONS:
        return []
    rows_per_head = model.kv_channels
    if model.multi_latent_attention:
        rows_per_head = model.qk_head_dim + model.qk_pos_emb_head_dim
    return [_KnockRows(_KNOCKED_PROJECTIONS[name], rows_per_head, start=0)]


@dataclass(frozen=True)
class _KnockFolder:
    """Folds the matrices of KHA into the tensors of a model while they are read."""

    source: ModelSource
    knock: Knock
    folded_model: ModelConfig

    def read(self, slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        """Implement ``ModelSource.read`` for the folded model."""
        mapping = slot.mapping
        if isinstance(mapping, HeadMapping) and mapping.tensor.name == KNOCKED_VALUE:
            # up and gate are part of v_proj now
            *_, down = self._read_matrices("value", slot.layer, meta=meta)
            return [down]
        tensors = self.source.read(slot, meta=meta)
        if slot.layer is None:
            return tensors
        if mapping is ATTENTION_OUTPUT and "output" in self.folded_model.kha_folded:
            (weight,) = tensors
            *_, down = self._read_matrices("value", slot.layer, meta=meta)
            return [_fold_down(weight, down)]
        folded_tensors = []
        names = mapping.hf_names(self.source.model)
        for name, tensor in zip(names, tensors, strict=True):
            folded = tensor
            for rows in _find_knock_rows(name, self.source.model):
                folded = self._fold_rows(folded, rows, slot.layer, meta=meta)
            folded_tensors.append(folded)
        return folded_tensors

    def _fold_rows(
        self,
        tensor: Tensor,
        rows: _KnockRows,
        layer: int,
        *,
        meta: bool,
    ) -> Tensor:
        """Fold the matrices of one projection into its rows in ``tensor``."""
        variant = self.knock.variants.get(rows.projection)
        if variant == "linear":
            if meta:
                return tensor  # the shape does not change
            (weight,) = self._read_matrices(rows.projection, layer)
            matrix = weight.T  # HF stores the transpose
            return fold(
                tensor,
                matrix.unsqueeze(0),
                head_rows=rows.rows_per_head,
                start=rows.start,
            )
        if rows.projection in self.folded_model.kha_folded:
            matrices = self._read_matrices(rows.projection, layer, meta=meta)
            return _fold_up_and_gate(tensor, matrices)
        return tensor  # not folded, or no KHA

    def _read_matrices(
        self,
        projection: Projection,
        layer: int | None,
        *,
        meta: bool = False,
    ) -> list[Tensor]:
        """Read the KHA matrices of a projection as in Hugging Face ([out, in])."""
        for parameter in self.knock.tensors(self.source.model.head_sizes):
            if parameter.heads == projection:
                slot = TensorSlot(head_mapping(parameter), layer)
                return self.source.read(slot, meta=meta)
        raise AssertionError(projection)


def _fold_up_and_gate(projection: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Replace the rows of each value head by those of ``2 * up`` and then those of ``gate``.

    The factor 2 is part of KHA, see :func:`kha_megatron.heads.knock.knock`. The products are
    computed in float64.

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
            up_rows = 2 * value
            if up is not None:
                up_rows = up.double() @ up_rows
            folded[head, 0] = up_rows
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


def _fold_own_projections(source: ModelSource, mechanism: Mechanism) -> ModelSource:
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
    folded_model = replace(
        model,
        kha=model.kha.without(type(mechanism)),
        kv_channels=head_dim,
        rotary_percent=_rotary_percent(rotary_features, head_dim),
    )
    obstacle = _find_obstacle_to_padding(model, folded_model, key_dim)
    if obstacle is not None:
        raise CheckpointError(
            f"{mechanism} in {source.path} cannot be converted to standard heads: {obstacle}. "
            "Please use --architecture kha."
        )
    # attention divides scores by sqrt(head_dim), but the model was trained with sqrt(key_dim)
    query_scale = (head_dim / key_dim) ** 0.5

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        tensors = source.read(slot, meta=meta)
        if slot.mapping is ATTENTION_OUTPUT:
            (weight,) = tensors
            padded = _pad_heads(weight, model.num_attention_heads, head_dim, dim=1)
            return [padded]
        if not isinstance(slot.mapping, QKVMapping):
            return tensors
        weights = {}
        for parameter in mechanism.tensors(model.head_sizes):
            weight_slot = TensorSlot(head_mapping(parameter), slot.layer)
            (weight,) = source.read(weight_slot, meta=meta)
            weights[parameter.name] = weight
        projections = dict(zip(model.qkv.parts, tensors, strict=True))
        projections |= mechanism.fold(weights, model.head_sizes, query_scale)
        return _pad_projections(projections, folded_model)

    return replace(source, model=folded_model, read=read)


def _pad_projections(projections: Mapping[str, Tensor], folded_model: ModelConfig) -> list[Tensor]:
    """Zero-pad the heads of all projections to the head dim of the folded model."""
    layout = folded_model.qkv
    padded = []
    for name, rows in layout.parts.items():
        num_heads = layout.groups * rows.heads
        head_dim = rows.features
        if name == "value" and folded_model.kha_folded:
            # each value head consists of 2 * up and gate, which are padded separately
            num_heads *= 2
            head_dim //= 2
        padded.append(_pad_heads(projections[name], num_heads, head_dim))
    return padded


def _rotary_percent(rotary_features: int, head_dim: int) -> float:
    """Return the fraction for which ``int(head_dim * fraction)`` is ``rotary_features``."""
    fraction = rotary_features / head_dim
    if int(head_dim * fraction) != rotary_features:  # libraries round the product down
        return math.nextafter(fraction, 1.0)
    return fraction


def _find_obstacle_to_padding(
    model: ModelConfig,
    folded_model: ModelConfig,
    key_dim: int,
) -> str | None:
    """Return why the heads of ``model`` cannot be padded as in ``folded_model``, or None."""
    value_dim = model.kv_channels
    pads_keys = key_dim < value_dim
    if model.qk_layernorm and pads_keys:
        return f"QK-norm over {key_dim} features would include the zero padding up to {value_dim}"
    facts = HeadFacts(scales_queries=pads_keys)
    for mechanism in folded_model.kha.mechanisms:
        reason = mechanism.unsupported_reason(facts)
        if reason:
            return reason
    changed_parameters = set(folded_model.head_tensors) - set(model.head_tensors)
    if changed_parameters:
        return (
            f"the parameters of {folded_model.kha} have head dim {value_dim}, but folded heads "
            f"have {folded_model.kv_channels}"
        )
    return None


def _pad_heads(
    tensor: Tensor,
    num_heads: int,
    head_dim: int,
    dim: int = 0,
) -> Tensor:
    """Zero-pad all heads to size ``head_dim`` along ``dim``."""
    heads = tensor.unflatten(dim, (num_heads, -1))
    feature_dim = dim + 1
    zeros = head_dim - heads.shape[feature_dim]
    if not zeros:
        return tensor
    # F.pad takes one pair (before, after) per dimension, starting from the last one
    dims_after = heads.dim() - 1 - feature_dim
    padding = (0, 0) * dims_after + (0, zeros)
    return pad(heads, padding).flatten(dim, feature_dim)
