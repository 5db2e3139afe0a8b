"""Modules of head-shared parameters, with the tensor-parallel rule of their gradients.

A head-shared matrix is replicated on every TP rank, but a rank sees only its own heads, so its
gradient is a partial sum. Without sequence parallelism, Megatron does not sum it and the replicas
would diverge. ``copy_to_tensor_model_parallel_region`` on the weight (identity forward, all-reduce
backward) sums it inside autograd, exactly once.

Nothing else may reduce it: the parameter has no ``sequence_parallel`` attribute, and its path has
no ``q_layernorm`` or ``k_layernorm``, which Megatron sums by name. It is not marked
``tensor_model_parallel``, so the gradient norm counts it once.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from kha_megatron.heads import HeadTensor
from kha_megatron.heads.initial import initial_weight
from kha_megatron.heads.kernels.fused import fused_knock
from kha_megatron.heads.knock import Variant


class MechanismWeight(MegatronModule):
    """One parameter of a head mechanism, described by a :class:`~kha_megatron.heads.HeadTensor`.

    ``weight`` has ``config.params_dtype`` and the tensor's shape, or this rank's heads of it if it
    is sharded. Calling the module returns the weight with its gradient rule, and runs hooks that
    wait for parameters.

    Args:
        layer_number: global, from 1, so that a random start does not depend on the layout.
        init_seed: seed of a random start, together with layer and name.
        tp_group: ranks over which the heads are sharded.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tensor: HeadTensor,
        *,
        layer_number: int,
        init_seed: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(config)
        self.tensor, self.tp_group = tensor, tp_group
        name = tensor.name.removeprefix("knock_")
        self.seed = zlib.crc32(f"{init_seed}/{layer_number}/{name}".encode())
        ranks = tensor.ranks(tp_group.size())
        # Megatron-FSDP sorts modules into sharded and replicated ones by this attribute
        self.tensor_model_parallel = ranks > 1
        shape = (tensor.shape[0] // ranks, *tensor.shape[1:])
        self.weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=parameter_device(config))
        )
        if self.tensor_model_parallel:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial value, independent of the rank's random state."""
        whole: Tensor = self.weight
        if self.tensor_model_parallel:
            whole = torch.empty(self.tensor.shape, dtype=whole.dtype, device=whole.device)
        parts = whole if self.tensor.matrices else whole[None]
        initial_weight(parts, self.tensor.initial, std=self.config.init_method_std, seed=self.seed)
        if whole is not self.weight:
            with torch.no_grad():
                self.weight.copy_(whole.chunk(self.tp_group.size())[get_pg_rank(self.tp_group)])

    def forward(self) -> Tensor:
        """Return this rank's weight: ``[n, D, D]`` if shared by heads, else ``[heads, ...]``."""
        if self.tensor_model_parallel:
            return self.weight
        rule = self.tensor.gradient
        weight: Tensor = self.weight
        if rule == "heads" or (rule == "tokens" and self.config.sequence_parallel):
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        if self.tensor.per_head:  # more ranks than heads: several share one
            ranks, heads = self.tp_group.size(), len(weight)
            first = get_pg_rank(self.tp_group) * heads // ranks
            weight = weight[first : first + max(1, heads // ranks)]
        return weight

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the parameter, sharded over TP ranks if it is per head, and over FSDP2's ranks."""
        if isinstance(self.weight, DTensor):
            return {f"{prefix}weight": self._rows(f"{prefix}weight", sharded_offsets)}
        if not self.tensor_model_parallel:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _rows(self, key: str, offsets: tuple[tuple[int, int, int], ...]) -> ShardedTensorFactory:
        """Return FSDP2's shard in a form that loads under any layout.

        Unequal shards are stored by rows, because Megatron stores equal shards only.
        """
        weight: Any = self.weight
        with torch.no_grad():  # the same tensor that the optimizer has
            held = weight.to_local()
        mesh, rows = weight.device_mesh, len(weight)
        each, ranks, rank = -(-rows // mesh.size()), 1, 0
        step = each if rows % mesh.size() == 0 else 1
        if self.tensor_model_parallel:
            ranks, rank = self.tp_group.size(), get_pg_rank(self.tp_group)
        first = rank * rows + min(mesh.get_local_rank() * each, rows - 1)
        copy = 0 if self.tensor_model_parallel else get_pg_rank(self.tp_group)
        replica, count, owner = (0, copy, int(not len(held))), len(held), (rows - 1) // each

        def cut(key: str, part: Tensor, replica: Any, flattened_range: None) -> list[ShardedTensor]:
            if owner + 1 < mesh.size():  # ranks without a row store a copy of the last one
                last = part[-1:].clone() if count else part.new_empty(1, *part.shape[1:])
                torch.distributed.broadcast(last, group=mesh.get_group(), group_src=owner)
                part = part if count else last
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    row,
                    *offsets,
                    (len(offsets), first // step + i, ranks * rows // step),
                    replica_id=replica,
                    prepend_axis_num=len(offsets),
                )
                for i, row in enumerate(part.split(step))
            ]

        def joined(loaded: list[Tensor]) -> Tensor:
            return torch.cat(loaded)[:count]

        return ShardedTensorFactory(key, held, cut, joined, replica)

    def keep_at_next_load(self) -> None:
        """Keep the current value at the next load of a checkpoint, which may lack the parameter."""

        def own_value(prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
            del self.sharded_state_dict
            return {f"{prefix}weight": LocalNonpersistentObject(self.weight.detach())}

        self.sharded_state_dict = own_value  # type: ignore[method-assign]

    def extra_repr(self) -> str:
        return f"{self.tensor.name}, weight={tuple(self.weight.shape)}"


class MechanismWeights(Mapping[str, Tensor]):
    """Parameters of one mechanism by tensor name. Each access calls the module (a collective)."""

    def __init__(self, modules: Mapping[str, MechanismWeight]) -> None:
        self._modules = dict(modules)

    def __getitem__(self, name: str) -> Tensor:
        return self._modules[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class KnockingHeads(MechanismWeight):
    """The shared matrices of one projected tensor of one layer (paper section 3.2).

    ``weight`` is ``[n, D, D]``: the matrices of ``variant`` in the order of
    ``heads.knock.MATRICES``, stacked so that their gradient takes one all-reduce. ``forward`` maps
    ``[s, b, heads, D]`` to the same shape.
    """

    def __init__(self, *args: Any, variant: Variant, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variant: Variant = variant

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Knock every head of ``x`` ``[..., D]``; without it, return the matrices."""
        weight = super().forward()
        return weight if x is None else fused_knock(x, weight, self.variant)

    def extra_repr(self) -> str:
        return f"{self.variant}, weight={tuple(self.weight.shape)}"


def parameter_device(config: TransformerConfig) -> torch.device | int | str:
    """Return the device of new parameters."""
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
