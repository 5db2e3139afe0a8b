"""Stop training before the optimizer step if there is a NaN or Inf, and report where.

Megatron's ``--check-for-nan-in-loss-and-grad`` checks the loss and the gradient buckets. It does
not tell you which layer or tensor is affected, and it skips the first iteration of each run.

Here, forward hooks record the largest output magnitude of each layer on the device. Once per step,
these magnitudes and the gradient norm are reduced to a single flag. Only if the flag is set, all
tensors are searched. (If just the squared norm overflows, the search finds nothing and training
continues.)
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kha_megatron.errors import NonFiniteError
from kha_megatron.mcore.gradients import gradient_of, wrap_grad_finalization
from kha_megatron.mcore.knocking import KnockingHeads

_Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or one of its submodules."""
_FIRST, _LAST = -1.0, math.inf  # sort before and after all layers
_PARAMETER, _ACTIVATION, _GRADIENT = range(3)


class _Finding(NamedTuple):
    """A tensor with NaN or Inf. The smallest finding over all ranks is reported as the cause.

    Parameters come first, then activations (in forward order), then gradients (in backward order).
    """

    kind: int
    order: tuple[float, int]
    text: str


_Watched = tuple[tuple[float, int], str, Any]
"""Order, name and module whose output is checked."""


def stop_before_non_finite_steps(models: list[_Model]) -> None:
    """Raise NonFiniteError on all ranks before an optimizer step with NaN or Inf.

    Must be called on all ranks before training. Each step then costs one pass over layer outputs
    and gradients, one all-reduce and one device synchronization.

    Note:
        With ``overlap_grad_reduce`` or FSDP2, gradients are checked after the data-parallel
        reduction. With CUDA graphs, layer outputs are not checked.
    """
    watched = [entry for model in models for entry in _watched_modules(model)]
    largest = torch.zeros(len(watched), dtype=torch.float32, device=torch.cuda.current_device())
    for index, (*_, module) in enumerate(watched):
        module.register_forward_hook(_recorder(largest, index))

    @contextmanager
    def checked(chunks: list[_Model], groups: Any) -> Iterator[None]:
        wrapped = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
        overlaps = any(config.overlap_grad_reduce for config in wrapped)
        if overlaps:  # gradients are not complete until finalization
            yield
        summed_by = "--overlap-grad-reduce" if overlaps else None
        if any(isinstance(p, DTensor) for model in models for p in model.parameters()):
            summed_by = "--use-torch-fsdp2"
        _check(models, watched, largest, summed_by)
        largest.zero_()
        if not overlaps:
            yield

    wrap_grad_finalization(models, checked)


def _watched_modules(model: _Model) -> list[_Watched]:
    found: list[_Watched] = [((_FIRST, 0), "embedding", getattr(model, "embedding", None))]
    for layer in model.decoder.layers:
        number, name = layer.layer_number - 1, f"decoder.layers.{layer.layer_number - 1}"
        for inner, module in layer.named_modules():
            if isinstance(module, KnockingHeads):
                found.append(((number, 0), f"{name}.{inner}", module))
        found.append(((number, 1), name, layer))
    for name in ("final_layernorm", "final_norm"):  # of GPTModel and HybridModel
        found.append(((_LAST, 0), f"decoder.{name}", getattr(model.decoder, name, None)))
    if model.config.cuda_graph_impl != "none":
        found = []  # captured modules must not have hooks
    if model.post_process:
        found.append(((_LAST, 1), "the loss or the logits", model))
    return [entry for entry in found if entry[2] is not None]


def _recorder(largest: Tensor, index: int) -> Callable:
    def record(module: _Model, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        output = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            low, high = torch.aminmax(output)  # propagates NaN, as does maximum
            largest[index] = torch.maximum(largest[index], torch.maximum(-low, high))

    return record


def _check(
    models: list[_Model], watched: list[_Watched], largest: Tensor, summed_by: str | None
) -> None:
    gradients = [gradient for *_, gradient in _parameters(models) if gradient is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(largest)
    bad = ~torch.isfinite(torch.cat([largest, norm.view(1)])).all()
    first = _first_on_any_rank(bad, lambda: _first_finding(models, watched, largest, summed_by))
    if first is None:
        return
    kind, where = first
    cause = (
        "The weights were already bad before this step, because of an earlier optimizer step or "
        "the loaded checkpoint."
        if kind == _PARAMETER
        else "No weight was changed."
    )
    raise NonFiniteError(
        f"{where}. Training stopped before the optimizer step. {cause} Restart to resume from the "
        "last checkpoint. If the error comes back, look at that layer, or restart with a lower "
        "--lr and --override-opt-param-scheduler."
    )


def find_non_finite_parameter(models: list[_Model]) -> str | None:
    """Find the first parameter with NaN or Inf. Must be called on all ranks.

    Returns:
        A description like ``NaN in 1 of 9 elements of parameter ... on rank 0`` (the same on all
        ranks), or None if all parameters are finite.
    """
    finite = [torch.isfinite(parameter).all() for _, _, parameter, _ in _parameters(models)]
    bad = ~torch.stack(finite).all()
    found = _first_on_any_rank(bad, lambda: min(_bad_parameters(models), default=None))
    return None if found is None else found[1]


def find_non_finite_optimizer_state(optimizer: Any) -> str | None:
    """Find the first optimizer state with NaN or Inf. Must be called on all ranks.

    An Inf in Adam's ``exp_avg_sq`` turns all updates of that weight into zero, so the weight itself
    remains finite.

    Args:
        optimizer: Megatron's optimizer, or None (nothing is checked then).

    Returns:
        A description like ``Inf in 1 of 9 elements of optimizer state exp_avg_sq on rank 0`` (the
        same on all ranks), or None if all states are finite.
    """
    states = list(_optimizer_states(optimizer))
    bad = torch.zeros((), dtype=torch.bool, device=torch.cuda.current_device())
    for _, state in states:
        bad |= ~torch.isfinite(state).all().to(bad.device)

    def search() -> _Finding | None:
        for position, (name, state) in enumerate(states):
            if not torch.isfinite(state).all():
                text = f"{_count(state)} optimizer state {name}"
                return _Finding(_PARAMETER, (_FIRST, position), text)
        return None

    found = _first_on_any_rank(bad, search)
    return None if found is None else found[1]


def _optimizer_states(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over ``(name, local tensor)`` of all floating-point states."""
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        torch_optimizer = getattr(wrapper, "optimizer", None)  # None without parameters
        if torch_optimizer is None:
            continue
        for parameter_state in torch_optimizer.state.values():
            for name, state in parameter_state.items():
                if isinstance(state, DTensor):
                    state = state.to_local()
                if isinstance(state, Tensor) and state.is_floating_point():
                    yield name, state


def _first_on_any_rank(
    bad: Tensor, search: Callable[[], _Finding | None]
) -> tuple[int, str] | None:
    flag = bad.int()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return None
    findings: list[_Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, search())
    first = min(filter(None, findings), default=None)
    if first is None:
        return None
    ranks = [rank for rank, finding in enumerate(findings) if finding == first]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return first.kind, f"{first.text} on {where}"


def _bad_parameters(models: list[_Model]) -> Iterator[_Finding]:
    for order, name, parameter, _ in _parameters(models):
        if not torch.isfinite(parameter).all():
            yield _Finding(_PARAMETER, order, f"{_count(parameter)} parameter {name}")


def _first_finding(
    models: list[_Model], watched: list[_Watched], largest: Tensor, summed_by: str | None
) -> _Finding | None:
    found = list(_bad_parameters(models))
    for (order, name, _), peak in zip(watched, largest.tolist(), strict=True):
        if not math.isfinite(peak):
            what = "NaN" if math.isnan(peak) else "Inf"
            found.append(_Finding(_ACTIVATION, order, f"{what} in the output of {name}"))
    note = f", summed over data-parallel ranks ({summed_by})," if summed_by else ""
    for (layer, position), name, _, gradient in _parameters(models):
        if gradient is not None and not torch.isfinite(gradient).all():
            text = f"{_count(gradient)} the gradient of {name}{note}"
            found.append(_Finding(_GRADIENT, (-layer, -position), text))
    return min(found, default=None)


def _parameters(
    models: Iterable[_Model],
) -> Iterator[tuple[tuple[float, int], str, Tensor, Tensor | None]]:
    """Iterate over ``(order, checkpoint name, parameter, gradient)`` with local shards."""
    for model in models:
        layers = model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for position, (name, parameter) in enumerate(model.named_parameters()):
            order = _FIRST if name.startswith("embedding.") else _LAST
            if local := re.match(r"decoder\.layers\.(\d+)\.", name):
                order = int(local[1]) + offset
                name = f"decoder.layers.{order}.{name[local.end() :]}"
            tensors = parameter, gradient_of(parameter)
            shards = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
            yield (order, position), name, *shards


def _count(tensor: Tensor) -> str:
    kind = "NaN" if tensor.isnan().any() else "Inf"
    return f"{kind} in {int((~tensor.isfinite()).sum())} of {tensor.numel()} elements of"
