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
from typing import Any, NamedTuple

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
from kha_megatron.mcore.attention import attention_layers
from kha_megatron.mcore.gradients import wrap_grad_finalization
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.local_modules import token_positions

_Model = Any  # a GPTModel or HybridModel, or one of its modules
Write = Callable[[dict[str, float], int], None]
"""Writes metrics by name, and the iteration that they belong to."""

_DISTANCE = "kha-distance"
_SINK = "kha-attention-sink"
_OPENNESS = "kha-gate-openness"
_SPREAD = "kha-gate-spread"


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

    def is_due() -> bool:
        return iteration() % interval == 0

    instruments = _Instruments(models, kha, is_due)

    @contextmanager
    def measured(chunks: list[_Model], groups: Any) -> Iterator[None]:
        yield
        if is_due():
            write(instruments.read(), iteration())

    wrap_grad_finalization(models, measured)


class _Metric(NamedTuple):
    """A metric of one layer."""

    name: str
    layer: int


class _Sum(NamedTuple):
    """A running total and the number of its terms."""

    total: Tensor
    terms: float


class _Instruments:
    """Hooks that accumulate a sum and a count per metric and layer."""

    def __init__(
        self,
        models: Sequence[_Model],
        kha: HeadsConfig,
        is_due: Callable[[], bool],
    ) -> None:
        self.config = get_model_config(models[0])
        self.kha = kha
        self.is_due = is_due
        device = torch.cuda.current_device()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.empty_sum = _Sum(zero, 0.0)
        self.sums: dict[_Metric, _Sum] = {}
        self.measured: set[tuple[int, str]] = set()  # layers and sources, in this step
        self.attentions: dict[int, Any] = {}  # by layer number, from 0
        for attention in attention_layers(models):
            self.attentions[attention.layer_number - 1] = attention
        if self.config.cuda_graph_impl == "none":
            for number, attention in self.attentions.items():
                self._watch(number, attention)

    def _watch(self, layer: int, attention: Any) -> None:
        def add_sink(module: _Model, inputs: tuple[Any, ...]) -> None:
            query, key, *_ = inputs
            if not self._has_plain_scores(query):
                return
            if self._is_first_call(module, layer, _SINK):
                first_sequence_query = query[:, 0]
                first_sequence_key = key[:, 0]
                self._add_sink(layer, attention, first_sequence_query, first_sequence_key)

        @torch.no_grad()
        def add_observed(name: str, compute_values: Callable[[], Tensor]) -> None:
            if self._is_first_call(attention, layer, name):
                self._add_values(layer, f"kha-{name}", compute_values())

        attention.core_attention.register_forward_pre_hook(add_sink)
        if hasattr(attention, "head_ranks"):
            attention.head_ranks.listeners.append(add_observed)
        for projection, knocking in _knockings(attention):
            if "gate" in MATRICES[knocking.variant]:
                # not a pre-hook, because parameters may not be gathered before the forward pass
                knocking.register_forward_hook(partial(self._add_gate, layer, projection))

    def _is_first_call(
        self,
        module: _Model,
        layer: int,
        source: str,
    ) -> bool:
        """Whether this is the first microbatch of the step (and not a recomputation)."""
        if not module.training or not self.is_due():
            return False
        if (layer, source) in self.measured:
            return False
        self.measured.add((layer, source))
        return True

    @torch.no_grad()
    def _add_gate(
        self,
        layer: int,
        projection: str,
        knocking: KnockingHeads,
        inputs: Any,
        output: Tensor,
    ) -> None:
        if not inputs:
            return
        if not self._is_first_call(knocking, layer, projection):
            return
        heads = inputs[0]
        gate_index = MATRICES[knocking.variant].index("gate")
        logits = heads @ knocking.weight[gate_index]
        gate = 2 * torch.sigmoid(logits.float())
        count = gate.numel()
        total = gate.sum(dtype=torch.float64)
        total_of_squares = gate.square().sum(dtype=torch.float64)
        self._add(layer, f"{_OPENNESS}/{projection}", total, count)
        self._add(layer, f"{_SPREAD}/{projection}", total_of_squares, count)

    def _has_plain_scores(self, query: Tensor) -> bool:
        """Return whether :func:`sink_terms` computes the same scores as core attention."""
        return (
            query.dim() == 4  # packed sequences have 3 dimensions
            and self.config.window_size is None
            and self.config.softmax_type == "vanilla"
            and not any("core" in mechanism.stages for mechanism in self.kha.mechanisms)
        )

    @torch.no_grad()
    def _add_sink(
        self,
        layer: int,
        attention: Any,
        query: Tensor,
        key: Tensor,
    ) -> None:
        """Add one sequence's attention-sink statistics to the running totals.

        Args:
            query (Tensor): Local queries of shape [sequence, heads, head_dim].
            key (Tensor): Local keys of shape [sequence, kv_heads, head_dim].
        """
        group = attention.pg_collection.cp
        length = len(query) * group.size()
        local_positions = token_positions(length, group)
        query_positions = sink_queries(length, query.device)
        if not len(query_positions):
            return
        is_here = local_positions == query_positions.unsqueeze(-1)
        selection = is_here.to(query.dtype)
        queries = torch.einsum("ns,shd->nhd", selection, query)
        dist.all_reduce(queries, group=group)  # zeros except on the rank that has the token
        first_logits, local_totals = sink_terms(
            queries,
            key,
            self._softmax_scale(attention, query.shape[-1]),
            query_positions,
            local_positions,
        )
        dist.all_reduce(first_logits, group=group)
        totals_by_rank = local_totals.new_empty((group.size(), *local_totals.shape))
        dist.all_gather(list(totals_by_rank), local_totals, group=group)
        totals = totals_by_rank.logsumexp(0)
        shares = (first_logits - totals).exp()
        head_shares = shares.mean(-1).double()
        tp_rank = attention.tp_group.rank()
        self._add_shares(layer, head_shares, tp_rank)

    def _softmax_scale(self, attention: Any, head_dim: int) -> float:
        layer_scale = getattr(attention, "softmax_scale", None)  # latent attention
        return layer_scale or self.config.softmax_scale or head_dim**-0.5

    def _add_shares(
        self,
        layer: int,
        shares: Tensor,
        tp_rank: int,
    ) -> None:
        """Add the average attention to the first token of each head on this rank."""
        local_heads = len(shares)
        first_head = tp_rank * local_heads
        total = shares.sum()
        self._add(layer, f"{_SINK}/mean", total, local_heads)
        # the names must be the same on all ranks, so other ranks' heads get a count of zero
        zero = shares.new_zeros(())
        for head in range(self.config.num_attention_heads):
            local_head = head - first_head
            is_here = 0 <= local_head < local_heads
            share = shares[local_head] if is_here else zero
            self._add(layer, f"{_SINK}/head-{head}", share, int(is_here))

    def _add_values(
        self,
        layer: int,
        name: str,
        values: Tensor,
    ) -> None:
        """Add a metric of a head mechanism, which is a scalar or has one value per head."""
        values = values.double()
        if not values.dim():
            self._add(layer, name, values, 1)
            return
        for head, value in enumerate(values.view(-1)):
            self._add(layer, f"{name}/head-{head}", value, 1)

    def _add(
        self,
        layer: int,
        name: str,
        total: Tensor,
        terms: float,
    ) -> None:
        metric = _Metric(name, layer)
        previous = self.sums.get(metric, self.empty_sum)
        self.sums[metric] = _Sum(
            previous.total + total,
            previous.terms + terms,
        )

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Average the metrics over all ranks and reset the running totals."""
        for layer, attention in self.attentions.items():
            for projection, knocking in _knockings(attention):
                self._add_distances(layer, projection, knocking)
        self.measured.clear()
        metrics = self._gather_metrics()
        if not metrics:  # layers without matrices in a CUDA graph
            return {}
        totals_and_terms = self._sum_over_ranks(metrics)
        self.sums.clear()
        means = {}
        for metric, (total, terms) in zip(metrics, totals_and_terms, strict=True):
            if terms == 0:
                continue
            name = f"{metric.name}/layer-{metric.layer}"
            means[name] = total / terms
        return _with_spreads(means)

    def _sum_over_ranks(self, metrics: list[_Metric]) -> list[list[float]]:
        """Return ``[total, number of terms]`` over all ranks, in the order of ``metrics``."""
        local_totals = []
        local_terms = []
        for metric in metrics:
            local_sum = self.sums.get(metric, self.empty_sum)
            local_totals.append(local_sum.total)
            local_terms.append(local_sum.terms)
        totals = torch.stack(local_totals)
        terms = totals.new_tensor(local_terms)
        sums = torch.stack([totals, terms], dim=-1)
        dist.all_reduce(sums)  # replicas add equal values, so means do not change
        return sums.tolist()

    def _add_distances(
        self,
        layer: int,
        projection: str,
        knocking: KnockingHeads,
    ) -> None:
        weight = knocking.weight.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        _, _, distances = measure(weight, knocking.variant).unbind(dim=1)
        matrices = MATRICES[knocking.variant]
        for matrix, distance in zip(matrices, distances, strict=True):
            name = f"{_DISTANCE}/{projection}-{matrix}"
            self._add(layer, name, distance, 1)

    def _gather_metrics(self) -> list[_Metric]:
        """Return all metrics in the same order on all ranks.

        Only pipeline stages can have different ones.
        """
        group = mpu.get_pipeline_model_parallel_group()
        local_metrics = list(self.sums)
        stages: list[Any] = [None] * group.size()
        dist.all_gather_object(stages, local_metrics, group=group)
        metrics: set[_Metric] = set()
        for stage_metrics in stages:
            metrics.update(stage_metrics)
        return sorted(metrics)


def _with_spreads(means: dict[str, float]) -> dict[str, float]:
    """Turn the mean squares of gates into standard deviations."""
    with_spreads = dict(means)
    for name, mean_square in means.items():
        if name.startswith(_SPREAD):
            mean = means[name.replace(_SPREAD, _OPENNESS)]
            variance = max(mean_square - mean**2, 0.0)  # rounding may make it negative
            with_spreads[name] = variance**0.5
    return with_spreads


def _knockings(attention: Attention) -> list[tuple[Projection, KnockingHeads]]:
    knockings = getattr(attention, "knockings", {})
    return list(knockings.items())
