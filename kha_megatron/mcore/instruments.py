"""What shared matrices, gates and heads do while they train, for TensorBoard, W&B or any writer.

==================================  ================================================================
``kha-diagonal-mean/P-M``           mean of the diagonal of matrix ``M`` of projection ``P``
``kha-off-diagonal-share/P-M``      share of its energy (sum of squares) off the diagonal
``kha-distance/P-M``                distance from its start, in units of the identity's norm (all
                                    three: :class:`kha_megatron.ops.diagnostics.MatrixDiagnostics`)
``kha-grad-norm/P-M``               Frobenius norm of its gradient, summed over the whole batch,
                                    without loss scale, before clipping
``kha-gate-openness/P``             mean of ``2 * sigmoid(x @ W_gate)``: 1 at the start, where a
                                    gate lets everything pass as it is, 0 shut, 2 wide open
``kha-gate-spread/P``               its standard deviation: 0 at the start
``kha-head-cosine/value``           mean cosine between two heads' values, as attention uses them
``kha-head-cosine/value-unknocked`` the same before they are knocked
``kha-attention-sink/head-H``       share of a head's attention that the first token gets, 0 to 1
``kha-attention-sink/mean``         the same of all heads
``kha-hidden-peak/value``           largest absolute value of what a layer hands on: a massive
                                    activation where it is hundreds of times the others
``kha-hidden-peak/feature``         in which feature it is
``kha-NAME``                        what a head mechanism says of itself (``Ranks.observe``), such
                                    as the gate's ``kha-gate-score`` and ``kha-gate-shut``
==================================  ================================================================

Each name ends with ``/layer-L``, counted from 0 over all pipeline stages, as in checkpoints. Names
that have no meaning are left out: the cosine of a single head, gates where there are none.

Matrices are those with which the iteration's loss was computed. Gates, cosines and what mechanisms
say are means over the tokens of the first microbatch of each data-parallel rank, of whose first
sequence ``ops.diagnostics.SINK_QUERIES`` tokens tell where attention goes. Fused attention does not
say, so their scores are computed anew: of the work of all scores ``2 SINK_QUERIES / s``. It is left
out where attention has a window, sinks of its own, packed sequences or other scores (talking
heads). A token's mean cosine over all pairs
of its ``n`` heads is ``(|sum_h u_h|^2 - sum_h |u_h|^2) / (n (n - 1))`` with ``u_h`` the head's
value scaled to length 1 (a zero value stays zero, its cosine with others counts as 0), so that the
heads of tensor-parallel ranks need one all-reduce of ``[tokens, D + 1]``. Where the projection has
knocked already (:mod:`kha_megatron.mcore.folding`), its matrix is undone to see the values before.

Legend: ``s`` sequence, ``b`` microbatch, ``heads`` those of this rank, ``D`` features of a head,
``n`` matrices of a stacked weight.
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
from kha_megatron.heads.knock import MATRICES
from kha_megatron.mcore.gradients import around_finalization, gradient_of
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.mcore.local_modules import held_positions
from kha_megatron.ops.diagnostics import measure, sink_queries, sink_terms

Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or a module of one."""
Write = Callable[[dict[str, float], int], None]

_OF_WEIGHTS = ("kha-diagonal-mean", "kha-off-diagonal-share", "kha-distance")
_GRADIENT, _OPENNESS, _SPREAD = "kha-grad-norm", "kha-gate-openness", "kha-gate-spread"
_USED, _UNKNOCKED = "kha-head-cosine/value", "kha-head-cosine/value-unknocked"
_SINK, _PEAK = "kha-attention-sink", "kha-hidden-peak"


def watch_heads(
    models: Sequence[Model],
    kha: KHAConfig,
    *,
    interval: int,
    iteration: Callable[[], int],
    write: Write,
) -> None:
    """Measure every ``interval``-th iteration. Call it on every rank, before training.

    Nothing that training computes is changed. Other iterations do nothing but look at the number.
    A measured one costs, on top: for each layer the norm of the values and their all-reduce over
    tensor-parallel ranks, one product for each gate, the scores of some tokens, a pass over what
    the layer hands on, a few passes over the matrices, and some numbers per layer reduced over all
    ranks.

    With CUDA graphs of layers only the matrices are left, because a captured module must not have
    hooks.

    Args:
        models: the virtual pipeline stages of this rank, not yet wrapped for data parallelism.
        kha: what they knock.
        interval: 1 or more.
        iteration: number of the running iteration, counted from 1; the same on every rank.
        write: called on every rank with the same values by name, and the iteration.

    Raises:
        ConfigError: ``interval`` is less than 1, or a whole iteration is one CUDA graph.
    """
    config = get_model_config(models[0])
    if interval < 1:
        raise ConfigError(f"interval={interval} of the KHA instruments: it must be 1 or more")
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
            write(instruments.read(chunks), iteration())

    around_finalization(models, measured)


class _Instruments:
    """Sums of this rank, for every layer and name, and their means over all ranks."""

    def __init__(self, models: Sequence[Model], kha: KHAConfig, is_due: Callable[[], bool]) -> None:
        self.config = get_model_config(models[0])
        self.kha = kha
        self.is_due = is_due
        # for each name and layer a sum and of how many, the way that a mean over ranks needs
        self.sums: dict[tuple[str, int], tuple[Tensor, float]] = {}
        # for each layer the largest value and its feature
        self.peaks = torch.full(
            (self.config.num_layers, 2),
            -1.0,
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
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
                layers[number].register_forward_hook(partial(self._hear_peak, number))
                self._listen(number, attention)

    def _listen(self, layer: int, attention: Attention) -> None:
        def used(module: Model, inputs: tuple[Any, ...]) -> None:
            query, key, value, *_ = inputs
            if self._is_new(module, layer, _USED):
                self._add_cosine(layer, _USED, value, attention.tp_group)
            if self._has_plain_scores(query) and self._is_new(module, layer, _SINK):
                self._add_sink(layer, attention, query[:, 0], key[:, 0])

        def observed(name: str, figure: Callable[[], Tensor]) -> None:
            if self._is_new(attention, layer, name):
                self._add_figure(layer, f"kha-{name}", figure)

        attention.core_attention.register_forward_pre_hook(used)
        if hasattr(attention, "head_ranks"):
            attention.head_ranks.listeners.append(observed)
        for projection, knocking in _knockings(attention):
            gated = "gate" in MATRICES[knocking.variant]
            if gated or projection == "value":
                knocking.register_forward_hook(self._hears(layer, projection, gated))

    def _hears(self, layer: int, projection: Projection, gated: bool) -> Callable:
        # behind it, because data parallelism's own hook before it waits for its matrices
        def knocked(module: KnockingHeads, inputs: tuple[Tensor], output: Tensor) -> None:
            if not inputs or not self._is_new(module, layer, projection):
                return  # it is asked for its matrices, or was heard before
            if gated:
                self._add_gate(layer, projection, module, inputs[0])
            if projection == "value":
                self._add_cosine(layer, _UNKNOCKED, _unknocked(module, inputs[0]), module.tp_group)

        return knocked

    def _is_new(self, module: Model, layer: int, what: str) -> bool:
        """Whether a measured step hears this for the first time.

        Later are other microbatches, and the same one when backward computes it again.
        """
        if not module.training or not self.is_due() or (layer, what) in self.heard:
            return False
        self.heard.add((layer, what))
        return True

    @torch.no_grad()
    def _add_cosine(
        self, layer: int, name: str, value: Tensor, tp_group: dist.ProcessGroup
    ) -> None:
        """From ``[..., heads, D]``, the same tokens on all ranks of the group."""
        heads = self.config.num_query_groups
        if heads < 2:
            return
        units = torch.nn.functional.normalize(value.float(), dim=-1)
        squares = units.square().sum((-2, -1)).unsqueeze(-1)
        sums = torch.cat([units.sum(-2), squares], dim=-1)
        dist.all_reduce(sums, group=tp_group)
        sums /= value.shape[-2] * tp_group.size() / heads  # ranks that hold the same head
        pairs = sums[..., :-1].square().sum(-1) - sums[..., -1]
        total = pairs.sum(dtype=torch.float64) / (heads * (heads - 1))
        self._add(layer, name, total, pairs.numel())

    @torch.no_grad()
    def _add_gate(self, layer: int, projection: str, knocking: KnockingHeads, x: Tensor) -> None:
        matrix = knocking.weight[MATRICES[knocking.variant].index("gate")]
        gate = 2 * torch.sigmoid((x @ matrix).float())
        total = gate.sum(dtype=torch.float64)
        squares = gate.square().sum(dtype=torch.float64)
        self._add(layer, f"{_OPENNESS}/{projection}", total, gate.numel())
        self._add(layer, f"{_SPREAD}/{projection}", squares, gate.numel())

    def _has_plain_scores(self, query: Tensor) -> bool:
        """Whether a head's scores are ``q k`` of all tokens before, of ``[s, b, heads, D]``."""
        window = self.config.window_size
        softmax = self.config.softmax_type
        plain = window is None and softmax == "vanilla" and self.kha.talking is None
        return plain and query.dim() == 4

    @torch.no_grad()
    def _add_sink(self, layer: int, attention: Any, query: Tensor, key: Tensor) -> None:
        """From ``[s, heads, D]`` and ``[s, groups, D]``, one sequence with this rank's heads."""
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
    def _hear_peak(self, layer: int, module: Model, inputs: Any, result: Any) -> None:
        if self._is_new(module, layer, _PEAK):
            hidden = result[0] if isinstance(result, tuple) else result
            peak, feature = hidden.detach().abs().flatten(0, -2).amax(0).max(0)
            self.peaks[layer, 0], self.peaks[layer, 1] = peak, feature

    @torch.no_grad()
    def _add_figure(self, layer: int, name: str, figure: Callable[[], Tensor]) -> None:
        value = figure().double()
        if not value.dim():
            self._add(layer, name, value, 1)
            return
        for head, of_head in enumerate(value):
            self._add(layer, f"{name}/head-{head}", of_head, 1)

    def _add(self, layer: int, name: str, total: Tensor, count: float) -> None:
        before, held = self.sums.get((name, layer), (self.peaks.new_zeros(()), 0.0))
        self.sums[name, layer] = before + total, held + count

    @torch.no_grad()
    def read(self, chunks: Sequence[Model]) -> dict[str, float]:
        """Means over all ranks, the same on each of them, after which everything starts anew.

        Args:
            chunks: the models as wrapped for data parallelism, with complete gradients.
        """
        scale = self._loss_scale()
        for layer, attention in self.attentions.items():
            for projection, knocking in _knockings(attention):
                names = [f"{projection}-{matrix}" for matrix in MATRICES[knocking.variant]]
                for name, numbers in zip(names, _measured(knocking), strict=True):
                    for kind, number in zip(_OF_WEIGHTS, numbers, strict=True):
                        self._add(layer, f"{kind}/{name}", number, 1)
                squares, share = _squared_gradients(knocking.weight, chunks)
                for name, square in zip(names, squares, strict=True):
                    self._add(layer, f"{_GRADIENT}/{name}", square / scale**2, share)
        means = self._means()
        for layer, (peak, feature) in enumerate(self._peaks()):
            if peak >= 0:
                means[layer] |= {f"{_PEAK}/value": peak, f"{_PEAK}/feature": feature}
        self.heard.clear()
        return {
            f"{name}/layer-{layer}": value
            for layer in sorted(means)
            for name, value in means[layer].items()
        }

    def _means(self) -> dict[int, dict[str, float]]:
        """Of every layer, over all ranks; no rank keeps its sums."""
        # ranks of one pipeline stage have the same names
        stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
        group = mpu.get_pipeline_model_parallel_group()
        dist.all_gather_object(stages, list(self.sums), group=group)
        names = list(dict.fromkeys(name for stage in stages for name in stage))
        if not names:  # captured layers without matrices
            return {}
        nothing = self.peaks.new_zeros(()), 0.0
        totals, counts = zip(*(self.sums.get(name, nothing) for name in names), strict=True)
        sums = torch.stack([torch.stack(totals), self.peaks.new_tensor(counts)], dim=-1)
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

    def _peaks(self) -> list[list[float]]:
        """Of every layer the largest value on all ranks, and the feature where it was found."""
        largest = self.peaks[:, 0].clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        feature = torch.where(self.peaks[:, 0] == largest, self.peaks[:, 1], -1)
        dist.all_reduce(feature, op=dist.ReduceOp.MAX)
        self.peaks.fill_(-1)
        return torch.stack([largest, feature], dim=-1).tolist()

    def _loss_scale(self) -> Tensor | float:
        scaled = self.config.grad_scale_func
        return 1.0 if scaled is None else scaled(torch.ones_like(self.peaks[0, 0])).reshape(())


def _settled(means: dict[str, float]) -> dict[str, float]:
    """Norms and deviations from the means of squares that they were summed as."""
    for name in means:
        kind, _, place = name.partition("/")
        if kind == _GRADIENT:
            means[name] **= 0.5
        elif kind == _SPREAD:
            variance = means[name] - means[f"{_OPENNESS}/{place}"] ** 2
            means[name] = max(variance, 0.0) ** 0.5  # rounding may leave less than nothing
    return means


def _knockings(attention: Attention) -> list[tuple[Projection, KnockingHeads]]:
    return list(getattr(attention, "knockings", {}).items())


@torch.no_grad()
def _unknocked(knocking: KnockingHeads, x: Tensor) -> Tensor:
    """What was or would be knocked, ``[..., D]``: a folded matrix is undone."""
    if not knocking.is_folded:
        return x
    return (x.double() @ torch.linalg.pinv(knocking.weight[0].double())).float()


def _measured(knocking: KnockingHeads) -> Tensor:
    return measure(_whole(knocking.weight.detach()), knocking.variant)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _squared_gradients(weight: Tensor, chunks: Sequence[Model]) -> tuple[Tensor, float]:
    """Of each matrix, the squares that this rank can sum, and its share in the whole sum.

    With the distributed optimizer a rank has reduced its part of a bucket only, and what its
    ``main_grad`` holds outside of that part is no gradient. Elsewhere every rank has all.

    Returns:
        ``[n]`` in float64, and 1 over the number of ranks among which the gradient is divided; 0
        for a weight that is not trained.
    """
    if (gradient := gradient_of(weight)) is None:
        return torch.zeros(len(weight), dtype=torch.float64, device=weight.device), 0.0
    flat = _whole(gradient.detach()).double().flatten()
    share = 1.0
    groups = [getattr(chunk, "param_to_bucket_group", {}).get(weight) for chunk in chunks]
    for group in (g for g in groups if g is not None and g.ddp_config.use_distributed_optimizer):
        bucket = next(bucket for bucket in group.buckets if weight in bucket.params)
        ranks = group.intra_distributed_optimizer_instance_group
        share = 1 / ranks.size()
        part = bucket.grad_data.numel() // ranks.size()
        first = ranks.rank() * part - bucket.param_to_index[weight][0]
        flat = flat.clone()
        flat[: max(first, 0)] = 0
        flat[max(first + part, 0) :] = 0
    return flat.view(len(weight), -1).square().sum(1), share
