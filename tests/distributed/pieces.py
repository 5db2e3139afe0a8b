"""Assemble the shards of a run to whole tensors, and compare them with those of one process.

Megatron's ``sharded_state_dict`` gives for each shard the name of the whole tensor and the offsets
in it. Weights and gradients of any layout are therefore filled, gathered and compared in one way.
Replicas must be bitwise equal.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Piece(NamedTuple):
    """A shard of a tensor on one rank."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: np.ndarray


class Result(NamedTuple):
    """The result of one rank for one configuration."""

    initial: list[Piece]
    """The initial shared matrices."""
    activations: list[tuple[str, int, np.ndarray, np.ndarray]]
    """``(what, microbatch, positions, [len(positions), ...])`` of the first step."""
    filled: list[Piece]
    gradients: list[Piece]
    stepped: list[Piece]
    """The weights after the first, clipped step."""
    trained: list[Piece]
    norms: list[float]


def pieces(chunks: list[Any], value: Callable[[Any], Tensor] | None = None) -> Iterator[Piece]:
    """Yield this rank's shard of every weight, or of ``value(parameter)`` instead."""
    for chunk in chunks:
        with _replaced(chunk, value) if value is not None else nullcontext():
            for tensor in _sharded(chunk):
                added_axes = (None,) * tensor.prepend_axis_num
                yield Piece(
                    tensor.key,
                    tensor.global_shape,
                    tensor.global_offset,
                    as_array(tensor.data.detach()[added_axes]),
                )


@contextmanager
def _replaced(chunk: Any, value: Callable[[Any], Tensor]) -> Iterator[None]:
    """Replace parameters with ``value(parameter)``. Keep the attributes that Megatron reads.

    Changing the dtype of a parameter's data instead would drop autograd's hooks.
    """
    replacements = {}
    for parameter in chunk.parameters():
        data = value(parameter).view(parameter.shape)
        replacement = torch.nn.Parameter(data, requires_grad=False)
        replacement.__dict__.update(parameter.__dict__)
        replacements[id(parameter)] = replacement
    originals = []
    for module in chunk.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                originals.append((module, name, parameter))
    try:
        for module, name, parameter in originals:
            module._parameters[name] = replacements[id(parameter)]
        yield
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter


@torch.no_grad()
def fill(chunks: list[Any]) -> None:
    """Set every weight to values that do not depend on the layout.

    Noise is added to the shared matrices. At the identity, half of their gradients are zero.
    The norms multiply by about 1. If they multiply by 2, the model is so sensitive that rounding
    its initial weights changes the weights after ten steps by 3e-5.
    """
    for chunk in chunks:
        neutral_norm = 0 if chunk.config.layernorm_zero_centered_gamma else 1
        for tensor in _sharded(chunk):
            noise = _noise_of_shard(tensor)
            if ".knock_" in tensor.key:
                tensor.data += 0.3 * noise.to(tensor.data)
            elif noise.dim() < 2:
                mean = neutral_norm if "norm" in tensor.key else 0
                tensor.data.copy_(0.3 * noise + mean)
            else:
                tensor.data.copy_(noise * tensor.global_shape[-1] ** -0.5)


def _noise_of_shard(tensor: Any) -> Tensor:
    """Draw noise for a whole tensor, and return the part of this shard."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
    noise = torch.randn(tensor.global_shape, generator=generator)
    index: list[int | slice] = list(tensor.global_offset)
    for axis, length in enumerate(tensor.local_shape, tensor.prepend_axis_num):
        start = tensor.global_offset[axis]
        index[axis] = slice(start, start + length)
    return noise[tuple(index)]


def _sharded(chunk: Any) -> Iterator[Any]:
    """Yield the ShardedTensors of a model. They share memory with parameters and buffers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = chunk.sharded_state_dict()
    apply_factories(state)
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def gathered(tensor: Tensor) -> Tensor:
    """Return a parameter or gradient. Gather it if torch's FSDP sharded it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy().copy()


def assemble(ranks: list[list[Piece]]) -> dict[str, np.ndarray]:
    """Assemble whole tensors from the pieces of all ranks.

    Raises:
        AssertionError: replicas differ, or a part of a tensor is on no rank.
    """
    tensors: dict[str, np.ndarray] = {}
    for pieces_of_rank in ranks:
        for piece in pieces_of_rank:
            if piece.name not in tensors:
                tensors[piece.name] = np.full(piece.shape, np.nan, np.float32)
            ends = np.add(piece.offsets, piece.data.shape)
            region = tensors[piece.name][tuple(map(slice, piece.offsets, ends))]
            _write_once(piece.name, region, piece.data)
    missing = [name for name, tensor in tensors.items() if np.isnan(tensor).any()]
    assert not missing, f"no rank holds all of {missing}"
    return tensors


def _assemble_activations(ranks: list[Result]) -> dict[str, np.ndarray]:
    activations = []
    for rank in ranks:
        activations += rank.activations
    length = 1 + max(positions.max() for _, _, positions, _ in activations)
    tensors: dict[str, np.ndarray] = {}
    for what, microbatch, positions, data in activations:
        name = f"{what}, microbatch {microbatch}"
        if name not in tensors:
            tensors[name] = np.full((length, *data.shape[1:]), np.nan, np.float32)
        rows = tensors[name][positions]  # a copy: the positions need not be in order
        _write_once(name, rows, data)
        tensors[name][positions] = rows
    return tensors


def _write_once(name: str, region: np.ndarray, data: np.ndarray) -> None:
    """Write ``data`` to ``region``. What another rank wrote there before must be equal."""
    is_written = ~np.isnan(region)
    differs = np.abs(region - data)[is_written].max(initial=0)
    assert differs == 0, f"replicas of {name} differ by {differs}"
    region[...] = data


def quantities(ranks: list[Result]) -> dict[str, np.ndarray]:
    """Return all compared tensors of a run by name, assembled from all ranks."""
    norms = {str(rank.norms) for rank in ranks}
    assert len(norms) == 1, f"ranks disagree on the gradient norm: {norms}"
    compared = {"grad norm": np.array(ranks[0].norms[:1])}
    compared |= _assemble_activations(ranks)
    for field in ("initial", "filled", "gradients", "stepped", "trained"):
        tensors = assemble([getattr(rank, field) for rank in ranks])
        for name, tensor in tensors.items():
            compared[f"{field} {name}"] = tensor
    return compared


def errors(
    got: dict[str, np.ndarray],
    want: dict[str, np.ndarray],
    epsilon: float = 2**-23,
) -> dict[str, float]:
    """Return the relative error of the norm of every quantity and of the first step's update.

    An update is the difference of two rounded weights. An error up to that rounding, ``epsilon`` of
    their dtype, is not counted.
    """
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    relative = {}
    for quantity, expected in want.items():
        error = _norm(got[quantity] - expected)
        relative[quantity] = _ratio(error, expected)
        kind, _, name = quantity.partition(" ")
        if kind == "stepped":
            update = expected - want[f"filled {name}"]
            rounding = epsilon * _norm(expected)
            relative[f"update {name}"] = _ratio(max(0.0, error - rounding), update)
    return relative


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def _ratio(norm: float, to: np.ndarray) -> float:
    return norm / max(_norm(to), 1e-12)
