"""Fold linear KHA matrices into the QKV weight during training.

Each forward pass computes the folded weight ``W_eff = W T`` inside the autograd graph and passes it
to ``linear_qkv``. Parameters, optimizer state and checkpoints stay the same, so we can decide for
each microbatch whether to fold. The table shows the memory traffic (number of elements, divided by
the head dim) of both options. Here, ``t`` is the number of tokens per GEMM, ``K`` the hidden size,
``n`` the number of heads in ``linear_qkv``, and ``r`` how many of these have a linear matrix.

=====================================  ============  ===============
operation                              unfolded      folded
=====================================  ============  ===============
forward, and each of two gradients     ``2 t r``     ``2 K n``
no gradient-accumulation fusion                      ``2 K n``
quantized weight (FP8, FP4)                          ``2 K n``
saved for the backward pass            ``t r``       ``K n``
=====================================  ============  ===============

With ``fold="auto"``, a microbatch is folded if ``t r > K n``. If gradient-accumulation fusion is
enabled, folding has to disable it (``W_eff`` has no ``main_grad``, so gradients would be lost).
In FP8 and FP4, ``W_eff`` is quantized in every microbatch, because Transformer Engine's cache holds
the quantized weight of the layer. Each of these two raises the threshold by 1/3 during training.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from kha_megatron.announcements import announce
from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.heads.fold_autograd import fold_matrices
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.model.qkv import QKVLayout

_LINEARS = (ColumnParallelLinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear)


class Folding:
    """Calls ``linear_qkv``, with folded matrices if that is faster."""

    def __init__(
        self,
        attention: SelfAttention,
        kha: KHAConfig,
        layout: QKVLayout,
        knockings: Mapping[Projection, KnockingHeads],
    ) -> None:
        self.attention, self.choice, self.heads = attention, kha.fold, layout.heads
        self.knockings = {p: knockings[p] for p, v in kha.variants.items() if v == "linear"}
        if self.choice != "never" and self.knockings and not self.obstacle:
            for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
                if hasattr(attention.linear_qkv, name):
                    setattr(attention.linear_qkv, name, False)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, frozenset[Projection]]:
        """Return the output of ``linear_qkv``, and which projections were folded."""
        linear = self.attention.linear_qkv
        if not self.folds(hidden_states):
            return linear(hidden_states)[0], frozenset()
        for hook in linear._forward_pre_hooks.values():
            # DDP's pre-hook waits for the all-gather of the parameters
            if hook.__module__ == "megatron.core.distributed.distributed_data_parallel":
                hook(linear, (hidden_states,))
        matrices = [knocking()[0] for knocking in self.knockings.values()]
        folded = {
            name: fold_matrices(parameter, matrices, self.owners)
            for name, parameter in linear.named_parameters(recurse=False)
            if name in ("weight", "bias")
        }
        with _without_weight_cache(linear):
            output = torch.func.functional_call(linear, folded, (hidden_states,))
        return output[0], frozenset(self.knockings)

    @cached_property
    def owners(self) -> tuple[int | None, ...]:
        """Matrix index for each of the local heads in ``linear_qkv`` (None if it has no matrix)."""
        ranks = self.attention.tp_group.size()
        each, rank = len(self.heads) // ranks, get_pg_rank(self.attention.tp_group)
        known: dict[str, int] = {projection: i for i, projection in enumerate(self.knockings)}
        return tuple(known.get(head) for head in self.heads[rank * each : (rank + 1) * each])

    @property
    def least_tokens(self) -> float:
        """Folding is faster if a microbatch has more tokens than this."""
        config = self.attention.config
        folded_heads = sum(head in self.knockings for head in self.heads)
        training = self.attention.training
        quantized = config.fp8 is not None or config.fp4 is not None
        unfused = training and config.gradient_accumulation_fusion
        passes = 3 if training else 1
        folded_cost = 1 + (unfused + quantized) / passes
        return folded_cost * config.hidden_size * len(self.heads) / folded_heads

    def folds(self, hidden_states: Tensor) -> bool:
        """Whether to fold this microbatch.

        Raises:
            ConfigError: If ``kha.fold`` is ``always`` but the layer can't be folded.
        """
        if self.choice == "never" or not self.knockings:
            return False
        linear: Any = self.attention.linear_qkv
        obstacle = self.obstacle
        if type(linear) not in _LINEARS:  # KHA applies to an adapter's output, too
            obstacle = f"linear_qkv is a {type(linear).__name__}"
        elif (
            isinstance(linear.weight, DTensor)
            or hasattr(linear.weight, "__fsdp_param__")
            or getattr(linear, "is_fsdp2", False)
        ):
            obstacle = "folding has not been tested with FSDP"
        if obstacle and self.choice == "always":
            raise ConfigError(
                f"--kha-fold always is not supported: {obstacle}. Use --kha-fold auto."
            )
        if obstacle:
            announce(f"KHA-Linear is not folded because {obstacle}", once="unfolded")
            return False
        tokens = hidden_states.shape[:-1].numel()
        if self.attention.config.sequence_parallel:
            tokens *= self.attention.tp_group.size()
        folds = self.choice == "always" or tokens > self.least_tokens
        if self.attention.training:
            way = "folded into the QKV weight" if folds else "applied to activations"
            announce(
                f"KHA-Linear on {', '.join(self.knockings)} is {way} ({tokens:,} tokens per "
                f"microbatch; folding is faster above {self.least_tokens:,.0f})",
                once=("folding", way),
            )
        return folds

    @cached_property
    def obstacle(self) -> str | None:
        """What prevents folding in this layer, or None."""
        config, ranks = self.attention.config, self.attention.tp_group.size()
        if config.fp8_param or config.fp4_param:
            return "--fp8-param-gather keeps the QKV weight quantized"
        if config.delay_wgrad_compute:
            return "--delay-wgrad-compute computes weight gradients outside of autograd"
        if config.cuda_graph_impl != "none":
            return "folding has not been tested with CUDA graphs"
        if not self.heads:
            return "linear_qkv also contains rows of gates"
        if len(self.heads) % ranks:
            return f"{len(self.heads)} heads of linear_qkv are not divisible by TP size {ranks}"
        return None


@contextmanager
def _without_weight_cache(linear: Any) -> Iterator[None]:
    """Disable Transformer Engine's cache of the quantized weight.

    The cache is overwritten in place. With pipeline parallelism, the backward passes of earlier
    microbatches still need the quantized weight of the layer.
    """
    if not hasattr(linear, "is_first_microbatch"):
        yield
        return
    is_first_microbatch = linear.is_first_microbatch
    linear.is_first_microbatch = None
    try:
        yield
    finally:
        linear.is_first_microbatch = is_first_microbatch
