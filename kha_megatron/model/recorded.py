"""What an opened checkpoint or Hugging Face folder says of its heads, and their learnt matrices.

A checkpoint is anything with what the protocols name: reading files is ``kha_megatron.checkpoint``.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kha_megatron.config import KHAConfig, mechanism_types
from kha_megatron.errors import CheckpointError
from kha_megatron.heads import HeadSizes, Knock, Projection
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.model import Model

_LAYERS = "decoder.layers."
_ROWS = ".self_attention.linear_qkv.weight"
_ATTENTION = "self_attention.linear_proj.weight"
"""Every attention layer has it, so it tells how the layers of a checkpoint are named."""
_ANY = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)
"""Neither a tensor's name nor how many matrices are stacked in it depends on the sizes, but which
there are may depend on the kind of attention."""


class _Megatron(Protocol):
    """``checkpoint.megatron.MegatronCheckpoint``, as far as it is asked here."""

    path: Path

    @property
    def args(self) -> dict[str, Any]: ...
    def keys(self) -> Mapping[str, Any]: ...
    def layers_with(self, suffix: str) -> list[int]: ...
    def layer_tensor(self, layer: int, suffix: str) -> Any: ...


@runtime_checkable
class _HuggingFace(Protocol):
    """``checkpoint.hf_reader.HFCheckpoint``, as far as it is asked here."""

    path: Path

    @property
    def config(self) -> dict[str, Any]: ...
    def keys(self) -> Mapping[str, Any]: ...
    def linears(self, keys: list[str], /) -> Any: ...


def kha_of(checkpoint: _Megatron | _HuggingFace) -> KHAConfig | None:
    """What the heads have, as Megatron's arguments or ``config.json`` record it.

    Returns:
        None for a model that was not made with KHA in mind.

    Raises:
        CheckpointError: Megatron's arguments and the tensors contradict each other.
        ConfigError: the record names a variant that does not exist.
    """
    if isinstance(checkpoint, _HuggingFace):
        return KHAConfig.recorded(checkpoint.config)
    kha = KHAConfig.recorded(checkpoint.args)
    latent = bool(checkpoint.args.get("multi_latent_attention"))
    wanted = stacked(kha or KHAConfig(), multi_latent=latent)
    stored: dict[str, set[int]] = {}
    shapes = {key: info.shape for key, info in checkpoint.keys().items()}
    for key, count in matrices_stored(shapes).items():
        stored.setdefault(key[key.index("self_attention.") :], set()).add(count)
    for suffix in sorted(wanted.keys() | stored.keys()):
        if stored.get(suffix) != ({wanted[suffix]} if suffix in wanted else None):
            raise CheckpointError(
                f"{checkpoint.path}: the training arguments record KHA on {kha or 'nothing'}, and "
                f"the tensors hold {_count(stored.get(suffix))} of {suffix}: the checkpoint is of "
                "another version, or its arguments were changed"
            )
    if kha is not None:
        check_rows(checkpoint.path, shapes, checkpoint.args, kha, "its training arguments record")
    return kha


def check_rows(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, Any],
    kha: KHAConfig,
    whose: str,
) -> None:
    """Refuse rows of ``linear_qkv`` that are not those of the heads that are asked for.

    Args:
        path: the checkpoint.
        shapes: of its tensors.
        arguments: Megatron's, by name. Sizes that they leave open are not compared.
        kha: what the heads have.
        whose: who asks for them, as the message says it.

    Raises:
        CheckpointError: naming both numbers.
    """
    model = Model.of(arguments, kha)
    if model is None or model.multi_latent_attention:
        return
    wanted = model.qkv.rows
    for key, shape in shapes.items():
        if not key.endswith(_ROWS) or len(shape) < 2 or shape[-2] == wanted:
            continue
        raise CheckpointError(
            f"{path}: {key} has {shape[-2]} rows, and {whose} {model.num_attention_heads} query "
            f"and {model.num_query_groups} key/value heads of {model.kv_channels} with {kha}, "
            f"which have {wanted}: use the heads that it was trained with"
        )


def check_same_heads(
    path: Path,
    stored: KHAConfig | None,
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, Any],
    kha: KHAConfig,
) -> None:
    """Refuse to go on from a checkpoint with heads other than its own.

    Args:
        path: the checkpoint.
        stored: what it records, see :func:`kha_of`.
        shapes: of its tensors.
        arguments: Megatron's of the run that would go on, by name, all or only some.
        kha: what the heads of that run have.

    Raises:
        CheckpointError: naming both, with the tensors that differ.
    """
    saved = stored or KHAConfig()
    if saved.to_dict(start=False) != kha.to_dict(start=False):
        remedy = "resume with the same --kha-* arguments, or start without --load"
        if not saved.mechanisms and saved.attention == kha.attention:
            remedy += ", or start a new run from it with --kha-upcycle"
        raise CheckpointError(
            f"{path} was trained with KHA on {saved}, and the command line asks for {kha}"
            f"{_differences(shapes, kha, bool(arguments.get('multi_latent_attention')))}: {remedy}"
        )
    if stored is not None and not arguments.get("use_checkpoint_args"):
        check_rows(path, shapes, arguments, kha, "the command line asks for")


def _differences(shapes: Mapping[str, tuple[int, ...]], kha: KHAConfig, latent: bool) -> str:
    """The tensors by which a checkpoint differs from a model of this configuration."""
    wanted = {
        key.removesuffix(_ATTENTION) + name: matrices
        for key in shapes
        if key.endswith(_ATTENTION)
        for name, matrices in stacked(kha, multi_latent=latent).items()
    }
    stored = matrices_stored(shapes)
    kinds = {
        "missing": wanted.keys() - stored.keys(),
        "unexpected": stored.keys() - wanted.keys(),
        "with another number of matrices": {
            key for key in wanted.keys() & stored.keys() if wanted[key] != stored[key]
        },
    }
    return "".join(f" ({_named(keys)} {kind})" for kind, keys in kinds.items() if keys)


def _named(keys: set[str]) -> str:
    first = sorted(keys)[:3]
    more = f" and {len(keys) - len(first)} more" if len(keys) > len(first) else ""
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} {', '.join(first)}{more}"


def stacked(kha: KHAConfig, *, multi_latent: bool) -> dict[str, int]:
    """Names of a layer's tensors, below ``decoder.layers.{layer}.``, and how many matrices each
    stacks (0 for what is no stack of matrices)."""
    return {t.key: len(t.matrices) for t in kha.tensors(replace(_ANY, latent=multi_latent))}


def matrices_stored(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Of the tensors of any mechanism in a Megatron checkpoint, how many matrices each stacks.

    Args:
        shapes: of all tensors, a layer's alone or stacked over the layers.
    """
    names = [f".self_attention.{name}_" for name in (Knock.name, *mechanism_types())]
    return {
        key: (0, 0, 0, *shape)[-3] if names[0] in key else 0
        for key, shape in shapes.items()
        if _LAYERS in key and any(name in key for name in names)
    }


def knock_weights(
    checkpoint: _Megatron | _HuggingFace,
) -> dict[tuple[int, Projection], Any]:
    """The head-shared matrices by layer (from 0) and projection: tensors ``[n, D, D]``, ``x @ W``.

    Raises:
        CheckpointError: there are none, the record and the tensors contradict each other, or the
            checkpoint is damaged.
    """
    kha = kha_of(checkpoint)
    tensors = kha.knock.tensors(_ANY) if kha else ()
    if isinstance(checkpoint, _HuggingFace):
        return _of_hf(checkpoint, kha)
    if kha is None or not tensors:
        raise CheckpointError(
            f"{checkpoint.path} holds no knocking-heads matrices: it was trained with "
            + ("the baseline preset" if kha else "plain Megatron")
        )
    return {
        (layer, tensor.heads): checkpoint.layer_tensor(layer, tensor.key)
        for tensor in tensors
        for layer in checkpoint.layers_with(tensor.key)
    }


def _of_hf(checkpoint: _HuggingFace, kha: KHAConfig | None) -> dict[tuple[int, Projection], Any]:
    file = checkpoint.path / "config.json"
    if kha is None or not kha.variants:
        raise CheckpointError(
            f"{file} records no knocking heads ({', '.join(f'kha_{p}' for p in PROJECTIONS)})"
        )
    layers = checkpoint.config.get("num_hidden_layers")
    keys = checkpoint.keys()
    if type(layers) is not int or not 0 < layers <= len(keys):
        raise CheckpointError(
            f"{file} has num_hidden_layers={layers!r}, and the folder {len(keys)} tensors"
        )
    places = {
        (layer, tensor.heads): [f"model.layers.{layer}.{name}" for name in tensor.hf_names]
        for tensor in kha.knock.tensors(_ANY)
        for layer in range(layers)
    }
    stored = {key for key in keys if "_knock." in key}
    if differing := stored.symmetric_difference(chain.from_iterable(places.values())):
        raise CheckpointError(
            f"{checkpoint.path}: {file.name} records {kha} in {layers} layers, but "
            f"{len(differing)} matrices are missing or too many, {min(differing)} for one"
        )
    return {place: checkpoint.linears(keys) for place, keys in places.items()}


def _count(stored: set[int] | None) -> str:
    return " and ".join(map(str, sorted(stored))) + " matrices" if stored else "none"
