"""How the safetensors files of an architecture differ from those of the ``kha`` architecture."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.tensor_names import EMBEDDING, LM_HEAD

_GATE = "self_attn.gate_output.weight"


class FileFormat(NamedTuple):
    """How an architecture stores the tensors of a slot."""

    layer_names: Mapping[str, str] = {}
    """Tensors in a layer that have another name."""
    prediction_names: Mapping[str, str] = {}
    """Tensors in a multi-token prediction (MTP) layer that are not stored with the layer."""
    prediction_prefix: str | None = None
    """Prefix of the other tensors in an MTP layer (default: same as in all layers)."""
    gate_in_query: Literal["head", "group"] | None = None
    """Set if ``q_proj`` includes the output gate, either after each query head or after each
    group."""
    predictions: int = 0
    """Maximum number of MTP layers."""
    shared: bool = False
    """MTP layers have copies of the embedding and LM head. Megatron always shares them."""

    def names(self, slot: TensorSlot, model: Architecture) -> list[str]:
        """Return the names of the tensors in the files."""
        is_prediction = slot.layer is not None and slot.layer >= model.num_layers
        names = []
        for name in slot.names_in_layer(model):
            if self.gate_in_query and name == _GATE:
                continue
            if is_prediction and name in self.prediction_names:
                names.append(self.prediction_names[name])
                continue
            prefix = slot.layer_prefix
            if is_prediction and self.prediction_prefix is not None:
                prefix = self.prediction_prefix
            file_name = self.layer_names.get(name, name)
            names.append(prefix + file_name)
        return names

    def copies(self, model: Architecture) -> dict[str, str]:
        """Map the copies of the embedding and LM head in MTP layers to their originals."""
        if not self.shared:
            return {}
        head = EMBEDDING if model.tied_embeddings else LM_HEAD
        copies = {}
        layers = model.num_layers + model.predictions
        for layer in range(model.num_layers, layers):
            copies[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING.hf
            copies[f"model.layers.{layer}.shared_head.head.weight"] = head.hf
        return copies

    def write(self, slot: TensorSlot, model: Architecture, parts: Sequence[Tensor]) -> list[Tensor]:
        """Convert the tensors of a slot to the format of the files."""
        tensors = list(parts)
        gate_index = self._find_gate(slot, model)
        if gate_index is None:
            return tensors
        query = tensors[0]
        gate = tensors.pop(gate_index)
        blocks = self._count_blocks(model)
        query_blocks = query.unflatten(0, (blocks, -1))
        gate_blocks = gate.unflatten(0, (blocks, -1))
        fused = torch.cat([query_blocks, gate_blocks], dim=1)
        tensors[0] = fused.flatten(0, 1)
        return tensors

    def read(self, slot: TensorSlot, model: Architecture, stored: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`write`."""
        tensors = list(stored)
        gate_index = self._find_gate(slot, model)
        if gate_index is None:
            return tensors
        blocks = self._count_blocks(model)
        fused = tensors[0].unflatten(0, (blocks, -1))
        query_rows = model.num_attention_heads * model.kv_channels
        query, gate = fused.tensor_split([query_rows // blocks], dim=1)
        tensors[0] = query.flatten(0, 1)
        tensors.insert(gate_index, gate.flatten(0, 1))
        return tensors

    def _find_gate(self, slot: TensorSlot, model: Architecture) -> int | None:
        """Return the index of the gate in the tensors of a slot, if the files fuse it."""
        if self.gate_in_query is None:
            return None
        names = slot.names_in_layer(model)
        if _GATE not in names:
            return None
        return names.index(_GATE)

    def _count_blocks(self, model: Architecture) -> int:
        """Return the number of alternating blocks of query and gate in ``q_proj``."""
        if self.gate_in_query == "head":
            return model.num_attention_heads
        return model.num_query_groups


STANDARD = FileFormat()
