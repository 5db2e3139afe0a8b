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
==================================  ================================================================

Each name ends with ``/layer-L``, counted from 0 over all pipeline stages, as in checkpoints. Names
that have no meaning are left out: the cosine of a single head, gates where there are none.

Matrices are those with which the iteration's loss was computed. Gates and cosines are means over
the tokens of the first microbatch of each data-parallel rank. A token's mean cosine over all pairs
of its ``n`` heads is ``(|sum_h u_h|^2 - sum_h |u_h|^2) / (n (n - 1))`` with ``u_h`` the head's
value scaled to length 1 (a zero value stays zero, its cosine with others counts as 0), so that the
heads of tensor-parallel ranks need one all-reduce of ``[tokens, D + 1]``. Where the projection has
knocked already (:mod:`kha_megatron.mcore.folding`), its matrix is undone to see the values before.

Legend: ``s`` sequence, ``b`` microbatch, ``heads`` those of this rank, ``D`` features of a head,
``n`` matrices of a stacked weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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
from kha_megatron.ops.diagnostics import measure

Model = Any
"""A pipeline stage of a GPTModel or HybridModel, or a module of one."""
Write = Callable[[dict[str, float], int], None]

_OF_WEIGHTS = ("kha-diagonal-mean", "kha-off-diagonal-share", "kha-distance")
_GRADIENT, _OPENNESS, _SPREAD = "kha-grad-norm", "kha-gate-openness", "kha-gate-spread"
_USED, _UNKNOCKED = "kha-head-cosine/value", "kha-head-cosine/value-unknocked"


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
    tensor-parallel ranks, one product for each gate, a few passes over the matrices, and one
    all-reduce over all ranks of some numbers per layer.

    With CUDA graphs of layers, gates and cosines are left out, because a captured module must not
    have hooks.

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
    if getattr(config, "cuda_graph_impl", "none") == "full_iteration":
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
        self.is_due = is_due
        self.columns = {name: i for i, name in enumerate(_names(kha))}
        # for each layer and name a sum and of how many, the way that a mean over ranks needs
        self.sums = torch.zeros(
            (self.config.num_layers, len(self.columns), 2),
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        self.heard: set[tuple[int, str]] = set()
        decoders: list[Any] = [model.decoder for model in models]
        layers = [layer for decoder in decoders for layer in decoder.layers]
        self.attentions = {
            layer.layer_number - 1: attention
            for layer in layers
            if isinstance(attention := getattr(layer, "self_attention", None), Attention)
        }
        if getattr(self.config, "cuda_graph_impl", "none") == "none":
            for layer, attention in self.attentions.items():
                self._listen(layer, attention)

    def _listen(self, layer: int, attention: Attention) -> None:
        def used(module: Model, inputs: tuple[Any, ...]) -> None:
            if self._is_new(module, layer, _USED):
                self._add_cosine(layer, _USED, inputs[2], attention.tp_group)

        attention.core_attention.register_forward_pre_hook(used)
        for projection, knocking in _knockings(attention):
            gated = "gate" in MATRICES[knocking.variant]
            if gated or projection == "value":
                knocking.register_forward_pre_hook(self._hears(layer, projection, gated))

    def _hears(self, layer: int, projection: Projection, gated: bool) -> Callable:
        def knocked(module: KnockingHeads, inputs: tuple[Tensor]) -> None:
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

    def _add(self, layer: int, name: str, total: Tensor, count: float) -> None:
        place = self.sums[layer, self.columns[name]]
        place[0] += total
        place[1] += count

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
        # replicas add the same number, so that its mean is itself
        dist.all_reduce(self.sums)
        sums = self.sums.tolist()
        self.sums.zero_()
        self.heard.clear()
        return {
            f"{name}/layer-{layer}": value
            for layer, row in enumerate(sums)
            for name, value in self._values(row).items()
        }

    def _values(self, row: list[list[float]]) -> dict[str, float]:
        means = {name: row[i][0] / row[i][1] for name, i in self.columns.items() if row[i][1] != 0}
        for name in means:
            kind, _, place = name.partition("/")
            if kind == _GRADIENT:
                means[name] **= 0.5
            elif kind == _SPREAD:
                variance = means[name] - means[f"{_OPENNESS}/{place}"] ** 2
                means[name] = max(variance, 0.0) ** 0.5  # rounding may leave less than nothing
        return means

    def _loss_scale(self) -> Tensor | float:
        scaled = self.config.grad_scale_func
        return 1.0 if scaled is None else scaled(torch.ones_like(self.sums[0, 0, 0])).reshape(())


def _names(kha: KHAConfig) -> list[str]:
    names = [_USED]
    for projection, variant in kha.variants.items():
        for matrix in MATRICES[variant]:
            names += [f"{kind}/{projection}-{matrix}" for kind in (*_OF_WEIGHTS, _GRADIENT)]
        if "gate" in MATRICES[variant]:
            names += [f"{_OPENNESS}/{projection}", f"{_SPREAD}/{projection}"]
        if projection == "value":
            names.append(_UNKNOCKED)
    return names


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
