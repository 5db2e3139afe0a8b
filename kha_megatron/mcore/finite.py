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
from enum import IntEnum
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


class _Order(NamedTuple):
    """Position in the forward pass."""

    layer: float
    position: int = 0  # within the layer


_BEFORE_LAYERS = -1.0
_AFTER_LAYERS = math.inf


class _Source(IntEnum):
    PARAMETER = 0
    ACTIVATION = 1
    GRADIENT = 2


class _Finding(NamedTuple):
    """A tensor with NaN or Inf. The smallest finding over all ranks is reported as the cause.

    Parameters come first, then activations (in forward order), then gradients (in backward order).
    """

    source: _Source
    order: _Order
    description: str


class _WatchedModule(NamedTuple):
    """A module whose output is checked."""

    order: _Order
    name: str
    module: Any


class _Weight(NamedTuple):
    """This rank's shard of a parameter."""

    order: _Order
    name: str  # in checkpoints
    parameter: Tensor
    gradient: Tensor | None


def stop_before_non_finite_steps(models: list[_Model]) -> None:
    """Raise NonFiniteError on all ranks before an optimizer step with NaN or Inf.

    Must be called on all ranks before training. Each step then costs one pass over layer outputs
    and gradients, one all-reduce and one device synchronization.

    Note:
        With ``overlap_grad_reduce`` or FSDP2, gradients are checked after the data-parallel
        reduction. With CUDA graphs, layer outputs are not checked.
    """
    watched: list[_WatchedModule] = []
    for model in models:
        watched += _watched_modules(model)
    device = torch.cuda.current_device()
    peaks = torch.zeros(len(watched), dtype=torch.float32, device=device)
    for entry, peak in zip(watched, peaks.unbind(), strict=True):
        hook = _recorder(peak)
        entry.module.register_forward_hook(hook)

    def check(*, overlaps_grad_reduce: bool) -> None:
        summed_by = None
        if _uses_fsdp2(models):
            summed_by = "--use-torch-fsdp2"
        elif overlaps_grad_reduce:
            summed_by = "--overlap-grad-reduce"
        _check(models, watched, peaks, summed_by)
        peaks.zero_()

    @contextmanager
    def checked(chunks: list[_Model], groups: Any) -> Iterator[None]:
        if _overlaps_grad_reduce(chunks):  # gradients are not complete until finalization
            yield
            check(overlaps_grad_reduce=True)
        else:
            check(overlaps_grad_reduce=False)
            yield

    wrap_grad_finalization(models, checked)


def _overlaps_grad_reduce(chunks: list[_Model]) -> bool:
    for chunk in chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is not None and ddp_config.overlap_grad_reduce:
            return True
    return False


def _uses_fsdp2(models: list[_Model]) -> bool:
    for model in models:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                return True
    return False


def _watched_modules(model: _Model) -> list[_WatchedModule]:
    watched: list[_WatchedModule] = []
    if model.config.cuda_graph_impl == "none":  # captured modules must not have hooks
        watched += _watched_submodules(model)
    if model.post_process:
        end = _Order(_AFTER_LAYERS, 1)
        watched.append(_WatchedModule(end, "the loss or the logits", model))
    return watched


def _watched_submodules(model: _Model) -> Iterator[_WatchedModule]:
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        yield _WatchedModule(_Order(_BEFORE_LAYERS), "embedding", embedding)
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        layer_name = f"decoder.layers.{number}"
        start = _Order(number, 0)
        end = _Order(number, 1)
        for name, module in layer.named_modules():
            if isinstance(module, KnockingHeads):
                yield _WatchedModule(start, f"{layer_name}.{name}", module)
        yield _WatchedModule(end, layer_name, layer)
    for name in ("final_layernorm", "final_norm"):  # of GPTModel and HybridModel
        norm = getattr(model.decoder, name, None)
        if norm is not None:
            yield _WatchedModule(_Order(_AFTER_LAYERS), f"decoder.{name}", norm)


def _recorder(peak: Tensor) -> Callable:
    """Return a forward hook that raises ``peak`` to the largest magnitude in the module's output.

    The hook launches two kernels, and both propagate NaN.
    """

    def record(
        module: _Model,
        inputs: Any,
        output: Any,
    ) -> None:
        if not module.training:
            return
        if isinstance(output, tuple):
            output = output[0]
        if output.numel() == 0:
            return
        with torch.no_grad():
            magnitude = torch.linalg.vector_norm(output, math.inf)
            torch.maximum(peak, magnitude, out=peak)

    return record


def _check(
    models: list[_Model],
    watched: list[_WatchedModule],
    peaks: Tensor,
    summed_by: str | None,
) -> None:
    """Raise NonFiniteError on all ranks if a peak or the gradient norm is not finite.

    Args:
        peaks (Tensor): Largest magnitude in the outputs of each watched module.
        summed_by (str, optional): Option that has summed the gradients over data-parallel ranks.
    """
    gradients = []
    for weight in _weights(models):
        if weight.gradient is not None:
            gradients.append(weight.gradient)
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.to(peaks).view(1)
    magnitudes = torch.cat([peaks, norm])
    is_bad = ~_is_finite(magnitudes)

    def search() -> _Finding | None:
        return _first_finding(models, watched, peaks, summed_by)

    finding = _first_on_any_rank(is_bad, search)
    if finding is None:
        return
    if finding.source == _Source.PARAMETER:
        consequence = (
            "The weights were already bad before this step, because of an earlier optimizer step "
            "or the loaded checkpoint."
        )
    else:
        consequence = "No weight was changed."
    raise NonFiniteError(
        f"{finding.description}. Training stopped before the optimizer step. {consequence} Restart "
        "to resume from the last checkpoint. If the error comes back, look at that layer, or "
        "restart with a lower --lr and --override-opt-param-scheduler."
    )


def find_non_finite_parameter(models: list[_Model]) -> str | None:
    """Find the first parameter with NaN or Inf. Must be called on all ranks.

    Returns:
        A description like ``NaN in 1 of 9 elements of parameter ... on rank 0`` (the same on all
        ranks), or None if all parameters are finite.
    """
    are_finite = []
    for weight in _weights(models):
        are_finite.append(_is_finite(weight.parameter))
    is_bad = ~torch.stack(are_finite).all()

    def search() -> _Finding | None:
        return min(_bad_parameters(models), default=None)

    first = _first_on_any_rank(is_bad, search)
    if first is None:
        return None
    return first.description


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
    device = torch.cuda.current_device()
    is_bad = torch.zeros((), dtype=torch.bool, device=device)
    for _, state in states:
        is_bad |= ~_is_finite(state).to(is_bad.device)

    def search() -> _Finding | None:
        for position, (name, state) in enumerate(states):
            if not _is_finite(state):
                order = _Order(_BEFORE_LAYERS, position)
                description = f"{_describe_bad_elements(state)} optimizer state {name}"
                return _Finding(_Source.PARAMETER, order, description)
        return None

    first = _first_on_any_rank(is_bad, search)
    if first is None:
        return None
    return first.description


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
                is_tensor = isinstance(state, Tensor)
                if is_tensor and state.is_floating_point():
                    yield name, state


def _first_on_any_rank(is_bad: Tensor, search: Callable[[], _Finding | None]) -> _Finding | None:
    """Search on all ranks if ``is_bad`` on any. Return the first finding, which names its ranks."""
    flag = is_bad.int()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return None
    world_size = dist.get_world_size()
    findings: list[_Finding | None] = [None] * world_size
    dist.all_gather_object(findings, search())
    first = min(filter(None, findings), default=None)
    if first is None:
        return None
    ranks = []
    for rank, finding in enumerate(findings):
        if finding == first:
            ranks.append(str(rank))
    noun = "rank" if len(ranks) == 1 else "ranks"
    rank_list = ", ".join(ranks)
    description = f"{first.description} on {noun} {rank_list}"
    return first._replace(description=description)


def _bad_parameters(models: list[_Model]) -> Iterator[_Finding]:
    for weight in _weights(models):
        parameter = weight.parameter
        if not _is_finite(parameter):
            description = f"{_describe_bad_elements(parameter)} parameter {weight.name}"
            yield _Finding(_Source.PARAMETER, weight.order, description)


def _first_finding(
    models: list[_Model],
    watched: list[_WatchedModule],
    peaks: Tensor,
    summed_by: str | None,
) -> _Finding | None:
    """Return this rank's first finding. Parameters are as in :func:`_check`."""
    findings = list(_bad_parameters(models))
    findings += _bad_outputs(watched, peaks)
    findings += _bad_gradients(models, summed_by)
    return min(findings, default=None)


def _bad_outputs(watched: list[_WatchedModule], peaks: Tensor) -> Iterator[_Finding]:
    for entry, peak in zip(watched, peaks.tolist(), strict=True):
        if math.isfinite(peak):
            continue
        value = "NaN" if math.isnan(peak) else "Inf"
        description = f"{value} in the output of {entry.name}"
        yield _Finding(_Source.ACTIVATION, entry.order, description)


def _bad_gradients(models: list[_Model], summed_by: str | None) -> Iterator[_Finding]:
    note = ""
    if summed_by is not None:
        note = f", summed over data-parallel ranks ({summed_by}),"
    for weight in _weights(models):
        gradient = weight.gradient
        if gradient is None or _is_finite(gradient):
            continue
        layer, position = weight.order
        backward_order = _Order(-layer, -position)
        description = f"{_describe_bad_elements(gradient)} the gradient of {weight.name}{note}"
        yield _Finding(_Source.GRADIENT, backward_order, description)


def _weights(models: Iterable[_Model]) -> Iterator[_Weight]:
    for model in models:
        layers_before = 0  # on earlier pipeline stages
        if len(model.decoder.layers):
            layers_before = model.decoder.layers[0].layer_number - 1
        for position, (local_name, parameter) in enumerate(model.named_parameters()):
            layer, name = _locate(local_name, layers_before)
            gradient = gradient_of(parameter)
            yield _Weight(
                order=_Order(layer, position),
                name=name,
                parameter=_local_shard(parameter),
                gradient=_local_shard(gradient),
            )


def _locate(local_name: str, layers_before: int) -> tuple[float, str]:
    """Return the layer of a parameter, and its name in checkpoints.

    Args:
        local_name (str): Name in this pipeline stage.
        layers_before (int): Number of layers on earlier stages.
    """
    if local_name.startswith("embedding."):
        return _BEFORE_LAYERS, local_name
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name)
    if match is None:
        return _AFTER_LAYERS, local_name
    local_layer, name_in_layer = match.groups()
    layer = int(local_layer) + layers_before
    return layer, f"decoder.layers.{layer}.{name_in_layer}"


def _local_shard(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _is_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(tensor).all()


def _describe_bad_elements(tensor: Tensor) -> str:
    """Return for example ``NaN in 1 of 9 elements of``."""
    value = "NaN" if tensor.isnan().any() else "Inf"
    bad = ~tensor.isfinite()
    count = int(bad.sum())
    return f"{value} in {count} of {tensor.numel()} elements of"
