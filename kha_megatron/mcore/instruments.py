"""Log KHA metrics to TensorBoard and W&B during training.

=============================  =====================================================================
``kha-distance/P-M``           Distance of matrix ``M`` (e.g. ``gate``) of projection ``P`` (e.g.
                               ``value``) from its initialization. See
                               :func:`kha_megatron.heads.diagnostics.measure`.
``kha-gate-openness/P``        Mean of the gate ``2 * sigmoid(x @ W_gate)`` (initially 1).
``kha-gate-spread/P``          Standard deviation of the gate (initially 0).
``kha-attention-sink/head-H``  Average attention to the first token.
``kha-attention-sink/mean``    The same, averaged over heads.
``kha-NAME``                   Metrics of head mechanisms, e.g. ``kha-gate-score``,
                               ``kha-gate-shut`` and ``kha-moh-load``.
=============================  =====================================================================

Names end with ``/layer-L``, where layers are counted from 0. Only the first microbatch on each
data-parallel rank is measured (distances do not depend on the data).

Fused attention does not return the attention weights, so we recompute them for a few queries of the
first sequence. This is not possible with windowed attention, learnable sinks, packed sequences or
talking heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.diagnostics import measure, sink_queries, sink_terms
from kha_megatron.heads.knock import MATRICES
from kha_megatron.mcore.gradients import wrap_grad_finalization
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.local_modules import token_positions

_Model = Any  # a GPTModel or HybridModel, or one of its modules
Write = Callable[[dict[str, float], int], None]

_DISTANCE, _SINK = "kha-distance", "kha-attention-sink"
_OPENNESS, _SPREAD = "kha-gate-openness", "kha-gate-spread"


def watch_heads(
    models: Sequence[_Model],
    kha: HeadsConfig,
    *,
    interval: int,
    iteration: Callable[[], int],
    write: Write,
) -> None:
    """Register hooks that log the metrics above every ``interval`` iterations.

    Must be called on all ranks before training. With CUDA graphs, only ``kha-distance`` is logged.

    Args:
        models (Sequence): Model chunks on this rank, before they are wrapped in DDP.
        iteration (callable): Returns the current iteration, starting at 1.
        write (callable): Called on all ranks with a dict of metrics and the iteration.
    """
    if get_model_config(models[0]).cuda_graph_impl == "full_iteration":
        raise ConfigError("--kha-log-interval does not support --cuda-graph-impl full_iteration.")
    instruments = _Instruments(models, kha, lambda: iteration() % interval == 0)

    @contextmanager
    def measured(chunks: list[_Model], groups: Any) -> Iterator[None]:
        yield
        if iteration() % interval == 0:
            write(instruments.read(), iteration())

    wrap_grad_finalization(models, measured)


class _Instruments:
    """Hooks that accumulate a sum and a count per metric and layer."""

    def __init__(
        self, models: Sequence[_Model], kha: HeadsConfig, is_due: Callable[[], bool]
    ) -> None:
        self.config = get_model_config(models[0])
        self.kha = kha
        self.is_due = is_due
        device = torch.cuda.current_device()
        self.nothing = torch.zeros((), dtype=torch.float64, device=device), 0.0
        self.sums: dict[tuple[str, int], tuple[Tensor, float]] = {}  # sums and counts
        self.measured: set[tuple[int, str]] = set()
        self.attentions: dict[int, Any] = {
            layer.layer_number - 1: attention
            for model in models
            for layer in model.decoder.layers
            if isinstance(attention := getattr(layer, "self_attention", None), Attention)
        }
        if self.config.cuda_graph_impl == "none":
            for number, attention in self.attentions.items():
                self._watch(number, attention)

    def _watch(self, layer: int, attention: Any) -> None:
        def add_sink(module: _Model, inputs: tuple[Any, ...]) -> None:
            query, key, *_ = inputs
            if self._has_plain_scores(query) and self._is_first_call(module, layer, _SINK):
                self._add_sink(layer, attention, query[:, 0], key[:, 0])

        def add_figure(name: str, figure: Callable[[], Tensor]) -> None:
            if self._is_first_call(attention, layer, name):
                self._add_figure(layer, f"kha-{name}", figure)

        attention.core_attention.register_forward_pre_hook(add_sink)
        if hasattr(attention, "head_ranks"):
            attention.head_ranks.listeners.append(add_figure)
        for projection, knocking in _knockings(attention):
            if "gate" in MATRICES[knocking.variant]:
                # not a pre-hook, because parameters may not be gathered before the forward pass
                knocking.register_forward_hook(partial(self._add_gate, layer, projection))

    def _is_first_call(self, module: _Model, layer: int, name: str) -> bool:
        """Whether this is the first microbatch of the step (and not a recomputation)."""
        if not module.training or not self.is_due() or (layer, name) in self.measured:
            return False
        self.measured.add((layer, name))
        return True

    @torch.no_grad()
    def _add_gate(
        self, layer: int, projection: str, knocking: KnockingHeads, inputs: Any, output: Tensor
    ) -> None:
        if not inputs or not self._is_first_call(knocking, layer, projection):
            return
        matrix = knocking.weight[MATRICES[knocking.variant].index("gate")]
        gate = 2 * torch.sigmoid((inputs[0] @ matrix).float())
        total = gate.sum(dtype=torch.float64)
        squares = gate.square().sum(dtype=torch.float64)
        self._add(layer, f"{_OPENNESS}/{projection}", total, gate.numel())
        self._add(layer, f"{_SPREAD}/{projection}", squares, gate.numel())

    def _has_plain_scores(self, query: Tensor) -> bool:
        return (
            query.dim() == 4  # packed sequences have 3 dimensions
            and self.config.window_size is None
            and self.config.softmax_type == "vanilla"
            and not any("core" in mechanism.stages for mechanism in self.kha.mechanisms)
        )

    @torch.no_grad()
    def _add_sink(self, layer: int, attention: Any, query: Tensor, key: Tensor) -> None:
        """Add one sequence's attention-sink statistics to the running totals."""
        group = attention.pg_collection.cp
        length = len(query) * group.size()
        held, at = token_positions(length, group), sink_queries(length, query.device)
        if not len(at):
            return
        is_here = (held == at.unsqueeze(-1)).to(query.dtype)
        queries = torch.einsum("ns,shd->nhd", is_here, query)
        dist.all_reduce(queries, group=group)  # zeros except on the rank that has the token
        scale = getattr(attention, "softmax_scale", None) or self.config.softmax_scale
        first, total = sink_terms(queries, key, scale or query.shape[-1] ** -0.5, at, held)
        dist.all_reduce(first, group=group)
        parts = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(parts, total, group=group)
        shares = (first - torch.stack(parts).logsumexp(0)).exp().mean(-1).double()
        self._add(layer, f"{_SINK}/mean", shares.sum(), len(shares))
        # the names must be the same on all ranks, so other ranks' heads get a count of zero
        first_head = attention.tp_group.rank() * len(shares)
        for head in range(self.config.num_attention_heads):
            is_own = 0 <= head - first_head < len(shares)
            share = shares[head - first_head] if is_own else shares.new_zeros(())
            self._add(layer, f"{_SINK}/head-{head}", share, float(is_own))

    @torch.no_grad()
    def _add_figure(self, layer: int, name: str, figure: Callable[[], Tensor]) -> None:
        value = figure().double()
        for head, of_head in enumerate(value.view(-1)):
            self._add(layer, f"{name}/head-{head}" if value.dim() else name, of_head, 1)

    def _add(self, layer: int, name: str, total: Tensor, count: float) -> None:
        before, counted = self.sums.get((name, layer), self.nothing)
        self.sums[name, layer] = before + total, counted + count

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Average the metrics over all ranks and reset the running totals."""
        for layer, attention in self.attentions.items():
            for projection, knocking in _knockings(attention):
                weight = knocking.weight.detach()
                weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
                distances = measure(weight, knocking.variant)[:, 2]
                for matrix, distance in zip(MATRICES[knocking.variant], distances, strict=True):
                    self._add(layer, f"{_DISTANCE}/{projection}-{matrix}", distance, 1)
        self.measured.clear()
        # only pipeline stages can have different names
        stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
        group = mpu.get_pipeline_model_parallel_group()
        dist.all_gather_object(stages, list(self.sums), group=group)
        names = sorted({name for stage in stages for name in stage}, key=lambda key: key[::-1])
        if not names:  # layers without matrices in a CUDA graph
            return {}
        totals, counts = zip(*(self.sums.get(name, self.nothing) for name in names), strict=True)
        sums = torch.stack([torch.stack(totals), totals[0].new_tensor(counts)], dim=-1)
        dist.all_reduce(sums)  # replicas add equal values, so means do not change
        self.sums.clear()
        means = {
            f"{name}/layer-{layer}": total / count
            for (name, layer), (total, count) in zip(names, sums.tolist(), strict=True)
            if count != 0
        }
        for name in means:
            if name.startswith(_SPREAD):  # still the mean of squares
                variance = means[name] - means[name.replace(_SPREAD, _OPENNESS)] ** 2
                means[name] = max(variance, 0.0) ** 0.5  # rounding may make it negative
        return means


def _knockings(attention: Attention) -> list[tuple[Projection, KnockingHeads]]:
    return list(getattr(attention, "knockings", {}).items())
