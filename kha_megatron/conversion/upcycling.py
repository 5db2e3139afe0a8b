"""Add head mechanisms to a trained model."""

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.tensor_mappings import (
    HeadMapping,
    TensorMapping,
    TensorSlot,
    head_mapping,
)
from kha_megatron.conversion.transforms import weights_dtype
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import HeadTensor, Knock, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.initial import initial_weight
from kha_megatron.model.config import ModelConfig

_PROJECTION_BY_NAME = {
    "self_attn.q_proj.weight": "query",
    "self_attn.q_proj.bias": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.k_proj.bias": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.v_proj.bias": "value",
    "self_attn.o_proj.weight": "output",
}
"""Tensors of the projections that ``Mechanism.projections_to_double`` may return."""


def upcycle_heads(source: ModelSource, kha: HeadsConfig) -> ModelSource:
    """Add head mechanisms to a trained model. The outputs stay exactly the same.

    KHA matrices start as the identity, and input projections as zero. A sigmoid gate is then 1/2,
    so we double the preceding projection (see ``Mechanism.projections_to_double``).
    """
    old_model = source.model
    _check_upcycling(source, kha)
    merged = old_model.kha.merge(kha)
    model = replace(old_model, kha=merged)
    factors = _find_factors(kha)
    new_parameters = set(model.head_tensors) - set(old_model.head_tensors)
    new_mappings = {head_mapping(parameter) for parameter in new_parameters}

    def read(slot: TensorSlot, *, meta: bool = False) -> list[Tensor]:
        device = "meta" if meta else "cpu"
        mapping = slot.mapping
        if isinstance(mapping, HeadMapping) and mapping in new_mappings:
            weight = _initial_value(mapping.tensor, device)
            dtype = weights_dtype(source, slot)
            return mapping.split(weight.to(dtype), model)
        old_names = mapping.hf_names(old_model)
        old_tensors = source.read(slot, meta=meta)
        tensors = dict(zip(old_names, old_tensors, strict=True))
        names = mapping.hf_names(model)
        new_names = set(names) - set(old_names)
        if new_names:  # rows of linear_qkv
            templates = _meta_tensors(mapping, model, old_tensors[0].dtype)
            for name in new_names:
                tensors[name] = torch.zeros_like(templates[name], device=device)
        upcycled = []
        for name in names:
            tensor = tensors[name]
            upcycled.append(tensor * factors[name] if name in factors else tensor)
        return upcycled

    return replace(source, model=model, read=read)


def _find_factors(kha: HeadsConfig) -> dict[str, int]:
    """Return the factors to multiply tensors with, by HF name."""
    doublings = _count_doublings(kha)
    factors = {}
    for name, projection in _PROJECTION_BY_NAME.items():
        if projection in doublings:
            factors[name] = 2 ** doublings[projection]
    return factors


def _meta_tensors(
    mapping: TensorMapping,
    model: ModelConfig,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return meta tensors in the shapes of the HF tensors of a mapping, by name."""
    megatron_tensor = torch.empty(mapping.shape(model), dtype=dtype, device="meta")
    names = mapping.hf_names(model)
    hf_tensors = mapping.split(megatron_tensor, model)
    return dict(zip(names, hf_tensors, strict=True))


def _check_upcycling(source: ModelSource, kha: HeadsConfig) -> None:
    """Raise an error if head mechanisms cannot be added without changing the outputs."""
    trained = source.model.kha
    if source.model.kha_folded:
        raise CheckpointError(
            f"KHA in {source.path} is folded into the projections. Please add {kha} to the "
            "unfolded model, i.e. the one that was passed to `kha-megatron convert fold`."
        )
    added = {mechanism.name for mechanism in kha.mechanisms}
    if not added:
        raise ConfigError(
            "No head mechanism to add. Please pass --kha-preset, --kha-query, --kha-key, "
            "--kha-value or --heads."
        )
    doublings = _count_doublings(kha)  # raises if a mechanism always changes the outputs
    for mechanism in trained.mechanisms:
        if mechanism.name in added:
            raise CheckpointError(f"The model in {source.path} already uses {mechanism}.")
    if kha.attention not in (None, trained.attention):
        raise ConfigError(
            f"Upcycling to attention={kha.attention} is not supported. Please remove this setting."
        )
    for projection, variant in trained.variants.items():
        if variant != "linear" and projection in doublings:
            setting = _setting_of(projection, kha)
            raise ConfigError(
                f"{setting} cannot be added without changing the outputs, because the trained "
                f"{projection}={variant} is not linear. Remove it or train from scratch."
            )


def _count_doublings(kha: HeadsConfig) -> Counter[str]:
    """Count for each projection how many mechanisms need it to be doubled."""
    counts: Counter[str] = Counter()
    for mechanism in kha.mechanisms:
        counts.update(mechanism.projections_to_double())
    return counts


def _setting_of(projection: Projection, kha: HeadsConfig) -> str:
    """Return the setting that adds a mechanism to a projection."""
    setting: str = projection
    for mechanism in kha.without(Knock).mechanisms:
        setting = mechanism.setting_of(projection) or setting
    return setting


def _initial_value(tensor: HeadTensor, device: str) -> Tensor:
    weight = torch.zeros(tensor.shape, device=device)
    if device != "meta" and not tensor.reads_input:
        matrices = weight if tensor.matrices else weight[None]
        initial_weight(matrices, tensor.initial)
    return weight
