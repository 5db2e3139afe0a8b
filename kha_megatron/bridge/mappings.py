"""Which Megatron parameter is which Hugging Face tensors: ``conversion.table`` in Bridge's terms.

``*`` stands for a layer and, after it, an expert. Of the two names that norms have in Megatron,
Bridge's registry knows the other one of those written here.
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
from kha_megatron.conversion.packing import HeadParameter, QKVRows, Vocabulary
from kha_megatron.conversion.table import OUTPUT_LAYER, Row, head_row, places
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
"""A model with one of each tensor that Bridge's layers can have."""
_PLACES = {place.row: place for place in places(_EVERYTHING)}.values()
_KINDS = (AutoMapping, GatedMLPMapping, QKVMapping)
"""Mappings of one, two and three Hugging Face tensors."""


class VocabularyMapping(AutoMapping):
    """Rows of the vocabulary: Megatron's are padded to a multiple, Hugging Face's are not."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """``[vocab_size, C]`` to this rank's rows, zeros below the last entry."""
        # under several ranks Bridge pads by itself
        rows = len(megatron_module.get_parameter("weight"))
        padding = rows - len(hf_weights) if self.tp_size == 1 else 0
        if padding > 0:
            hf_weights = nn.functional.pad(hf_weights, (0, 0, 0, padding))
        return super().hf_to_megatron(hf_weights, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """``[vocab_size, C]`` by its name."""
        gathered = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight[: self.vocab_size] for name, weight in gathered.items()}

    def resolve(self, captures: tuple[str, ...]) -> "VocabularyMapping":
        """This mapping anew: there is no ``*`` in its names to fill in."""
        return type(self)(self.megatron_param, self.hf_param, self.vocab_size)


class PackedMapping(MegatronParamMapping[dict[str, Tensor]]):
    """As the table packs it: a parameter of a mechanism of the heads, or ``linear_qkv`` with the
    rows of one.

    Args:
        megatron_param: the parameter.
        hf_param: Hugging Face names of its tensors, in the order of the packing.
        row: its row of the table.
        model: of which sizes.
    """

    def __init__(
        self, megatron_param: str, hf_param: dict[str, str], row: Row, model: Architecture
    ) -> None:
        super().__init__(megatron_param, hf_param)
        self._row, self._model = row, model
        # Megatron's one projection and our modules, of which Bridge knows nothing
        self._cut = ColumnParallelMapping(megatron_param, megatron_param)
        self._whole = ReplicatedMapping(megatron_param, megatron_param)

    @property
    def _over_ranks(self) -> MegatronParamMapping[Tensor]:
        """How tensor-parallel ranks have it: cut by heads, or each all of it."""
        packing = self._row.packing
        if isinstance(packing, HeadParameter) and packing.tensor.ranks(self.tp_size) == 1:
            return self._whole
        return self._cut

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """This rank's part of the tensors together."""
        parts = [hf_weights[name] for name in self.hf_param]
        whole = torch.cat(self._row.packing.join(parts, self._model))
        return self._over_ranks.hf_to_megatron(whole, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Each tensor by its name; rows that only fill a group up are left out."""
        found = self._over_ranks.megatron_to_hf(megatron_weights, megatron_module)
        return {
            name: part.contiguous()
            for whole in found.values()
            for name, part in zip(
                self.hf_param.values(), self._row.packing.split(whole, self._model), strict=True
            )
        }

    def resolve(self, captures: tuple[str, ...]) -> "PackedMapping":
        """This mapping of one layer."""
        ours, theirs = self._resolve_names(captures)
        return type(self)(ours, theirs, self._row, self._model)


def mappings(config: KHAModelConfig | None) -> list[MegatronParamMapping[Any]]:
    """All mappings of a model.

    Args:
        config: says which matrices are stacked, whether embeddings are tied, and how many rows of
            the vocabulary are real. None (Bridge asks so for adapters, which sit in linear layers
            only) leaves those tensors out.
    """
    found: list[MegatronParamMapping[Any]] = []
    model = None if config is None else from_hf_config(config.to_dict())
    for row, layer, _ in _PLACES:
        if isinstance(row.packing, QKVRows) and model is not None and not _is_plain(model):
            found.append(_packed(row, model))
        elif not isinstance(row.packing, Vocabulary):
            found += _of_row(row, layer is not None)
        elif config is not None and not (config.tie_word_embeddings and row is OUTPUT_LAYER):
            found.append(VocabularyMapping(row.names[0], row.packing.name, config.vocab_size))
    if model is None:
        return found
    return [*found, *(_packed(head_row(tensor), model) for tensor in model.head_tensors)]


def _is_plain(model: Architecture) -> bool:
    """Whether ``linear_qkv`` has queries, keys and values, and nothing else."""
    return list(model.qkv.parts) == list(_EVERYTHING.qkv.parts)


def _packed(row: Row, model: Architecture) -> PackedMapping:
    names = {name: HF + name for name in row.packing.names(model)}
    return PackedMapping(MEGATRON + row.names[0], names, row, model)


def _of_row(row: Row, in_layer: bool) -> list[MegatronParamMapping[Any]]:
    ours, theirs = (MEGATRON, HF) if in_layer else ("", "")
    keys, parts = [ours + row.names[0]], row.packing.names(_EVERYTHING)
    if row.per_expert:
        # grouped GEMM names an expert's weights one way, a list of MLPs another
        matrix, theirs = row.names[0].rpartition("experts.")[2], f"{HF}mlp.experts.*."
        keys = [f"{ours}mlp.experts.{key}" for key in (f"{matrix}*", f"local_experts.*.{matrix}")]
    # a bare parameter of a module that is not parallel, of whose kind Bridge knows nothing
    bare = row.names[0].endswith("gate_weight")
    kind = ReplicatedMapping if bare else _KINDS[len(parts) - 1]
    return [kind(key, *(theirs + part for part in parts)) for key in keys]
