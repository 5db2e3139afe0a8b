"""Stop before the optimizer step if anything is not finite, and report where it started.

Megatron's ``--check-for-nan-in-loss-and-grad`` checks the loss and gradient buckets, names no layer
or tensor, and skips the first iteration of each run. Here each layer records its largest output
magnitude on the device. Once per step, one number that includes the gradient norm is read, and
tensors are searched only if it is not finite. If only the norm's squares overflow, training
continues.
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
from kha_megatron.mcore.gradients import around_finalization, gradient_of
from kha_megatron.mcore.knocking import KnockingHeads

Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or a module of one."""
_FIRST, _LAST = -1.0, math.inf  # before and after all layers


class NotFinite(NamedTuple):
    """A finding. The smallest one over all ranks is the cause.

    Bad parameters cause bad activations (first in forward order), which cause bad gradients (first
    in backward order).
    """

    kind: int
    order: tuple[float, int]
    text: str


class _Site(NamedTuple):
    order: tuple[float, int]
    name: str


def stop_before_non_finite_steps(models: list[Model]) -> None:
    """Check every step of these pipeline stages. Call it on every rank, before training.

    Raises ``NonFiniteError`` on every rank. Costs one pass over the layers' outputs and one over
    the gradients, one all-reduce, and one device synchronization per step. With
    ``overlap_grad_reduce`` and FSDP2, gradients are checked after the sum over data-parallel ranks.
    With CUDA graphs, the layers' outputs are not checked.
    """
    sites: list[_Site] = []
    outputs = [_watched(model) for model in models]
    count = sum(map(len, outputs))
    largest = torch.zeros(count, dtype=torch.float32, device=torch.cuda.current_device())
    for site, module in (pair for watched in outputs for pair in watched):
        module.register_forward_hook(_recorder(largest, len(sites)))
        sites.append(site)

    @contextmanager
    def checked(chunks: list[Model], groups: Any) -> Iterator[None]:
        wrapped = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
        overlaps = any(config.overlap_grad_reduce for config in wrapped)
        if overlaps:  # until then the gradients may be on their way
            yield
        summed_by = "--overlap-grad-reduce" if overlaps else None
        if any(isinstance(p, DTensor) for model in models for p in model.parameters()):
            summed_by = "--use-torch-fsdp2"
        _check(models, sites, largest, summed_by)
        largest.zero_()
        if not overlaps:
            yield

    around_finalization(models, checked)


def _watched(model: Model) -> list[tuple[_Site, Model]]:
    """Return embedding, knocked heads, layers, final norm and the output of one stage."""
    found = [((_FIRST, 0), "embedding", getattr(model, "embedding", None))]
    for layer in model.decoder.layers:
        number, name = layer.layer_number - 1, f"decoder.layers.{layer.layer_number - 1}"
        for inner, module in layer.named_modules():
            if isinstance(module, KnockingHeads):
                found.append(((number, 0), f"{name}.{inner}", module))
        found.append(((number, 1), name, layer))
    norm = getattr(model.decoder, "final_layernorm", None)
    found.append(((_LAST, 0), "decoder.final_layernorm", norm))
    if model.config.cuda_graph_impl != "none":
        found = []  # a module that is captured must not have hooks
    if model.post_process:
        found.append(((_LAST, 1), "the loss or the logits", model))
    return [(_Site(order, name), module) for order, name, module in found if module is not None]


def _recorder(largest: Tensor, index: int) -> Callable:
    def record(module: Model, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        output = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            low, high = torch.aminmax(output)  # which keep a NaN, as the maximum does
            largest[index] = torch.maximum(largest[index], torch.maximum(-low, high))

    return record


def _check(models: list[Model], sites: list[_Site], largest: Tensor, summed_by: str | None) -> None:
    gradients = [gradient for *_, gradient in _parameters(models) if gradient is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(largest)
    bad = (~torch.isfinite(torch.cat([largest, norm.view(1)])).all()).int()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if not bad.item():
        return
    findings: list[NotFinite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, _first_finding(models, sites, largest, summed_by))
    first = min(filter(None, findings), default=None)
    if first is None:
        return
    ranks = [rank for rank, finding in enumerate(findings) if finding == first]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    raise NonFiniteError(
        f"{first.text} on {where}: training stopped before the optimizer step, no weight was "
        "changed and nothing saved: start again to resume from the last checkpoint; if it comes "
        "back, look at that layer and lower --lr"
    )


def _first_finding(
    models: list[Model], sites: list[_Site], largest: Tensor, summed_by: str | None
) -> NotFinite | None:
    found = []
    parameters = list(_parameters(models))
    for order, name, parameter, _ in parameters:
        if not torch.isfinite(parameter).all():
            found.append(NotFinite(0, order, f"{_amount(parameter)} parameter {name}"))
    for site, peak in zip(sites, largest.tolist(), strict=True):
        if not math.isfinite(peak):
            what = "NaN" if math.isnan(peak) else "Inf"
            found.append(NotFinite(1, site.order, f"{what} in the output of {site.name}"))
    note = f", summed over data-parallel ranks ({summed_by})," if summed_by else ""
    for (layer, position), name, _, gradient in parameters:
        if gradient is not None and not torch.isfinite(gradient).all():
            text = f"{_amount(gradient)} the gradient of {name}{note}"
            found.append(NotFinite(2, (-layer, -position), text))
    return min(found, default=None)


def _parameters(
    models: Iterable[Model],
) -> Iterator[tuple[tuple[float, int], str, Tensor, Tensor | None]]:
    """Yield forward order, checkpoint name (layers from 0 over all stages), and local shards of the
    parameter and of its gradient."""
    for model in models:
        layers = model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for position, (name, parameter) in enumerate(model.named_parameters()):
            order = _FIRST if name.startswith("embedding.") else _LAST
            if local := re.match(r"decoder\.layers\.(\d+)\.", name):
                order = int(local[1]) + offset
                name = f"decoder.layers.{order}.{name[local.end() :]}"
            gradient = gradient_of(parameter)
            held = gradient if gradient is None else _held(gradient)
            yield (order, position), name, _held(parameter), held


def _held(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _amount(tensor: Tensor) -> str:
    kind = "NaN" if tensor.isnan().any() else "Inf"
    return f"{kind} in {int((~tensor.isfinite()).sum())} of {tensor.numel()} elements of"
