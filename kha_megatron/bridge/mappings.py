"""Parameter mappings for KHA models, generated from ``kha_megatron.conversion.table``.

Wildcards in parameter names are layer index and expert index, in this order, e.g.
``model.layers.*.mlp.experts.*.up_proj.weight``. We only list one name per norm, as Megatron-Bridge
knows about the alternatives.
"""

from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)
from torch import Tensor, nn

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.conversion.rows import HeadRow, QKVRow, Row, VocabularyRow, head_row
from kha_megatron.conversion.table import OUTPUT_LAYER, tensor_slots
from kha_megatron.hf import KHAModelConfig

MEGATRON, HF = "decoder.layers.*.", "model.layers.*."

_EVERYTHING = from_hf_config(
    KHAModelConfig(
        num_hidden_layers=2,
        attention_bias=True,
        num_experts=1,
        moe_intermediate_size=1,
        mlp_layer_types=["dense", "sparse"],
        scoring_func="sigmoid",
        shared_expert_intermediate_size=1,
        shared_expert_gate=True,
    ).to_dict()
)
"""Used to enumerate all tensors that a model in Megatron-Bridge can have."""
_SLOTS = {slot.row: slot for slot in tensor_slots(_EVERYTHING)}.values()
_KINDS = (AutoMapping, GatedMLPMapping, QKVMapping)
"""Indexed by the number of Hugging Face tensors minus 1."""


class VocabularyMapping(AutoMapping):
    """Mapping for embedding and output layer. Adds or removes Megatron's vocab padding."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        # If TP > 1, padding is already handled by Megatron-Bridge.
        rows = len(megatron_module.get_parameter("weight"))
        padding = rows - len(hf_weights) if self.tp_size == 1 else 0
        if padding > 0:
            hf_weights = nn.functional.pad(hf_weights, (0, 0, 0, padding))
        return super().hf_to_megatron(hf_weights, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        gathered = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight[: self.vocab_size] for name, weight in gathered.items()}

    def resolve(self, captures: tuple[str, ...]) -> "VocabularyMapping":
        return type(self)(self.megatron_param, self.hf_param, self.vocab_size)


class PackedMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping for Megatron parameters that pack several Hugging Face tensors.

    Used for weights of head mechanisms, and for ``linear_qkv`` if a mechanism adds rows to it.

    Args:
        megatron_param (str): Megatron parameter name.
        hf_param (dict[str, str]): Hugging Face tensor names, in the order they are packed.
        row (Row): Table entry that splits and joins the tensors.
        model (Architecture): Model architecture, needed for the shapes.
    """

    def __init__(
        self, megatron_param: str, hf_param: dict[str, str], row: Row, model: Architecture
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self._row, self._model = row, model
        self._sharded = ColumnParallelMapping(megatron_param, megatron_param)
        self._replicated = ReplicatedMapping(megatron_param, megatron_param)

    @property
    def _tensor_parallel(self) -> MegatronParamMapping[Tensor]:
        row = self._row
        if isinstance(row, HeadRow) and row.tensor and row.tensor.ranks(self.tp_size) == 1:
            return self._replicated
        return self._sharded

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        parts = [hf_weights[name] for name in self.hf_param]
        whole = torch.cat(self._row.join(parts, self._model))
        return self._tensor_parallel.hf_to_megatron(whole, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        found = self._tensor_parallel.megatron_to_hf(megatron_weights, megatron_module)
        return {
            name: part.contiguous()
            for whole in found.values()
            for name, part in zip(
                self.hf_param.values(), self._row.split(whole, self._model), strict=True
            )
        }

    def resolve(self, captures: tuple[str, ...]) -> "PackedMapping":
        ours, theirs = self._resolve_names(captures)
        return type(self)(ours, theirs, self._row, self._model)


def build_mappings(config: KHAModelConfig | None) -> list[MegatronParamMapping[Any]]:
    """Build the parameter mappings for a model.

    Note: ``config`` is None when Megatron-Bridge handles an adapter. The result does not include
    embeddings and mechanisms then.
    """
    found: list[MegatronParamMapping[Any]] = []
    model = None if config is None else from_hf_config(config.to_dict())
    plain = model is None or list(model.qkv.parts) == list(_EVERYTHING.qkv.parts)
    for row, layer, _ in _SLOTS:
        if isinstance(row, QKVRow) and model is not None and not plain:
            found.append(_packed(row, model))
        elif not isinstance(row, VocabularyRow):
            found += _unpacked(row, layer is not None)
        elif config is not None and not (config.tie_word_embeddings and row is OUTPUT_LAYER):
            found.append(VocabularyMapping(row.names[0], row.hf, config.vocab_size))
    if model is None:
        return found
    return [*found, *(_packed(head_row(tensor), model) for tensor in model.head_tensors)]


def _packed(row: Row, model: Architecture) -> PackedMapping:
    names = {name: HF + name for name in row.hf_names(model)}
    return PackedMapping(MEGATRON + row.names[0], names, row, model)


def _unpacked(row: Row, in_layer: bool) -> list[MegatronParamMapping[Any]]:
    ours, theirs = (MEGATRON, HF) if in_layer else ("", "")
    keys, parts = [ours + row.names[0]], row.hf_names(_EVERYTHING)
    if row.per_expert:
        # with grouped GEMM (weight0, weight1, ...) and in SequentialMLP
        matrix, theirs = row.names[0].rpartition("experts.")[2], f"{HF}mlp.experts.*."
        keys = [f"{ours}mlp.experts.{key}" for key in (f"{matrix}*", f"local_experts.*.{matrix}")]
    # AutoMapping looks at the module type, which does not work for a bare parameter.
    is_bare = row.names[0].endswith("gate_weight")
    kind = ReplicatedMapping if is_bare else _KINDS[len(parts) - 1]
    return [kind(key, *(theirs + part for part in parts)) for key in keys]
