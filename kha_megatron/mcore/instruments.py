"""Measure shared matrices, gates and heads during training, for TensorBoard and W&B.

==================================  ================================================================
``kha-distance/P-M``                distance of matrix ``M`` of projection ``P`` from its start
                                    (:class:`kha_megatron.heads.diagnostics.MatrixDiagnostics`)
``kha-gate-openness/P``             mean of ``2 * sigmoid(x @ W_gate)``: 1 at the start, 0 if the
                                    gate is shut, 2 if it is wide open
``kha-gate-spread/P``               its standard deviation: 0 at the start
``kha-attention-sink/head-H``       share of a head's attention that the first token gets, 0 to 1
``kha-attention-sink/mean``         mean of all heads
``kha-NAME``                        figures of a head mechanism (``Ranks.observe``), such as
                                    ``kha-gate-score``, ``kha-gate-shut`` and ``kha-moh-load``
==================================  ================================================================

Each name ends with ``/layer-L``, counted from 0 over all pipeline stages, as in checkpoints.

Matrices are those with which the iteration's loss was computed. The other figures are means over
the tokens of the first microbatch of each data-parallel rank. Sinks are computed from the scores of
``ops.diagnostics.SINK_QUERIES`` tokens of its first sequence, because fused attention does not
return weights; there are none where attention has a window, sinks of its own, packed sequences or a
core of its own (talking heads).

Legend: ``s`` sequence, ``heads`` those of this rank, ``D`` features of a head.
"""

from collections import defaultdict
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
from kha_megatron.mcore.gradients import around_finalization
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.local_modules import held_positions

Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or a module of one."""
Write = Callable[[dict[str, float], int], None]

_DISTANCE, _SINK = "kha-distance", "kha-attention-sink"
_OPENNESS, _SPREAD = "kha-gate-openness", "kha-gate-spread"


def watch_heads(
    models: Sequence[Model],
    kha: KHAConfig,
    *,
    interval: int,
    iteration: Callable[[], int],
    write: Write,
) -> None:
    """Measure every ``interval``-th iteration. Call it on every rank, before training.

    Does not change training. A measured iteration adds a product per gate, the scores of some
    tokens, a pass over the matrices and an all-reduce. With CUDA graphs only matrices are measured.

    Args:
        models: the virtual pipeline stages of this rank, not yet wrapped for data parallelism.
        kha: configuration of KHA.
        interval: 1 or more.
        iteration: returns the current iteration, from 1; the same on every rank.
        write: called on every rank with the same values by name, and the iteration.

    Raises:
        ConfigError: a whole iteration is one CUDA graph.
    """
    config = get_model_config(models[0])
    if config.cuda_graph_impl == "full_iteration":
        raise ConfigError(
            "cuda_graph_impl=full_iteration runs no Python between iterations, so the KHA "
            "instruments would never be read: remove --kha-log-interval, or use "
            "--cuda-graph-impl local"
        )
    instruments = _Instruments(models, kha, lambda: iteration() % interval == 0)

    @contextmanager
    def measured(chunks: list[Model], groups: Any) -> Iterator[None]:
        yield
        if iteration() % interval == 0:
            write(instruments.read(), iteration())

    around_finalization(models, measured)


class _Instruments:
    """Sums of this rank for every layer and name, and their means over all ranks."""

    def __init__(self, models: Sequence[Model], kha: KHAConfig, is_due: Callable[[], bool]) -> None:
        self.config = get_model_config(models[0])
        self.kha = kha
        self.is_due = is_due
        self.device = torch.cuda.current_device()
        # for each name and layer a sum and a count, of which a mean over ranks is made
        self.sums: dict[tuple[str, int], tuple[Tensor, float]] = {}
        self.heard: set[tuple[int, str]] = set()
        decoders: list[Any] = [model.decoder for model in models]
        layers = {x.layer_number - 1: x for decoder in decoders for x in decoder.layers}
        self.attentions = {
            number: attention
            for number, layer in layers.items()
            if isinstance(attention := getattr(layer, "self_attention", None), Attention)
        }
        if self.config.cuda_graph_impl == "none":
            for number, attention in self.attentions.items():
                self._listen(number, attention)

    def _listen(self, layer: int, attention: Attention) -> None:
        def used(module: Model, inputs: tuple[Any, ...]) -> None:
            query, key, *_ = inputs
            if self._has_plain_scores(query) and self._is_new(module, layer, _SINK):
                self._add_sink(layer, attention, query[:, 0], key[:, 0])

        def observed(name: str, figure: Callable[[], Tensor]) -> None:
            if self._is_new(attention, layer, name):
                self._add_figure(layer, f"kha-{name}", figure)

        attention.core_attention.register_forward_pre_hook(used)
        if hasattr(attention, "head_ranks"):
            attention.head_ranks.listeners.append(observed)
        for projection, knocking in _knockings(attention):
            if "gate" in MATRICES[knocking.variant]:
                # a hook after the forward pass: before it, parameters may not be gathered yet
                knocking.register_forward_hook(partial(self._hear_gate, layer, projection))

    def _hear_gate(
        self,
        layer: int,
        projection: Projection,
        knocking: KnockingHeads,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        if inputs and self._is_new(knocking, layer, projection):
            self._add_gate(layer, projection, knocking, inputs[0])

    def _is_new(self, module: Model, layer: int, what: str) -> bool:
        """Return whether a measured step calls this for the first time.

        Later calls are other microbatches and recomputation.
        """
        if not module.training or not self.is_due() or (layer, what) in self.heard:
            return False
        self.heard.add((layer, what))
        return True

    @torch.no_grad()
    def _add_gate(self, layer: int, projection: str, knocking: KnockingHeads, x: Tensor) -> None:
        matrix = knocking.weight[MATRICES[knocking.variant].index("gate")]
        gate = 2 * torch.sigmoid((x @ matrix).float())
        total = gate.sum(dtype=torch.float64)
        squares = gate.square().sum(dtype=torch.float64)
        self._add(layer, f"{_OPENNESS}/{projection}", total, gate.numel())
        self._add(layer, f"{_SPREAD}/{projection}", squares, gate.numel())

    def _has_plain_scores(self, query: Tensor) -> bool:
        """Return whether scores are plain causal ``q k``, and query is ``[s, b, heads, D]``."""
        window = self.config.window_size
        softmax = self.config.softmax_type
        plain = (
            window is None
            and softmax == "vanilla"
            and not any("core" in m.stages for m in self.kha.mechanisms)
        )
        return plain and query.dim() == 4

    @torch.no_grad()
    def _add_sink(self, layer: int, attention: Any, query: Tensor, key: Tensor) -> None:
        """Add sinks of one sequence from ``[s, heads, D]`` and ``[s, groups, D]`` of this rank."""
        group = attention.pg_collection.cp
        length = len(query) * group.size()
        held, at = held_positions(length, group), sink_queries(length, query.device)
        if not len(at):
            return
        is_here = (held == at.unsqueeze(-1)).to(query.dtype)
        asked = torch.einsum("ns,shd->nhd", is_here, query)
        dist.all_reduce(asked, group=group)  # each comes from the rank that has its token
        scale = getattr(attention, "softmax_scale", None) or self.config.softmax_scale
        first, total = sink_terms(asked, key, scale or query.shape[-1] ** -0.5, at, held)
        dist.all_reduce(first, group=group)
        parts = [torch.empty_like(total) for _ in range(group.size())]
        dist.all_gather(parts, total, group=group)
        shares = (first - torch.stack(parts).logsumexp(0)).exp().mean(-1).double()
        self._add(layer, f"{_SINK}/mean", shares.sum(), len(shares))
        # every rank names all heads, and counts its own
        first_head = attention.tp_group.rank() * len(shares)
        for head in range(self.config.num_attention_heads):
            mine = 0 <= head - first_head < len(shares)
            share = shares[head - first_head] if mine else shares.new_zeros(())
            self._add(layer, f"{_SINK}/head-{head}", share, float(mine))

    @torch.no_grad()
    def _add_figure(self, layer: int, name: str, figure: Callable[[], Tensor]) -> None:
        value = figure().double()
        if not value.dim():
            self._add(layer, name, value, 1)
            return
        for head, of_head in enumerate(value):
            self._add(layer, f"{name}/head-{head}", of_head, 1)

    def _add(self, layer: int, name: str, total: Tensor, count: float) -> None:
        before, held = self.sums.get(
            (name, layer), (torch.zeros((), dtype=torch.float64, device=self.device), 0.0)
        )
        self.sums[name, layer] = before + total, held + count

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Return means over all ranks, the same on each of them, and reset."""
        for layer, attention in self.attentions.items():
            for projection, knocking in _knockings(attention):
                weight = knocking.weight.detach()
                weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
                distances = measure(weight, knocking.variant)[:, 2]
                for matrix, distance in zip(MATRICES[knocking.variant], distances, strict=True):
                    self._add(layer, f"{_DISTANCE}/{projection}-{matrix}", distance, 1)
        self.heard.clear()
        return {
            f"{name}/layer-{layer}": value
            for layer, means in sorted(self._means().items())
            for name, value in means.items()
        }

    def _means(self) -> dict[int, dict[str, float]]:
        """Return the means of every layer over all ranks, and reset the sums."""
        # ranks of one pipeline stage have the same names
        stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
        group = mpu.get_pipeline_model_parallel_group()
        dist.all_gather_object(stages, list(self.sums), group=group)
        names = list(dict.fromkeys(name for stage in stages for name in stage))
        if not names:  # captured layers without matrices
            return {}
        nothing = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        totals, counts = zip(*(self.sums.get(name, nothing) for name in names), strict=True)
        sums = torch.stack([torch.stack(totals), totals[0].new_tensor(counts)], dim=-1)
        # replicas add the same number, so that its mean is itself
        dist.all_reduce(sums)
        self.sums.clear()
        means: dict[int, dict[str, float]] = defaultdict(dict)
        for (name, layer), (total, count) in zip(names, sums.tolist(), strict=True):
            if count != 0:
                means[layer][name] = total / count
        for layer, of_layer in means.items():
            means[layer] = _settled(of_layer)
        return means


def _settled(means: dict[str, float]) -> dict[str, float]:
    """Turn means of squares into standard deviations."""
    for name in means:
        kind, _, place = name.partition("/")
        if kind == _SPREAD:
            variance = means[name] - means[f"{_OPENNESS}/{place}"] ** 2
            means[name] = max(variance, 0.0) ** 0.5  # rounding may leave less than nothing
    return means


def _knockings(attention: Attention) -> list[tuple[Projection, KnockingHeads]]:
    return list(getattr(attention, "knockings", {}).items())
