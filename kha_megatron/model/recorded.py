"""Read the KHA configuration and the shared matrices of an opened checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kha_megatron.config import KHAConfig, mechanism_types
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import HeadSizes, Knock, Projection

_LAYERS = "decoder.layers."
_ATTENTION = "self_attention.linear_proj.weight"
"""A tensor of every attention layer."""
_ANY = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
"""Placeholder sizes: names and numbers of stacked matrices do not depend on them."""


class _Megatron(Protocol):
    """The part of ``checkpoint.megatron.MegatronCheckpoint`` that is used here."""

    path: Path

    @property
    def args(self) -> dict[str, Any]: ...
    def keys(self) -> Mapping[str, Any]: ...
    def layers_with(self, suffix: str) -> list[int]: ...
    def layer_tensor(self, layer: int, suffix: str) -> Any: ...


@runtime_checkable
class _HuggingFace(Protocol):
    """The part of ``checkpoint.hf_reader.HFCheckpoint`` that is used here."""

    path: Path

    @property
    def config(self) -> dict[str, Any]: ...
    def keys(self) -> Mapping[str, Any]: ...
    def linears(self, keys: list[str], /) -> Any: ...


def read_kha_config(checkpoint: _Megatron | _HuggingFace) -> KHAConfig | None:
    """Return the KHA configuration that Megatron's arguments or ``config.json`` record, if any.

    Raises:
        CheckpointError: Megatron's arguments and the tensors contradict each other.
        ConfigError: the recorded configuration does not exist.
    """
    if isinstance(checkpoint, _HuggingFace):
        return KHAConfig.from_entries(checkpoint.config)
    kha = KHAConfig.from_entries(checkpoint.args)
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    latent = bool(checkpoint.args.get("multi_latent_attention"))
    if key := _differing(shapes, kha or KHAConfig(), latent):
        raise CheckpointError(
            f"{checkpoint.path}: the training arguments record KHA on {kha or 'nothing'}, which "
            f"does not fit the tensor {key}. The arguments were changed."
        )
    return kha


def check_same_heads(path: Path, stored: KHAConfig | None, kha: KHAConfig) -> None:
    """Check that a run has the head mechanisms ``kha`` of the checkpoint that it resumes from.

    Args:
        stored: the checkpoint's configuration, see :func:`read_kha_config`.

    Raises:
        CheckpointError: naming both configurations.
    """
    saved = stored or KHAConfig()
    if saved.to_dict(start=False) != kha.to_dict(start=False):
        remedy = "Resume with the same --kha-* arguments, or start without --load"
        if not saved.mechanisms and saved.attention == kha.attention:
            remedy += ", or start a new run from it with --kha-upcycle"
        raise CheckpointError(
            f"{path} was trained with KHA on {saved}, but the command line asks for {kha}. "
            f"{remedy}."
        )


def _differing(shapes: Mapping[str, tuple[int, ...]], kha: KHAConfig, latent: bool) -> str | None:
    """Return a tensor of a head mechanism that only the checkpoint or only ``kha`` has.

    Knocks are compared with their number of matrices.
    """
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
        if _LAYERS in key and any(name in key for name in names)
    }
    return min((key for key, _ in wanted ^ stored), default=None)


def read_knock_weights(checkpoint: _Megatron | _HuggingFace) -> dict[tuple[int, Projection], Any]:
    """Return the head-shared matrices ``[n, D, D]``, for ``x @ W``, by layer and projection.

    Raises:
        CheckpointError: there are none, the record and the tensors contradict each other, or the
            checkpoint is damaged.
    """
    kha = read_kha_config(checkpoint)
    if kha is None or not kha.variants:
        raise CheckpointError(
            f"{checkpoint.path} records no knocking heads, only {kha or 'plain Megatron'}."
        )
    tensors = kha.knock.tensors(_ANY)
    if not isinstance(checkpoint, _HuggingFace):
        return {
            (layer, tensor.heads): checkpoint.layer_tensor(layer, tensor.key)
            for tensor in tensors
            for layer in checkpoint.layers_with(tensor.key)
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
            f"{checkpoint.path}: config.json records KHA on {kha}, but {len(differing)} matrices "
            f"are missing or unexpected, such as {min(differing)}"
        )
    return {place: checkpoint.linears(keys) for place, keys in places.items()}
