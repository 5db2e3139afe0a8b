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


class _Watched(NamedTuple):
    """A module whose output is checked."""

    order: tuple[float, int]
    name: str
    module: Any


class _Weight(NamedTuple):
    """This rank's shard of a parameter."""

    order: tuple[float, int]
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
    watched: list[_Watched] = []
    for model in models:
        watched += _watched_modules(model)
    largest = torch.zeros(len(watched), dtype=torch.float32, device=torch.cuda.current_device())
    for index, entry in enumerate(watched):
        entry.module.register_forward_hook(_recorder(largest, index))

    @contextmanager
    def checked(chunks: list[_Model], groups: Any) -> Iterator[None]:
        ddp_configs = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
        overlaps = any(config.overlap_grad_reduce for config in ddp_configs)
        if overlaps:  # gradients are not complete until finalization
            yield
        summed_by = "--overlap-grad-reduce" if overlaps else None
        if _uses_fsdp2(models):
            summed_by = "--use-torch-fsdp2"
        _check(models, watched, largest, summed_by)
        largest.zero_()
        if not overlaps:
            yield

    wrap_grad_finalization(models, checked)


def _uses_fsdp2(models: list[_Model]) -> bool:
    for model in models:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return True
    return False


def _watched_modules(model: _Model) -> list[_Watched]:
    watched: list[_Watched] = []
    if model.config.cuda_graph_impl == "none":  # captured modules must not have hooks
        watched += _watched_submodules(model)
    if model.post_process:
        watched.append(_Watched((_LAST, 1), "the loss or the logits", model))
    return watched


def _watched_submodules(model: _Model) -> Iterator[_Watched]:
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        yield _Watched((_FIRST, 0), "embedding", embedding)
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        layer_name = f"decoder.layers.{number}"
        for name, module in layer.named_modules():
            if isinstance(module, KnockingHeads):
                yield _Watched((number, 0), f"{layer_name}.{name}", module)
        yield _Watched((number, 1), layer_name, layer)
    for name in ("final_layernorm", "final_norm"):  # of GPTModel and HybridModel
        norm = getattr(model.decoder, name, None)
        if norm is not None:
            yield _Watched((_LAST, 0), f"decoder.{name}", norm)


def _recorder(largest: Tensor, index: int) -> Callable:
    def record(module: _Model, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        if isinstance(output, tuple):
            output = output[0]
        with torch.no_grad():
            low, high = torch.aminmax(output)  # propagates NaN, as does maximum
            magnitude = torch.maximum(-low, high)
            largest[index] = torch.maximum(largest[index], magnitude)

    return record


def _check(
    models: list[_Model],
    watched: list[_Watched],
    largest: Tensor,
    summed_by: str | None,
) -> None:
    gradients = []
    for weight in _weights(models):
        if weight.gradient is not None:
            gradients.append(weight.gradient)
    norm = torch.nn.utils.get_total_norm(gradients).to(largest)
    magnitudes = torch.cat([largest, norm.view(1)])
    is_bad = ~torch.isfinite(magnitudes).all()

    def search() -> _Finding | None:
        return _first_finding(models, watched, largest, summed_by)

    first = _first_on_any_rank(is_bad, search)
    if first is None:
        return
    if first.kind == _PARAMETER:
        cause = (
            "The weights were already bad before this step, because of an earlier optimizer step "
            "or the loaded checkpoint."
        )
    else:
        cause = "No weight was changed."
    raise NonFiniteError(
        f"{first.text}. Training stopped before the optimizer step. {cause} Restart to resume from "
        "the last checkpoint. If the error comes back, look at that layer, or restart with a lower "
        "--lr and --override-opt-param-scheduler."
    )


def find_non_finite_parameter(models: list[_Model]) -> str | None:
    """Find the first parameter with NaN or Inf. Must be called on all ranks.

    Returns:
        A description like ``NaN in 1 of 9 elements of parameter ... on rank 0`` (the same on all
        ranks), or None if all parameters are finite.
    """
    finite = [torch.isfinite(weight.parameter).all() for weight in _weights(models)]
    is_bad = ~torch.stack(finite).all()

    def search() -> _Finding | None:
        return min(_bad_parameters(models), default=None)

    first = _first_on_any_rank(is_bad, search)
    return None if first is None else first.text


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
    is_bad = torch.zeros((), dtype=torch.bool, device=torch.cuda.current_device())
    for _, state in states:
        is_bad |= ~torch.isfinite(state).all().to(is_bad.device)

    def search() -> _Finding | None:
        for position, (name, state) in enumerate(states):
            if not torch.isfinite(state).all():
                text = f"{_count(state)} optimizer state {name}"
                return _Finding(_PARAMETER, (_FIRST, position), text)
        return None

    first = _first_on_any_rank(is_bad, search)
    return None if first is None else first.text


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


def _first_on_any_rank(is_bad: Tensor, search: Callable[[], _Finding | None]) -> _Finding | None:
    """Search on all ranks if ``is_bad`` on any. Return the first finding, which names its ranks."""
    flag = is_bad.int()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return None
    findings: list[_Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, search())
    first = min(filter(None, findings), default=None)
    if first is None:
        return None
    ranks = [str(rank) for rank, finding in enumerate(findings) if finding == first]
    noun = "rank" if len(ranks) == 1 else "ranks"
    return first._replace(text=f"{first.text} on {noun} {', '.join(ranks)}")


def _bad_parameters(models: list[_Model]) -> Iterator[_Finding]:
    for weight in _weights(models):
        if not torch.isfinite(weight.parameter).all():
            text = f"{_count(weight.parameter)} parameter {weight.name}"
            yield _Finding(_PARAMETER, weight.order, text)


def _first_finding(
    models: list[_Model],
    watched: list[_Watched],
    largest: Tensor,
    summed_by: str | None,
) -> _Finding | None:
    findings = list(_bad_parameters(models))
    for entry, peak in zip(watched, largest.tolist(), strict=True):
        if not math.isfinite(peak):
            value = "NaN" if math.isnan(peak) else "Inf"
            text = f"{value} in the output of {entry.name}"
            findings.append(_Finding(_ACTIVATION, entry.order, text))
    note = f", summed over data-parallel ranks ({summed_by})," if summed_by else ""
    for weight in _weights(models):
        gradient = weight.gradient
        if gradient is not None and not torch.isfinite(gradient).all():
            text = f"{_count(gradient)} the gradient of {weight.name}{note}"
            layer, position = weight.order
            findings.append(_Finding(_GRADIENT, (-layer, -position), text))
    return min(findings, default=None)


def _weights(models: Iterable[_Model]) -> Iterator[_Weight]:
    for model in models:
        layers = model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for position, (name, parameter) in enumerate(model.named_parameters()):
            order = _FIRST if name.startswith("embedding.") else _LAST
            local_layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            if local_layer is not None:
                order = int(local_layer[1]) + offset
                name = f"decoder.layers.{order}.{name[local_layer.end() :]}"
            yield _Weight(
                (order, position),
                name,
                _local_shard(parameter),
                _local_shard(gradient_of(parameter)),
            )


def _local_shard(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _count(tensor: Tensor) -> str:
    value = "NaN" if tensor.isnan().any() else "Inf"
    count = int((~tensor.isfinite()).sum())
    return f"{value} in {count} of {tensor.numel()} elements of"
