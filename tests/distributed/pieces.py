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
                data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
                yield Piece(tensor.key, tensor.global_shape, tensor.global_offset, as_array(data))


@contextmanager
def _replaced(chunk: Any, value: Callable[[Any], Tensor]) -> Iterator[None]:
    """Replace parameters with ``value(parameter)``. Keep the attributes that Megatron reads.

    Changing the dtype of a parameter's data instead would drop autograd's hooks.
    """
    new = {}
    for parameter in chunk.parameters():
        data = value(parameter).view(parameter.shape)
        new[id(parameter)] = torch.nn.Parameter(data, requires_grad=False)
        new[id(parameter)].__dict__.update(parameter.__dict__)
    held = [
        (m, name, p) for m in chunk.modules() for name, p in m._parameters.items() if p is not None
    ]
    try:
        for module, name, parameter in held:
            module._parameters[name] = new[id(parameter)]
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


@torch.no_grad()
def fill(chunks: list[Any]) -> None:
    """Set every weight to values that do not depend on the layout.

    Noise is added to the shared matrices. At the identity, half of their gradients are zero.
    """
    for tensor in (t for chunk in chunks for t in _sharded(chunk)):
        generator = torch.Generator().manual_seed(zlib.crc32(tensor.key.encode()))
        noise = torch.randn(tensor.global_shape, generator=generator)
        own = tensor.global_offset[: tensor.prepend_axis_num]
        rest = zip(tensor.global_offset[len(own) :], tensor.local_shape, strict=True)
        noise = noise[*own, *(slice(start, start + length) for start, length in rest)]
        if ".knock_" in tensor.key:
            tensor.data += 0.3 * noise.to(tensor.data)
        elif noise.dim() < 2:
            tensor.data.copy_(0.3 * noise + ("norm" in tensor.key))
        else:
            tensor.data.copy_(noise * tensor.global_shape[-1] ** -0.5)


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
    whole: dict[str, np.ndarray] = {}
    for name, shape, offsets, data in (piece for rank in ranks for piece in rank):
        tensor = whole.setdefault(name, np.full(shape, np.nan, np.float32))
        _place(name, tensor[tuple(map(slice, offsets, np.add(offsets, data.shape)))], data)
    missing = [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def _assemble_activations(ranks: list[Result]) -> dict[str, np.ndarray]:
    seen = [activation for rank in ranks for activation in rank.activations]
    length = 1 + max(positions.max() for _, _, positions, _ in seen)
    whole: dict[str, np.ndarray] = {}
    for what, microbatch, positions, data in seen:
        name = f"{what}, microbatch {microbatch}"
        tensor = whole.setdefault(name, np.full((length, *data.shape[1:]), np.nan, np.float32))
        rows = tensor[positions]  # a copy: the positions need not be in order
        _place(name, rows, data)
        tensor[positions] = rows
    return whole


def _place(name: str, place: np.ndarray, data: np.ndarray) -> None:
    taken = ~np.isnan(place)
    differs = np.abs(place - data)[taken].max(initial=0)
    assert differs == 0, f"replicas of {name} differ by {differs}"
    place[...] = data


def quantities(ranks: list[Result]) -> dict[str, np.ndarray]:
    """Return all compared tensors of a run by name, assembled from all ranks."""
    norms = {str(rank.norms) for rank in ranks}
    assert len(norms) == 1, f"ranks disagree on the gradient norm: {norms}"
    found = {"grad norm": np.array(ranks[0].norms[:1])}
    found |= _assemble_activations(ranks)
    for part in ("initial", "filled", "gradients", "stepped", "trained"):
        tensors = assemble([getattr(rank, part) for rank in ranks])
        found |= {f"{part} {name}": tensor for name, tensor in tensors.items()}
    return found


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
    found = {name: _ratio(_norm(got[name] - want[name]), want[name]) for name in want}
    for name in [name.removeprefix("stepped ") for name in want if name.startswith("stepped ")]:
        update = want[f"stepped {name}"] - want[f"filled {name}"]
        rounding = epsilon * _norm(want[f"stepped {name}"])
        off = _norm(got[f"stepped {name}"] - want[f"stepped {name}"])
        found[f"update {name}"] = _ratio(max(0.0, off - rounding), update)
    return found


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def _ratio(norm: float, to: np.ndarray) -> float:
    return norm / max(_norm(to), 1e-12)
