"""Parameter mappings between Megatron and Hugging Face, built from ``conversion.table``.

In parameter names, the first ``*`` is the layer index and the second one the expert index. Note
that Megatron-Bridge derives the alternative names of norms itself.
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
"""Model that has all tensors that are supported in Megatron-Bridge."""
_SLOTS = {slot.row: slot for slot in tensor_slots(_EVERYTHING)}.values()
_KINDS = (AutoMapping, GatedMLPMapping, QKVMapping)
"""Mapping classes for one, two and three Hugging Face tensors."""


class VocabularyMapping(AutoMapping):
    """Mapping for embeddings ``[vocab_size, C]``, whose vocabulary size is padded in Megatron."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        # With tensor parallelism, Megatron-Bridge pads the weight itself.
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
    """Mapping for a parameter of a mechanism, or for ``linear_qkv`` with additional rows.

    Args:
        megatron_param: Name of the Megatron parameter.
        hf_param: Names of the Hugging Face tensors, in the order of the parts of ``row``.
        row: Entry of ``conversion.table`` for the parameter.
        model: Architecture, from which the shapes are computed.
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
    """Build the mappings for all parameters of a model.

    Megatron-Bridge passes None as the config of an adapter. In this case, the mappings for
    embeddings and mechanisms are omitted.
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
        # The first name is used by grouped GEMM, and the second one by sequential MLPs.
        matrix, theirs = row.names[0].rpartition("experts.")[2], f"{HF}mlp.experts.*."
        keys = [f"{ours}mlp.experts.{key}" for key in (f"{matrix}*", f"local_experts.*.{matrix}")]
    # AutoMapping infers the sharding from the module type, but this parameter has no module.
    is_bare = row.names[0].endswith("gate_weight")
    kind = ReplicatedMapping if is_bare else _KINDS[len(parts) - 1]
    return [kind(key, *(theirs + part for part in parts)) for key in keys]
