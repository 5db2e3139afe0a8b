"""How the safetensors files of an architecture differ from those of the ``kha`` architecture."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.tensor_names import EMBEDDING, LM_HEAD
from kha_megatron.model.config import ModelConfig

_GATE = "self_attn.gate_output.weight"


class FileFormat(NamedTuple):
    """How an architecture stores the tensors of a slot."""

    layer_names: Mapping[str, str] = {}
    """Tensors in a layer that have another name."""
    prediction_names: Mapping[str, str] = {}
    """Tensors in a multi-token prediction (MTP) layer that are not stored with the layer."""
    prediction_prefix: str | None = None
    """Prefix of the other tensors in an MTP layer (default: same as in all layers)."""
    gate_in_query: Literal["after_each_head", "after_each_group"] | None = None
    """Set if ``q_proj`` includes the output gate, either after each query head or after the query
    heads of each group. For two heads in one group, the rows are ``[query 0, gate 0, query 1, gate
    1]`` or ``[query 0, query 1, gate 0, gate 1]``."""
    max_predictions: int | None = 0
    """Maximum number of MTP layers. None if there is no limit."""
    copies_embeddings: bool = False
    """MTP layers have copies of the embedding and LM head. Megatron always shares them."""

    def supports_predictions(self, count: int) -> bool:
        """Whether files can contain ``count`` MTP layers."""
        return self.max_predictions is None or count <= self.max_predictions

    def names(self, slot: TensorSlot, model: ModelConfig) -> list[str]:
        """Return the names of the tensors in the files."""
        is_prediction = slot.layer is not None and slot.layer >= model.layers
        names = []
        for name in slot.names_in_layer(model):
            if self.gate_in_query and name == _GATE:
                continue  # part of q_proj
            if is_prediction and name in self.prediction_names:
                names.append(self.prediction_names[name])
                continue
            prefix = slot.layer_prefix
            if is_prediction and self.prediction_prefix is not None:
                prefix = self.prediction_prefix
            file_name = self.layer_names.get(name, name)
            names.append(prefix + file_name)
        return names

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Map the copies of the embedding and LM head in MTP layers to their originals."""
        if not self.copies_embeddings:
            return {}
        head = EMBEDDING if model.tied_embeddings else LM_HEAD
        copies = {}
        for layer in range(model.layers, model.layers + model.predictions):
            copies[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING.hf
            copies[f"model.layers.{layer}.shared_head.head.weight"] = head.hf
        return copies

    def write(self, slot: TensorSlot, model: ModelConfig, parts: Sequence[Tensor]) -> list[Tensor]:
        """Convert the tensors of a slot to the format of the files."""
        if not self._fuses_gate(slot, model):
            return list(parts)
        query, gate, *others = parts
        blocks = self._count_blocks(model)
        query_blocks = query.unflatten(0, (blocks, -1))
        gate_blocks = gate.unflatten(0, (blocks, -1))
        fused = torch.cat([query_blocks, gate_blocks], dim=1)
        return [fused.flatten(0, 1), *others]

    def read(self, slot: TensorSlot, model: ModelConfig, stored: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`write`."""
        if not self._fuses_gate(slot, model):
            return list(stored)
        fused, *others = stored
        blocks = self._count_blocks(model)
        query_rows = model.num_attention_heads * model.kv_channels // blocks
        fused_blocks = fused.unflatten(0, (blocks, -1))
        query_blocks = fused_blocks[:, :query_rows]
        gate_blocks = fused_blocks[:, query_rows:]
        return [query_blocks.flatten(0, 1), gate_blocks.flatten(0, 1), *others]

    def _fuses_gate(self, slot: TensorSlot, model: ModelConfig) -> bool:
        """Return True if the files store query and gate, the first two tensors, as one."""
        if self.gate_in_query is None:
            return False
        return _GATE in slot.names_in_layer(model)

    def _count_blocks(self, model: ModelConfig) -> int:
        """Return the number of alternating blocks of query and gate in ``q_proj``."""
        if self.gate_in_query == "after_each_head":
            return model.num_attention_heads
        return model.num_query_groups


STANDARD = FileFormat()
