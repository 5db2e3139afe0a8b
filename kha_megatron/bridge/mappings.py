"""Parameter mappings for KHA models, built from ``kha_megatron.conversion.tensor_names``.

Wildcards in parameter names are layer index and expert index, in this order, e.g.
``model.layers.*.mlp.experts.*.up_proj.weight``. We only list one name per norm, as Megatron-Bridge
knows about the alternatives.
"""

from typing import Any

import torch
from megatron.bridge.models.conversion import param_mapping as bridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from torch import Tensor, nn

from kha_megatron.conversion import tensor_mappings, tensor_names
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.conversion.megatron_keys import gpt_name
from kha_megatron.conversion.tensor_mappings import HeadMapping, TensorMapping, head_mapping
from kha_megatron.hf import KHAModelConfig
from kha_megatron.model.config import ModelConfig

_MEGATRON_LAYER = "decoder.layers.*."
_HF_LAYER = "model.layers.*."
_LAYER_MAPPINGS: tuple[TensorMapping, ...] = (
    tensor_names.FUSED_INPUT_NORM,
    tensor_names.QKV,
    tensor_names.QKV_BIAS,
    *tensor_names.QK_NORM,
    tensor_names.ATTENTION_OUTPUT,
    tensor_names.FUSED_MLP_NORM,
    *tensor_names.MLP,
    tensor_names.MLP_NORM,
    tensor_names.ROUTER,
    tensor_names.EXPERT_BIAS,
    *tensor_names.EXPERT,
    *tensor_names.SHARED_EXPERT,
    tensor_names.SHARED_EXPERT_GATE,
)
"""All tensors that a layer in Megatron-Bridge can have, except for those of head mechanisms."""


class PaddedVocabularyMapping(bridge.AutoMapping):
    """Mapping for embedding and output layer. Adds or removes Megatron's vocab padding."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        # If TP > 1, padding is already handled by Megatron-Bridge.
        padded_weight = megatron_module.get_parameter("weight")
        padding_rows = len(padded_weight) - len(hf_weights)
        if self.tp_size == 1 and padding_rows > 0:
            hf_weights = nn.functional.pad(hf_weights, (0, 0, 0, padding_rows))
        return super().hf_to_megatron(hf_weights, megatron_module)

    def megatron_to_hf(
        self,
        megatron_weights: Tensor | None,
        megatron_module: nn.Module | None,
    ) -> dict[str, Tensor]:
        gathered = super().megatron_to_hf(megatron_weights, megatron_module)
        hf_weights = {}
        for name, weight in gathered.items():
            hf_weights[name] = weight[: self.vocab_size]
        return hf_weights

    def resolve(self, captures: tuple[str, ...]) -> "PaddedVocabularyMapping":
        return type(self)(self.megatron_param, self.hf_param, self.vocab_size)


class PackedMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping for Megatron parameters that pack several Hugging Face tensors.

    Used for weights of head mechanisms, and for ``linear_qkv`` if a mechanism adds rows to it.

    Args:
        megatron_param (str): Megatron parameter name.
        hf_param (dict[str, str]): Hugging Face tensor names by their names in a layer, in the order
            they are packed, e.g. ``{"NAME.weight": "model.layers.*.NAME.weight", ...}``.
        mapping (TensorMapping): Splits and joins the tensors.
        model (ModelConfig): Model architecture, needed for the shapes.
    """

    def __init__(
        self,
        megatron_param: str,
        hf_param: dict[str, str],
        mapping: TensorMapping,
        model: ModelConfig,
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self._mapping = mapping
        self._model = model
        # these only distribute the packed tensor, which has no name in Hugging Face
        self._sharded = bridge.ColumnParallelMapping(megatron_param, hf_param=megatron_param)
        self._replicated = bridge.ReplicatedMapping(megatron_param, hf_param=megatron_param)

    @property
    def _parallel_mapping(self) -> MegatronParamMapping[Tensor]:
        """Mapping that distributes the packed tensor over the tensor-parallel ranks."""
        mapping = self._mapping
        if isinstance(mapping, HeadMapping) and mapping.tensor.ranks(self.tp_size) == 1:
            return self._replicated
        return self._sharded

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        parts = [hf_weights[name_in_layer] for name_in_layer in self.hf_param]
        packed = torch.cat(self._mapping.join(parts, self._model))
        return self._parallel_mapping.hf_to_megatron(packed, megatron_module)

    def megatron_to_hf(
        self,
        megatron_weights: Tensor | None,
        megatron_module: nn.Module | None,
    ) -> dict[str, Tensor]:
        gathered = self._parallel_mapping.megatron_to_hf(megatron_weights, megatron_module)
        full_names = self.hf_param.values()
        hf_weights = {}
        for packed in gathered.values():
            parts = self._mapping.split(packed, self._model)
            for name, part in zip(full_names, parts, strict=True):
                hf_weights[name] = part.contiguous()
        return hf_weights

    def resolve(self, captures: tuple[str, ...]) -> "PackedMapping":
        megatron_param, hf_param = self._resolve_names(captures)
        return type(self)(megatron_param, hf_param, self._mapping, self._model)


class HybridMappingRegistry(MegatronMappingRegistry):
    """Mappings for a HybridModel, from those for a GPTModel.

    Each layer of the GPTModel is two layers here: its attention, and then its MLP.
    """

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> MegatronParamMapping[Any] | None:
        return super().megatron_to_hf_lookup(gpt_name(megatron_param_name))

    def hf_to_megatron_lookup(self, hf_param_name: str) -> MegatronParamMapping[Any] | None:
        raise NotImplementedError("Only Megatron names can be looked up for hybrid models.")


def build_mappings(config: KHAModelConfig | None) -> list[MegatronParamMapping[Any]]:
    """Build the parameter mappings for a model.

    Note: ``config`` is None when Megatron-Bridge handles an adapter. The result does not include
    embeddings and mechanisms then.
    """
    if config is None:
        return _base_mappings(model=None)
    model = from_hf_config(config.to_dict())
    mappings = [_vocabulary_mapping(tensor_names.EMBEDDING, config), *_base_mappings(model)]
    if not config.tie_word_embeddings:
        mappings.append(_vocabulary_mapping(tensor_names.LM_HEAD, config))
    for parameter in model.head_tensors:
        mappings.append(_packed_mapping(head_mapping(parameter), model))
    return mappings


def _base_mappings(model: ModelConfig | None) -> list[MegatronParamMapping[Any]]:
    """Build the mappings for the final norm and for layers without mechanisms."""
    mappings: list[MegatronParamMapping[Any]] = []
    for mapping in _LAYER_MAPPINGS:
        if mapping in tensor_names.EXPERT:
            mappings += _expert_mappings(mapping)
        elif model is not None and _has_mechanism_rows(mapping, model):
            mappings.append(_packed_mapping(mapping, model))
        else:
            megatron_param = _MEGATRON_LAYER + mapping.megatron
            mappings.append(_plain_mapping(mapping, megatron_param))
    final_norm = tensor_names.FINAL_NORM
    mappings.append(bridge.AutoMapping(final_norm.megatron, final_norm.hf))
    return mappings


def _vocabulary_mapping(
    mapping: tensor_mappings.VocabularyMapping,
    config: KHAModelConfig,
) -> PaddedVocabularyMapping:
    return PaddedVocabularyMapping(mapping.megatron, mapping.hf, config.vocab_size)


def _expert_mappings(mapping: TensorMapping) -> list[MegatronParamMapping[Any]]:
    """Return the mappings for grouped GEMM (weight0, weight1, ...) and for SequentialMLP."""
    weight = mapping.megatron.removeprefix("mlp.experts.experts.")  # e.g. linear_fc1.weight
    return [
        _plain_mapping(mapping, f"{_MEGATRON_LAYER}mlp.experts.{weight}*"),
        _plain_mapping(mapping, f"{_MEGATRON_LAYER}mlp.experts.local_experts.*.{weight}"),
    ]


def _has_mechanism_rows(mapping: TensorMapping, model: ModelConfig) -> bool:
    """Return True for a QKV tensor that does not just consist of queries, keys and values."""
    is_qkv = isinstance(mapping, tensor_mappings.QKVMapping)
    return is_qkv and list(model.qkv.parts) != ["query", "key", "value"]


def _packed_mapping(mapping: TensorMapping, model: ModelConfig) -> PackedMapping:
    hf_param = {}
    for name in mapping.hf_names(model):
        hf_param[name] = _HF_LAYER + name
    megatron_param = _MEGATRON_LAYER + mapping.megatron
    return PackedMapping(megatron_param, hf_param, mapping, model)


def _plain_mapping(mapping: TensorMapping, megatron_param: str) -> MegatronParamMapping[Any]:
    """Return the mapping of Bridge that has the same effect as one of ours."""
    if mapping is tensor_names.SHARED_EXPERT_GATE:
        # AutoMapping looks at the module type, which does not work for a bare parameter
        hf_param = _HF_LAYER + tensor_names.SHARED_EXPERT_GATE.hf
        return bridge.ReplicatedMapping(megatron_param, hf_param)
    if isinstance(mapping, tensor_mappings.DirectMapping):
        return bridge.AutoMapping(megatron_param, _with_wildcard(mapping.hf))
    if isinstance(mapping, tensor_mappings.GatedMLPMapping):
        return bridge.GatedMLPMapping(
            megatron_param,
            gate=_with_wildcard(mapping.gate),
            up=_with_wildcard(mapping.up),
        )
    if isinstance(mapping, tensor_mappings.QKVMapping):
        assert mapping.key is not None  # only GTA has no keys
        return bridge.QKVMapping(
            megatron_param,
            q=_HF_LAYER + mapping.query,
            k=_HF_LAYER + mapping.key,
            v=_HF_LAYER + mapping.value,
        )
    raise AssertionError(mapping)


def _with_wildcard(name: str) -> str:
    return _HF_LAYER + name.format(expert="*")
