"""Read the KHA config and KHA matrices from a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import HeadSizes, Knock, Projection
from kha_megatron.heads.registry import mechanism_types
from kha_megatron.model.fields import rows
from kha_megatron.model.model_config import ModelConfig

_ATTENTION = "self_attention.linear_proj.weight"
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
Checkpoint = Any
"""A ``MegatronCheckpoint`` or an ``HFCheckpoint``. Only the latter has a ``config``."""
_ANY = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)  # for tensor names, any size will do


def read_kha_config(checkpoint: Checkpoint) -> KHAConfig | None:
    """Read the KHA config from a checkpoint's training arguments or ``config.json``.

    For Megatron checkpoints, we also make sure that the config matches the tensors. Raises
    CheckpointError if it doesn't.
    """
    if hasattr(checkpoint, "config"):
        return KHAConfig.from_entries(checkpoint.config)
    kha = KHAConfig.from_entries(checkpoint.args)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    latent = bool(checkpoint.args.get("multi_latent_attention"))
    if key := _find_mismatch(shapes, kha or KHAConfig(), latent):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {key} does not match the KHA config in the training "
            f"arguments ({kha or 'nothing'}). The arguments were probably modified."
        )
    return kha


def check_same_heads(path: Path, stored: KHAConfig | None, kha: KHAConfig) -> None:
    """Raise CheckpointError if a run is resumed with a different KHA config."""
    saved = stored or KHAConfig()
    if saved.to_dict(start=False) != kha.to_dict(start=False):
        remedy = "Resume with the same --kha-* arguments, or start without --load"
        if not saved.mechanisms and saved.attention == kha.attention:
            remedy += ", or use --kha-upcycle to add KHA to this checkpoint"
        raise CheckpointError(
            f"{path} was trained with KHA on {saved}, but the command line specifies {kha}. "
            f"{remedy}."
        )


def check_same_sizes(path: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a model is resumed with other sizes (Megatron's arguments)."""
    before, now = ModelConfig.from_arguments(saved), ModelConfig.from_arguments(given)
    if not (before and now) or None in (before.num_layers, now.num_layers):
        return
    for row in rows(ModelConfig):
        old, new = getattr(before, row.field), getattr(now, row.field)
        if row.field in _SIZES and old != new:
            raise CheckpointError(
                f"{row.flag} is {new or 'not set'}, but {path} was trained with {old or 'none'}. "
                "Use the sizes of that run, or start a new run in another directory."
            )


def _find_mismatch(
    shapes: Mapping[str, tuple[int, ...]], kha: KHAConfig, latent: bool
) -> str | None:
    """Find a KHA tensor that's missing or unexpected. This only compares names and the number of
    stacked matrices."""
    names = tuple(f"self_attention.{name}_" for name in (Knock.name, *mechanism_types()))
    wanted = {
        (key.removesuffix(_ATTENTION) + tensor.key, len(tensor.matrices))
        for key in shapes
        if key.endswith(_ATTENTION)
        for tensor in kha.tensors(replace(_ANY, latent=latent))
    }
    stored = {
        (key, (0, 0, 0, *shape)[-3] if names[0] in key else 0)
        for key, shape in shapes.items()
        if any(name in key for name in names)
    }
    return min((key for key, _ in wanted ^ stored), default=None)


def read_knock_weights(checkpoint: Checkpoint) -> dict[tuple[int, Projection], Any]:
    """Load all KHA matrices. They're meant to be used as ``x @ W``.

    Returns:
        Dict from ``(attention layer, projection)`` to tensors of shape ``[num_matrices, head_dim,
        head_dim]``.

    Raises:
        CheckpointError: If there are no KHA matrices, or they don't match the config.
    """
    kha = read_kha_config(checkpoint)
    if kha is None or not kha.variants:
        raise CheckpointError(
            f"No KHA matrices found in {checkpoint.path} (KHA config: {kha or 'none'})."
        )
    tensors = kha.knock.tensors(_ANY)
    if not hasattr(checkpoint, "config"):
        return {
            (layer, tensor.heads): weight
            for tensor in tensors
            for layer, weight in enumerate(checkpoint.layer_tensors(tensor.key))
        }
    layers = checkpoint.config.get("num_hidden_layers")
    stored = {key for key in checkpoint.keys() if "_knock." in key}  # noqa: SIM118
    places = {
        (layer, tensor.heads): [f"model.layers.{layer}.{name}" for name in tensor.hf_names]
        for tensor in tensors
        for layer in range(min(len(stored), layers if type(layers) is int else 0))
    }
    if differing := stored.symmetric_difference(chain.from_iterable(places.values())):
        raise CheckpointError(
            f"{checkpoint.path}: {len(differing)} KHA matrices are missing or unexpected for the "
            f"config {kha}, e.g. {min(differing)}."
        )
    return {place: checkpoint.linears(keys) for place, keys in places.items()}
