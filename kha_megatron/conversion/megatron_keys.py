"""Where Megatron checkpoints store tensors.

In GPTModel, a layer consists of attention and MLP. HybridModel counts them as separate layers. If
all layers of a GPTModel have the same tensors, each tensor is stacked over the layers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kha_megatron.checkpoint.megatron import LAYERS
from kha_megatron.checkpoint.torch_dist import StoredTensor
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.tensor_names import tensor_slots
from kha_megatron.model.config import ModelConfig

_SINGLE_LAYER = re.compile(re.escape(LAYERS) + r"\d+\.")
_IN_ATTENTION = ("self_attention.", "input_layernorm.")
_IN_PREDICTION = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
"""Tensors of MTP layers that are not part of an ordinary layer."""


def checkpoint_key(name: str, layer: int | None, model: ModelConfig) -> str:
    """Return the key of a tensor that is not stacked.

    Args:
        name: Megatron name without the layer.
        layer: None for tensors outside of the layers. MTP layers come after the others.
        model: Config of the model.
    """
    if layer is None:
        if name == "decoder.final_layernorm.weight" and not model.gpt_model:
            return "decoder.final_norm.weight"
        return name
    if layer < model.layers:
        index = _layer_index(name, layer, model)
        return f"{LAYERS}{index}.{name}"
    prediction = f"mtp.layers.{layer - model.layers}"
    if name.startswith(_IN_PREDICTION):
        return f"{prediction}.{name}"
    if model.gpt_model:
        return f"{prediction}.transformer_layer.{name}"
    index = _layer_index(name, 0, model)  # an MTP layer is a model with one layer
    return f"{prediction}.mtp_model_layer.layers.{index}.{name}"


def _layer_index(name: str, layer: int, model: ModelConfig) -> int:
    """Return the index that Megatron's model class gives to the layer of a tensor."""
    if model.gpt_model:
        return layer
    if name.startswith(_IN_ATTENTION):
        return 2 * layer
    return 2 * layer + 1


def gpt_name(hybrid_name: str) -> str:
    """Translate the name of a HybridModel's parameter to that of the same GPTModel.

    Inverse of :func:`checkpoint_key`. Does not change parameters of MTP layers.
    """
    match = re.fullmatch(re.escape(LAYERS) + r"(\d+)\.(.+)", hybrid_name)
    if match is None:
        return hybrid_name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    layer = int(match[1]) // 2
    return f"{LAYERS}{layer}.{match[2]}"


@dataclass(frozen=True)
class TensorLocation:
    """Where a checkpoint stores a tensor."""

    key: str
    index: tuple[int, ...]
    """Index of the layer, of the expert, or of both if tensors are stacked."""


@dataclass(frozen=True)
class LocatedTensors:
    """Result of :func:`locate_tensors`."""

    slots: dict[TensorSlot, TensorLocation]
    missing: list[str]
    """Keys of the slots that the checkpoint lacks."""
    unexpected: set[str]
    """Keys of tensors that belong to no slot."""


def locate_tensors(
    stored_tensors: Mapping[str, StoredTensor],
    model: ModelConfig,
) -> LocatedTensors:
    """Find out where each slot is stored in a Megatron checkpoint."""
    locations = _unstack_layers(stored_tensors)
    unexpected = set(locations)
    slots = {}
    missing = []
    for slot in tensor_slots(model):
        keys = slot.mapping.megatron_names
        if slot.layer is not None:
            keys = [checkpoint_key(name, slot.layer, model) for name in keys]
        keys_in_checkpoint = [key for key in keys if key in locations]
        unexpected.difference_update(keys_in_checkpoint)
        if not keys_in_checkpoint:
            missing.append(keys[0])
            continue
        location = locations[keys_in_checkpoint[0]]
        if slot.expert is not None:
            index = (*location.index, slot.expert)
            location = TensorLocation(location.key, index)
        slots[slot] = location
    return LocatedTensors(slots, missing, unexpected)


def _unstack_layers(stored_tensors: Mapping[str, StoredTensor]) -> dict[str, TensorLocation]:
    """Locate the tensors of each layer by the keys that they would have without stacking."""
    locations = {}
    for key, stored_tensor in stored_tensors.items():
        has_layer_dim = key.startswith(LAYERS) and not _SINGLE_LAYER.match(key)
        if not has_layer_dim or not stored_tensor.shape:
            locations[key] = TensorLocation(key, ())
            continue
        name = key.removeprefix(LAYERS)
        layers = stored_tensor.shape[0]
        for layer in range(layers):
            layer_key = f"{LAYERS}{layer}.{name}"
            locations[layer_key] = TensorLocation(key, (layer,))
    return locations


def is_stacked(slot: TensorSlot, model: ModelConfig) -> bool:
    """Return whether we write the tensors of all layers as one."""
    in_decoder = slot.layer is not None and slot.layer < model.layers
    return in_decoder and model.gpt_model and model.is_uniform


def written_key(name: str, slot: TensorSlot, model: ModelConfig) -> str:
    """Return the key that we write ``name`` to."""
    if is_stacked(slot, model):
        return LAYERS + name
    return checkpoint_key(name, slot.layer, model)


@dataclass(frozen=True)
class Stack:
    """Dimensions along which Megatron stacks the tensors of several layers or experts."""

    shape: tuple[int, ...]
    index: tuple[int, ...]
    """Position of a slot in the stack."""


def stack_of(slot: TensorSlot, model: ModelConfig) -> Stack:
    """Return the stack that we write a slot to (without dimensions if there is none)."""
    shape = []
    index = []
    if slot.layer is not None and is_stacked(slot, model):
        shape.append(model.layers)
        index.append(slot.layer)
    if slot.expert is not None:
        shape.append(model.experts)
        index.append(slot.expert)
    return Stack(tuple(shape), tuple(index))
