"""Add head mechanisms to a trained model."""

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.tensor_mappings import HeadMapping, TensorSlot, head_mapping
from kha_megatron.conversion.transforms import weights_dtype
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.heads import HeadTensor, Knock, Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.initial import initial_weight

_DOUBLED = {
    "self_attn.q_proj.weight": "query",
    "self_attn.q_proj.bias": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.k_proj.bias": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.v_proj.bias": "value",
    "self_attn.o_proj.weight": "output",
}
"""Names of these tensors in ``Mechanism.projections_to_double``."""


def upcycle_heads(source: ModelSource, kha: HeadsConfig) -> ModelSource:
    """Add head mechanisms to a trained model. The outputs stay exactly the same.

    KHA matrices start as the identity, and input projections as zero. A sigmoid gate is then 1/2,
    so we double the preceding projection (see ``Mechanism.projections_to_double``).
    """
    old_model = source.model
    _check_upcycling(source, kha)
    merged = old_model.kha.merge(kha)
    model = replace(old_model, kha=merged)
    doubled = _count_doublings(kha)
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
        if len(names) > len(tensors):  # new rows in linear_qkv
            shape = mapping.shape(model)
            dtype = old_tensors[0].dtype
            fused = torch.empty(shape, dtype=dtype, device="meta")
            templates = mapping.split(fused, model)
            for name, template in zip(names, templates, strict=True):
                if name not in tensors:
                    tensors[name] = torch.zeros_like(template, device=device)
        upcycled = []
        for name in names:
            tensor = tensors[name]
            times = doubled[_DOUBLED.get(name, "")]
            upcycled.append(tensor * 2**times if times else tensor)
        return upcycled

    return replace(source, model=model, read=read)


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
    doubled = _count_doublings(kha)
    for mechanism in trained.mechanisms:
        if mechanism.name in added:
            raise CheckpointError(f"The model in {source.path} already uses {mechanism}.")
    if kha.attention not in (None, trained.attention):
        raise ConfigError(
            f"Upcycling to attention={kha.attention} is not supported. Please remove this setting."
        )
    for projection, variant in trained.variants.items():
        if variant != "linear" and projection in doubled:
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
