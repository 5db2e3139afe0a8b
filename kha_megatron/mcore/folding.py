"""KHA-Linear folded into the QKV weight while training, so that its GEMM does the knocking.

For each microbatch ``W_eff = W T`` is made inside the autograd graph and stands in for the weight
of ``linear_qkv`` while that runs; the parameter stays where it is, so checkpoints, optimizers and
tensor-parallel marks see nothing of it, and a run may change between both ways at any step.

**When it pays.** Per unit of the head dim ``D``, with ``t`` tokens that this rank's GEMM sees,
``r`` heads with a linear matrix out of the ``n`` heads of ``linear_qkv`` (both over all ranks, who
must agree), ``K`` hidden, elements read and written:

======================================  =================  =======================
of one microbatch                       direct             folded
======================================  =================  =======================
forward                                 ``2 t r``          ``2 K n``
gradient of activations or weight       ``2 t r``          ``2 K n``
gradient of ``T``                       ``2 t r``          ``2 K n``
``W_eff`` again for the backward pass                      ``2 K n``, FP8: none
if it ends gradient-accumulation fusion                    ``2 K n``
======================================  =================  =======================

Each pass multiplies by ``D x D``: ``D`` FLOPs for each of its elements on either side. In 16 bits
that is ``D / 2`` FLOPs a byte, below what a GPU can do (some 180 on an H200) for every usual
``D``, so bytes decide, and FLOPs would decide alike. Hence ``auto`` folds in training when
``3 t r > 4 K n`` (``3 K n`` with FP8; ``K n`` more with fusion): for matrices on q, k and v when a
microbatch has more than 4/3 of the hidden size in tokens. Evaluation has the first row only:
``t r > K n``.

**What it keeps** for the backward pass: nothing, where direct application keeps ``t r D`` numbers.
The memory of ``W_eff`` is let go when the projection has run, though Transformer Engine holds on to
the tensor, and the backward pass makes it again for the product that reads it. With FP8 that
product reads the quantised copy which Transformer Engine keeps of every weight, one a layer.

**Where it is not done.** Multi-latent attention, FSDP, CUDA graphs, FP8 or FP4 parameters, delayed
weight gradients, offloaded activations, an adapter around ``linear_qkv``, and tensor-parallel ranks
that hold pieces of heads: there matrices are applied directly, and ``auto`` says why.

With FP8 the folded weight is quantised as any other. The copy that Transformer Engine makes in the
first microbatch of a step serves the others, whose folded weight is the same; when the way changes
in between, it is made anew.

Legend: ``s`` sequence, ``b`` microbatch, ``h`` and ``K`` hidden, ``D`` head dim.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from kha_megatron.announcements import announce
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.model.qkv import QKVLayout
from kha_megatron.ops.fold_heads import fold_heads

_LINEARS = {ColumnParallelLinear}
if HAVE_TE:
    _LINEARS |= {TEColumnParallelLinear, TELayerNormColumnParallelLinear}

_OBSTACLES = {
    "fp8_param": "--fp8-param-gather keeps the weight in FP8, and folding would round it twice",
    "fp4_param": "--fp4-param-gather keeps the weight in FP4, and folding would round it twice",
    "delay_wgrad_compute": "--delay-wgrad-compute writes the gradient of a weight past autograd",
    "cpu_offloading": "CPU offloading and folding both decide what is kept for the backward pass",
    "fine_grained_activation_offloading": "fine-grained activation offloading and folding both "
    "decide what is kept for the backward pass",
    "enable_cuda_graph": "folding was never captured in a CUDA graph",
    "external_cuda_graph": "folding was never captured in a CUDA graph",
}
"""Fields of the TransformerConfig under which matrices are applied directly, and why."""


class Folding:
    """What ``linear_qkv`` of one attention knocks by itself, decided for every microbatch.

    ``with folding(hidden_states):`` around all that projects and knocks; where it folds, the
    :class:`KnockingHeads` whose matrices it took say ``is_folded`` meanwhile.

    With folding possible, gradient-accumulation fusion is off in this one linear layer for good:
    ``W_eff`` has no ``main_grad``, and a weight some of whose gradients are added by the fused
    GEMM and others by data parallelism loses the latter. Its gradient reaches ``main_grad`` by
    data parallelism's hook.

    Args:
        attention: Megatron's, whose ``linear_qkv`` it is.
        kha: what is knocked, and whether to fold it.
        layout: the rows of the whole ``linear_qkv``.
        knockings: of each knocked projection, its matrices.

    Raises:
        ConfigError: ``fold="always"`` and it cannot be.
    """

    def __init__(
        self,
        attention: SelfAttention,
        kha: KHAConfig,
        layout: QKVLayout,
        knockings: Mapping[Projection, KnockingHeads],
    ) -> None:
        self.attention = attention
        self.choice = kha.fold
        self.knockings = {p: knockings[p] for p, v in kha.variants.items() if v == "linear"}
        self.heads = layout.heads
        self.folded_heads = sum(head in self.knockings for head in self.heads)
        self.obstacle = self._obstacle()
        self.was_folded = False
        if self.choice == "always" and self.obstacle:
            raise _refusal(self.obstacle)
        if self.choice != "never" and self.knockings and not self.obstacle:
            for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
                if hasattr(attention.linear_qkv, name):
                    setattr(attention.linear_qkv, name, False)

    @contextmanager
    def __call__(self, hidden_states: Tensor) -> Iterator[None]:
        """Fold, or not, while the body runs.

        Args:
            hidden_states: ``[s, b, h]``, what ``linear_qkv`` is about to get.

        Raises:
            ConfigError: ``fold="always"``, and something has taken the place of ``linear_qkv``.
        """
        folds = self.folds(hidden_states)
        linear = self.attention.linear_qkv
        if folds != self.was_folded and hasattr(linear, "is_first_microbatch"):
            linear.is_first_microbatch = True  # Transformer Engine keeps the weight in FP8
        self.was_folded = folds
        if not folds:
            yield
            return
        held: dict[str, Any] = {}
        knockings = list(self.knockings.values())
        weight = _Weight(self.owners)
        # of all its hooks the last: those before wait for parameters that other ranks have updated
        hook = linear.register_forward_pre_hook(
            lambda linear, inputs: weight.substitute(linear, knockings, held)
        )
        try:
            for knocking in knockings:
                knocking.is_folded = True
            with weight.saved(linear) if torch.is_grad_enabled() else nullcontext():
                yield
        finally:
            hook.remove()
            linear._parameters.update(held)
            for knocking in knockings:
                knocking.is_folded = False

    @cached_property
    def owners(self) -> tuple[int | None, ...]:
        """For each head of this rank's rows the index of its projection, or None."""
        ranks = self.attention.tp_group.size()
        each, rank = len(self.heads) // ranks, get_pg_rank(self.attention.tp_group)
        known: dict[str, int] = {projection: i for i, projection in enumerate(self.knockings)}
        return tuple(known.get(head) for head in self.heads[rank * each : (rank + 1) * each])

    @property
    def least_tokens(self) -> float:
        """Tokens of a microbatch above which ``auto`` folds (see the module's table)."""
        config = self.attention.config
        direct, folded = 1, 1
        if self.attention.training:
            direct, folded = 3, 4 - bool(config.fp8) + config.gradient_accumulation_fusion
        return folded * config.hidden_size * len(self.heads) / (direct * self.folded_heads)

    def folds(self, hidden_states: Tensor) -> bool:
        """Whether ``linear_qkv`` will knock by itself when it gets this."""
        if self.choice == "never" or not self.knockings:
            return False
        if obstacle := self.obstacle or self._change():
            if self.choice == "always":
                raise _refusal(obstacle)
            announce(
                f"KHA-Linear is applied to activations: {obstacle}", once=("folding", "obstacle")
            )
            return False
        tokens = hidden_states.shape[:-1].numel()
        if self.attention.config.sequence_parallel:
            tokens *= self.attention.tp_group.size()
        folds = self.choice == "always" or tokens > self.least_tokens
        if self.attention.training:
            way = "folded into the QKV weight" if folds else "applied to activations"
            announce(
                f"KHA-Linear on {', '.join(self.knockings)} is {way} (microbatches of {tokens:,} "
                f"tokens a rank; folding pays above {self.least_tokens:,.0f})",
                once=("folding", way),
            )
        return folds

    def _obstacle(self) -> str | None:
        """Why it can never be folded, known when the model is built."""
        config = self.attention.config
        for option, why in _OBSTACLES.items():
            if getattr(config, option, False):
                return why
        if getattr(config, "cuda_graph_impl", "none") != "none":
            return "folding was never captured in a CUDA graph"
        if not self.heads:
            return "gates have rows between the heads of queries, keys and values"
        if len(self.heads) % self.attention.tp_group.size():
            return (
                f"the {len(self.heads)} heads of queries, keys and values cannot be divided over "
                f"{self.attention.tp_group.size()} tensor-parallel ranks, who hold pieces of heads"
            )
        return None

    def _change(self) -> str | None:
        """Why it cannot be folded now: what was done to the layer after it was built."""
        linear = self.attention.linear_qkv
        weight: Any = getattr(linear, "weight", None)
        if (
            isinstance(weight, DTensor)
            or hasattr(weight, "__fsdp_param__")
            or getattr(linear, "is_fsdp2", False)
        ):
            return "folding was never run with FSDP"
        if type(linear) not in _LINEARS:  # an adapter around it adds what must be knocked as well
            return f"the QKV projection is a {type(linear).__name__}, whose weight is not all of it"
        if weight.shape[0] != len(self.owners) * self.attention.hidden_size_per_attention_head:
            return f"this rank holds {weight.shape[0]} rows of the QKV weight, no whole heads"
        return None


class _Weight:
    """The folded weight of one microbatch, made again when the backward pass asks for it."""

    def __init__(self, owners: tuple[int | None, ...]) -> None:
        self.owners = owners
        self.folded: Tensor | None = None
        self.again: Callable[[], Tensor]
        self.packed = self.asked = 0
        self.is_read = True
        self.remade: Tensor | None = None

    def substitute(self, linear: Any, knockings: list[KnockingHeads], held: dict[str, Any]) -> None:
        """Put folded tensors where ``linear`` looks for its parameters, which go to ``held``.

        Called so that all hooks on the parameters involved have run.
        """
        matrices = [knocking()[0] for knocking in knockings]
        looked_up: dict[str, Any] = linear._parameters
        for name in ("weight", "bias"):
            if (parameter := looked_up.get(name)) is not None:
                held[name] = parameter
                looked_up[name] = fold_heads(parameter, matrices, self.owners)
        self.folded = looked_up["weight"].detach()
        whole = held["weight"]

        @torch.no_grad()
        def again() -> Tensor:
            if self.is_read:
                return fold_heads(whole, matrices, self.owners)
            # only its shape is asked for: if ever a value is, it shows
            nan = torch.full((), torch.nan, dtype=whole.dtype, device=whole.device)
            return nan.expand(whole.shape)

        self.again = again

    @contextmanager
    def saved(self, linear: Any) -> Iterator[None]:
        """Within, autograd keeps nothing of the weight; after it, its memory is let go."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.is_read = not _multiplies_by_copy(linear)
        if self.folded is not None:  # Transformer Engine stores the tensor, and never reads it
            self.folded.untyped_storage().resize_(0)
        self.folded = None

    def _pack(self, tensor: Tensor) -> Tensor | None:
        folded = self.folded
        if folded is None or tensor.data_ptr() != folded.data_ptr() or tensor.shape != folded.shape:
            return tensor
        self.packed += 1
        return None

    def _unpack(self, packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        if self.remade is None:
            self.remade = self.again()
        self.asked += 1
        remade = self.remade
        if self.asked % self.packed == 0:  # Transformer Engine saves it twice
            self.remade = None
        return remade


def _multiplies_by_copy(linear: Any) -> bool:
    """Whether the backward pass of a layer that just ran reads a quantised copy of its weight."""
    if not getattr(linear, "fp8", False):
        return False
    recipe = linear.fp8_meta["recipe"]
    return getattr(recipe, "backward_override", None) != "high_precision"


def _refusal(obstacle: str) -> ConfigError:
    return ConfigError(f"fold=always, and {obstacle}: use --kha-fold auto, or remove the obstacle")
