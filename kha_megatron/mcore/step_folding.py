"""Fold KHA-Linear into the QKV weight once per training step (``--kha-fold-linear``).

KHA-Linear multiplies the heads of ``linear_qkv`` by a matrix ``T``, which is the same as replacing
the rows ``W_h`` of each head by ``T^T W_h``. Neither ``W`` nor ``T`` changes within a step. The
first forward pass of a step therefore computes the folded weight and replaces the data of the
parameter by it. All microbatches then run Megatron's own forward and backward pass. Before DDP
reduces the accumulated gradient ``G`` of the folded weight, we turn it into those of ``W`` and
``T``, and restore the data of the parameter::

    dT = sum over heads (W_h G_h^T)        dW_h = T G_h

Optimizer, parameter all-gathers and checkpoints run between steps, so they only see ``W`` and
``T``. During a step, each layer needs memory for one more copy of its QKV weight.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.nn import Module

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore import patches
from kha_megatron.mcore.attention import KHASelfAttention, KnockedAttention
from kha_megatron.mcore.hooks import ProjectionHook
from kha_megatron.mcore.knocking import KnockingHeads
from kha_megatron.model.qkv import QKVLayout

_OPTION = "--kha-fold-linear"


def fold_once_per_step(models: list[Module], kha: HeadsConfig) -> None:
    """Fold KHA-Linear in all layers. Must be called before Megatron's DDP wraps the models.

    Raises:
        ConfigError: If ``kha`` has no linear matrices, or if a layer does not support folding.
            FSDP is only detected in the first training step.
    """
    if "linear" not in kha.variants.values():
        raise ConfigError(f"{_OPTION} requires KHA-Linear, got {kha}. Remove {_OPTION}.")
    patches.unfold_before_gradient_reduction()
    for model in models:
        for module in model.modules():
            if isinstance(module, KnockedAttention):
                StepFold(module)
    announce("Folding KHA-Linear into linear_qkv once per training step.")


class StepFold:
    """Folds the linear matrices of one attention layer.

    :func:`patches.unfold_before_gradient_reduction` patches DDP, which finds this object as the
    attribute ``step_fold`` of the weight and of the matrices. DDP then sets :attr:`uses_ddp`, and
    calls :meth:`finish` after the last microbatch of each step.
    """

    def __init__(self, attention: Any) -> None:
        obstacle = _obstacle(attention)
        if obstacle:
            raise ConfigError(f"{_OPTION} does not support {obstacle}. Remove {_OPTION}.")
        self.attention = attention
        self.weight = attention.linear_qkv.weight
        self.weight.step_fold = self
        self.uses_ddp = False  # stays False with FSDP
        self.knockings: dict[Projection, KnockingHeads] = {}
        self.matrices: list[Any] = []
        for projection, knocking in attention.knockings.items():
            if knocking.variant == "linear":
                self.knockings[projection] = knocking
                self.matrices.append(knocking.weight)
                knocking.weight.step_fold = self
        self._unfolded: Tensor | None = None  # data of the weight while it is folded
        hook = ProjectionHook(
            attention,
            "linear_qkv",
            self._before_projection,
            before=True,
        )
        attention.projection_hooks.append(hook)

    def _before_projection(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fold in the first microbatch of a step. DDP has gathered the weight by now."""
        if not self.attention.training:  # evaluation runs between steps, without folding
            self._restore()
        elif self._unfolded is None:
            self._fold()
        return inputs

    @torch.no_grad()
    def _fold(self) -> None:
        if not self.uses_ddp:
            raise ConfigError(
                f"{_OPTION} requires Megatron's DistributedDataParallel. Train without FSDP, or "
                f"remove {_OPTION}."
            )
        unfolded = self.weight.data
        folded = unfolded.clone()
        for projection, knocking in self.knockings.items():
            (matrix,) = knocking()  # waits for DDP's all-gather
            folded_heads = self._view_heads(folded, projection)
            folded_heads.copy_(matrix.mT @ folded_heads)
        self.weight.data = folded
        self._unfolded = unfolded
        self.attention.folded_projections = tuple(self.knockings)

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the gradients of the weight and the matrices from that of the folded weight.

        Must be called after the last microbatch, before any of these gradients is reduced.
        """
        if self._unfolded is None:
            return
        gradient = self.weight.main_grad
        dtype = gradient.dtype
        unfolded = self._unfolded.to(dtype)
        group = self.attention.tp_group
        for projection, knocking in self.knockings.items():
            heads = self._view_heads(unfolded, projection)
            head_gradients = self._view_heads(gradient, projection)
            matrices: Any = knocking.weight
            (matrix,) = matrices

            # dT = sum over heads (W_h G_h^T)
            products = heads @ head_gradients.mT
            matrix_gradient = products.sum(dim=(0, 1))
            if group.size() > 1:
                dist.all_reduce(matrix_gradient, group=group)
            matrices.main_grad += matrix_gradient

            # dW_h = T G_h, written over G_h
            head_gradients.copy_(matrix.to(dtype) @ head_gradients)
        self._restore()

    def _restore(self) -> None:
        if self._unfolded is not None:
            self.weight.data = self._unfolded
            self._unfolded = None
            self.attention.folded_projections = ()

    def _view_heads(self, rows: Tensor, projection: Projection) -> Tensor:
        """View this rank's heads of a projection as ``[groups, heads, head_dim, hidden_size]``."""
        layout = self.attention.split.layout
        part = layout.parts[projection]
        if len(rows) >= layout.group_rows:
            groups = rows.unflatten(0, (-1, layout.group_rows))
            part_rows = groups[:, part.rows]
        else:
            part_rows = self._view_shared_group(rows, projection).unsqueeze(0)
        return part_rows.unflatten(1, (-1, part.features))

    def _view_shared_group(self, rows: Tensor, projection: Projection) -> Tensor:
        """View the rows of a projection, if several ranks share a group.

        For example, if two ranks share a group of two query heads, a key head and a value head, the
        first rank has both query heads. It gets no rows of keys and values.
        """
        layout = self.attention.split.layout
        part_rows = layout.parts[projection].rows
        rank = get_pg_rank(self.attention.tp_group)
        first_row = rank * len(rows) % layout.group_rows  # of this rank in the group
        start = max(0, part_rows.start - first_row)
        stop = max(0, part_rows.stop - first_row)
        return rows[start:stop]  # if stop is too large, the slice ends at the last local row


def _obstacle(attention: KnockedAttention) -> str | None:
    """Return what prevents folding in this layer, or None."""
    config = attention.config
    if not isinstance(attention, KHASelfAttention):
        return "--multi-latent-attention"
    if config.add_qkv_bias:
        return "--add-qkv-bias"
    if config.add_bias_linear:
        return "biases, which --disable-bias-linear turns off"
    if config.fp8_param or config.fp4_param:
        return "--fp8-param-gather or --fp4-param-gather"
    if config.delay_wgrad_compute:
        return "--delay-wgrad-compute"
    if config.cuda_graph_impl != "none":
        return f"--cuda-graph-impl {config.cuda_graph_impl}"
    layout = attention.split.layout
    ranks = attention.tp_group.size()
    if _splits_a_head(layout, ranks):
        return f"TP size {ranks} with {layout.groups} KV heads, which splits a head's rows"
    return None


def _splits_a_head(layout: QKVLayout, ranks: int) -> bool:
    """Return whether a TP rank may have only some rows of a head.

    Ranks that share a group split its rows evenly, without regard to heads.
    """
    if layout.ranks_per_group(ranks) == 1:
        return False
    local_rows = layout.rows // ranks
    for part in layout.parts.values():
        if local_rows % part.features or part.first % part.features:
            return True
    return False
