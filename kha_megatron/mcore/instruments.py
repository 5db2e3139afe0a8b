"""Measure shared matrices, gates and heads during training, for TensorBoard and W&B.

==================================  ================================================================
``kha-distance/P-M``                distance of matrix ``M`` of projection ``P`` from its start
                                    (:func:`kha_megatron.heads.diagnostics.measure`)
``kha-gate-openness/P``             mean of ``2 * sigmoid(x @ W_gate)``: 1 at the start, 0 if the
                                    gate is shut, 2 if it is wide open
``kha-gate-spread/P``               its standard deviation: 0 at the start
``kha-attention-sink/head-H``       share of a head's attention that the first token gets, 0 to 1
``kha-attention-sink/mean``         mean of all heads
``kha-NAME``                        figures of a head mechanism (``Ranks.observe``), such as
                                    ``kha-gate-score``, ``kha-gate-shut`` and ``kha-moh-load``
==================================  ================================================================

Each name ends with ``/layer-L``, counted from 0 over all pipeline stages, as in checkpoints.

All figures except distances are means over the tokens of the first microbatch of each data-parallel
rank. Sinks are computed from the scores of ``heads.diagnostics.SINK_QUERIES`` tokens of its first
sequence, because fused attention does not return weights. They are not measured with a window,
learnt sinks, packed sequences or talking heads.

Legend: ``s`` sequence, ``heads`` those of this rank, ``D`` features of a head.
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

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.heads.diagnostics import measure, sink_queries, sink_terms
from kha_megatron.heads.knock import MATRICES
from kha_megatron.mcore.gradients import wrap_grad_finalization
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.local_modules import token_positions

_Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or a module of one."""
Write = Callable[[dict[str, float], int], None]

_DISTANCE, _SINK = "kha-distance", "kha-attention-sink"
_OPENNESS, _SPREAD = "kha-gate-openness", "kha-gate-spread"


def watch_heads(
    models: Sequence[_Model],
    kha: KHAConfig,
    *,
    interval: int,
    iteration: Callable[[], int],
    write: Write,
) -> None:
    """Measure every ``interval``-th iteration. Call it on every rank, before training.

    Does not change training. With CUDA graphs, only matrices are measured.

    Args:
        models: the virtual pipeline stages of this rank, not yet wrapped for data parallelism.
        iteration: returns the current iteration, from 1; the same on every rank.
        write: called on every rank with the same values by name, and the iteration.

    Raises:
        ConfigError: a whole iteration is one CUDA graph.
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
    """Sums of this rank for each layer and name, and their means over all ranks."""

    def __init__(
        self, models: Sequence[_Model], kha: KHAConfig, is_due: Callable[[], bool]
    ) -> None:
        self.config = get_model_config(models[0])
        self.kha = kha
        self.is_due = is_due
        device = torch.cuda.current_device()
        self.nothing = torch.zeros((), dtype=torch.float64, device=device), 0.0
        # sum and count of each name and layer
        self.sums: dict[tuple[str, int], tuple[Tensor, float]] = {}
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
                # a hook after the forward pass: before it, parameters may not be gathered yet
                knocking.register_forward_hook(partial(self._add_gate, layer, projection))

    def _is_first_call(self, module: _Model, layer: int, name: str) -> bool:
        """Return whether a measured step calls this for the first time.

        Later calls are other microbatches and recomputation.
        """
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
        """Return whether scores are plain causal ``q k``, and query is ``[s, b, heads, D]``."""
        return (
            query.dim() == 4
            and self.config.window_size is None
            and self.config.softmax_type == "vanilla"
            and not any("core" in mechanism.stages for mechanism in self.kha.mechanisms)
        )

    @torch.no_grad()
    def _add_sink(self, layer: int, attention: Any, query: Tensor, key: Tensor) -> None:
        """Add sinks of one sequence from ``[s, heads, D]`` and ``[s, groups, D]`` of this rank."""
        group = attention.pg_collection.cp
        length = len(query) * group.size()
        held, at = token_positions(length, group), sink_queries(length, query.device)
        if not len(at):
            return
        is_here = (held == at.unsqueeze(-1)).to(query.dtype)
        queries = torch.einsum("ns,shd->nhd", is_here, query)
        dist.all_reduce(queries, group=group)  # each comes from the rank that has its token
        scale = getattr(attention, "softmax_scale", None) or self.config.softmax_scale
        first, total = sink_terms(queries, key, scale or query.shape[-1] ** -0.5, at, held)
        dist.all_reduce(first, group=group)
        parts = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(parts, total, group=group)
        shares = (first - torch.stack(parts).logsumexp(0)).exp().mean(-1).double()
        self._add(layer, f"{_SINK}/mean", shares.sum(), len(shares))
        # every rank adds all heads, but counts its own only
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
        """Return the means over all ranks and reset the sums."""
        for layer, attention in self.attentions.items():
            for projection, knocking in _knockings(attention):
                weight = knocking.weight.detach()
                weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
                distances = measure(weight, knocking.variant)[:, 2]
                for matrix, distance in zip(MATRICES[knocking.variant], distances, strict=True):
                    self._add(layer, f"{_DISTANCE}/{projection}-{matrix}", distance, 1)
        self.measured.clear()
        # ranks of one pipeline stage have the same names
        stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
        group = mpu.get_pipeline_model_parallel_group()
        dist.all_gather_object(stages, list(self.sums), group=group)
        names = sorted({name for stage in stages for name in stage}, key=lambda key: key[::-1])
        if not names:  # captured layers without matrices
            return {}
        totals, counts = zip(*(self.sums.get(name, self.nothing) for name in names), strict=True)
        sums = torch.stack([torch.stack(totals), totals[0].new_tensor(counts)], dim=-1)
        dist.all_reduce(sums)  # replicas add equal numbers, which leaves the mean
        self.sums.clear()
        means = {
            f"{name}/layer-{layer}": total / count
            for (name, layer), (total, count) in zip(names, sums.tolist(), strict=True)
            if count != 0
        }
        for name in means:
            if name.startswith(_SPREAD):  # so far a mean of squares
                variance = means[name] - means[name.replace(_SPREAD, _OPENNESS)] ** 2
                means[name] = max(variance, 0.0) ** 0.5  # rounding may make it negative
        return means


def _knockings(attention: Attention) -> list[tuple[Projection, KnockingHeads]]:
    return list(getattr(attention, "knockings", {}).items())
