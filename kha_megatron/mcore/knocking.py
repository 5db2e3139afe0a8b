"""The modules that hold the head-shared matrices, and the rule that keeps them equal under TP.

A head-shared matrix is replicated on every tensor-parallel rank, but a rank sees only its own
heads, so the gradient it computes is a partial sum. Megatron sums nothing for such a parameter by
itself when sequence parallelism is off: the loss would look right while the replicas drift apart.
``copy_to_tensor_model_parallel_region`` (identity forward, all-reduce backward) on the weight
completes the sum inside autograd, exactly once, with sequence parallelism on or off, for any
number of key/value heads, under recompute, and in loops that never call ``finalize_model_grads``.

Nothing else may reduce it again. Therefore the parameter carries no ``sequence_parallel``
attribute, and no module on its path is called ``q_layernorm`` or ``k_layernorm``: Megatron sums
those by name. It is not marked ``tensor_model_parallel`` either, so that the gradient norm counts
it once.
"""

import zlib
from typing import Any

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import MATRICES, Variant
from kha_megatron.ops import initial_weight, knock


class KnockingHeads(MegatronModule):
    """The shared matrices of one projected tensor of one layer (paper section 3.2).

    Its only parameter is ``weight`` ``[n, D, D]`` in ``config.params_dtype``: the ``n`` matrices
    of the variant in the order of ``heads.knock.MATRICES``, stacked so that their gradient takes
    one all-reduce. ``forward`` maps ``[s, b, heads on this rank, D]`` to the same shape.
    While ``is_folded``, the projection has knocked already (:mod:`kha_megatron.mcore.folding`),
    and it returns what it gets.

    Args:
        config: the model's configuration.
        kha: how the matrices start (``init``, ``init_seed``).
        projection: which tensor is knocked; with ``layer_number`` it seeds a random start.
        layer_number: global, counted from 1, so that a random start does not depend on the layout.
        head_dim: ``D``.
        tp_group: ranks over which the heads are split.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kha: KHAConfig,
        projection: Projection,
        *,
        layer_number: int,
        head_dim: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(config)
        self.variant: Variant = kha.variants[projection]
        self.init = kha.init
        self.seed = zlib.crc32(f"{kha.init_seed}/{layer_number}/{projection}".encode())
        self.tp_group = tp_group
        self.is_folded = False
        # Megatron-FSDP sorts modules into sharded and replicated ones by this attribute
        self.tensor_model_parallel = False
        self.weight = torch.nn.Parameter(
            torch.empty(
                len(MATRICES[self.variant]),
                head_dim,
                head_dim,
                dtype=config.params_dtype,
                device=_device(config),
            )
        )
        if config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial value, the same on every rank (section 3.3)."""
        initial_weight(
            self.weight, self.variant, self.init, std=self.config.init_method_std, seed=self.seed
        )

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Knock every head of ``x`` ``[..., D]``.

        Without ``x``, the matrices ``[n, D, D]`` for use elsewhere: through here, so that hooks
        that wait for parameters run, and with the rule for their gradient.
        """
        if x is not None and self.is_folded:
            return x
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        if x is None:
            return weight
        return knock(x, weight, self.variant)

    def keep_at_next_load(self) -> None:
        """Let the next load of a distributed checkpoint leave the matrices as they are.

        Megatron asks each module what to read. This one answers once with its own value, so that a
        checkpoint without it can be loaded; any other tensor that it lacks is still an error.
        """

        def own_value(prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
            del self.sharded_state_dict
            return {f"{prefix}weight": LocalNonpersistentObject(self.weight.detach())}

        self.sharded_state_dict = own_value

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.variant}, weight={tuple(self.weight.shape)}"


def _device(config: TransformerConfig) -> torch.device | int | str:
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
