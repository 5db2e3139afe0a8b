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

    For example, ``mlp.router.weight`` in layer 3 has the key ``decoder.layers.3.mlp.router.weight``
    in a GPTModel and ``decoder.layers.7.mlp.router.weight`` in a HybridModel.

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
        index = layer if model.gpt_model else _hybrid_index(name, layer)
        return f"{LAYERS}{index}.{name}"
    prediction = f"mtp.layers.{layer - model.layers}"
    if name.startswith(_IN_PREDICTION):
        return f"{prediction}.{name}"
    if model.gpt_model:
        return f"{prediction}.transformer_layer.{name}"
    index = _hybrid_index(name, layer=0)  # an MTP layer is a HybridModel with one layer
    return f"{prediction}.mtp_model_layer.layers.{index}.{name}"


def _hybrid_index(name: str, layer: int) -> int:
    """Return the index in a HybridModel, where the MLP is a layer of its own."""
    attention_index = 2 * layer
    if name.startswith(_IN_ATTENTION):
        return attention_index
    return attention_index + 1


def gpt_name(hybrid_name: str) -> str:
    """Translate the name of a HybridModel's parameter to that of the same GPTModel.

    For example, layers 6 and 7 become layer 3. Does not change parameters of MTP layers.
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
    """Index in the stacked tensor: ``(layer,)``, ``(expert,)``, ``(layer, expert)``, or ``()`` for
    the whole tensor."""


@dataclass(frozen=True)
class LocatedTensors:
    """Result of :func:`locate_tensors`."""

    locations: dict[TensorSlot, TensorLocation]
    missing: list[str]
    """Keys of the slots that the checkpoint lacks."""
    unexpected: set[str]
    """Keys of tensors that belong to no slot."""


def locate_tensors(
    stored_tensors: Mapping[str, StoredTensor],
    model: ModelConfig,
) -> LocatedTensors:
    """Find out where each slot is stored in a Megatron checkpoint."""
    locations_by_key = _unstack_layers(stored_tensors)
    unexpected = set(locations_by_key)
    locations = {}
    missing = []
    for slot in tensor_slots(model):
        keys = slot.mapping.megatron_names
        if slot.layer is not None:
            keys = [checkpoint_key(name, slot.layer, model) for name in keys]
        stored_keys = [key for key in keys if key in locations_by_key]
        unexpected.difference_update(stored_keys)
        if not stored_keys:
            missing.append(keys[0])
            continue
        location = locations_by_key[stored_keys[0]]
        if slot.expert is not None:
            index = (*location.index, slot.expert)
            location = TensorLocation(location.key, index)
        locations[slot] = location
    return LocatedTensors(locations, missing, unexpected)


def _unstack_layers(stored_tensors: Mapping[str, StoredTensor]) -> dict[str, TensorLocation]:
    """Locate the tensors of each layer by the keys that they would have without stacking."""
    locations = {}
    for key, stored_tensor in stored_tensors.items():
        is_in_layer = key.startswith(LAYERS)
        is_single_layer = _SINGLE_LAYER.match(key)
        if is_in_layer and not is_single_layer and stored_tensor.shape:
            name = key.removeprefix(LAYERS)
            layers = stored_tensor.shape[0]
            for layer in range(layers):
                layer_key = f"{LAYERS}{layer}.{name}"
                locations[layer_key] = TensorLocation(key, (layer,))
        else:
            locations[key] = TensorLocation(key, ())
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
