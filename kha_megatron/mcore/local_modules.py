"""Local norm and core attention, extended for sequence and context parallelism."""

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from kha_megatron.errors import ConfigError


class TorchNorm(torch.nn.Module):
    """``WrappedTorchNorm`` with support for sequence parallelism and ``--apply-layernorm-1p``.

    Setting ``sequence_parallel`` on the parameters makes Megatron all-reduce their gradients.
    """

    def __new__(
        cls,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> Any:
        # WrappedTorchNorm raises an error if this is set
        config_without_sp = copy.copy(config)
        config_without_sp.sequence_parallel = False
        norm: Any
        if config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm":
            norm = ZeroCenteredRMSNorm(hidden_size, eps)
        else:
            norm = WrappedTorchNorm(config_without_sp, hidden_size, eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by ``1 + weight`` in float32, as Transformer Engine does."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        scale = 1 + self.weight.to(dtype)
        normed = torch.nn.functional.rms_norm(wide, scale.shape, scale, self.eps)
        return normed.to(x.dtype)


class GatheredDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that supports context parallelism by all-gathering keys and values.

    Note that this gives up the memory savings of context parallelism. On a CPU, causal attention
    uses PyTorch's ``scaled_dot_product_attention``.

    The attention mask is ``[batch or 1, 1, local queries, keys]`` (True means masked), or None if
    it is causal. Set ``v_channels`` if values have a different head dim than keys.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        config_without_cp = config
        if config.context_parallel_size > 1:
            if config.window_size is not None:
                raise ConfigError("window_size with CP requires Transformer Engine.")
            config_without_cp = copy.copy(config)
            config_without_cp.context_parallel_size = 1  # Megatron supports only 1
            config_without_cp.masked_softmax_fusion = False  # the fused kernel ignores our mask
        super().__init__(config_without_cp, *args, pg_collection=pg_collection, **kwargs)
        self.config = config
        if v_channels is not None:
            local_heads = self.num_attention_heads_per_partition
            self.hidden_size_per_partition = local_heads * v_channels
        cp_group = getattr(pg_collection, "cp", None)
        self.cp_group: Any = cp_group or parallel_state.get_context_parallel_group()
        # undoes the scaling of --apply-query-key-layer-scaling, as Megatron's softmax does
        layer_scale = self.scale_mask_softmax.scale or 1
        self.logit_scale = self.softmax_scale * layer_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        **kwargs: Any,
    ) -> Tensor:
        key = self._gather(key)
        value = self._gather(value)
        if self.cp_group.size() > 1 and attention_mask is None:
            attention_mask = self._causal_mask(len(query), len(key))
        optional_inputs = [attention_mask, *kwargs.values()]  # mask, bias and packed sequences
        has_options = any(option is not None for option in optional_inputs)
        if not has_options and self._can_use_torch(query, key, value):
            return self._attend_causally(query, key, value)
        return super().forward(query, key, value, attention_mask, attn_mask_type, **kwargs)

    def _attend_causally(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Use PyTorch's attention, which needs ``[batch, heads, sequence, head_dim]``."""
        output = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.logit_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _can_use_torch(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether this is causal attention on a CPU without any other options."""
        softmax = self.scale_mask_softmax
        return (
            query.device.type == "cpu"
            and softmax.attn_mask_type is AttnMaskType.causal
            and softmax.window_size is None
            and self.softmax_offset is None
            and not (self.training and self.attention_dropout.p)
            and query.shape[0] == key.shape[0]
            and query.shape[-1] == value.shape[-1]  # otherwise torch has no fused kernel
        )

    def _causal_mask(self, num_queries: int, num_keys: int) -> Tensor:
        """Build the mask of this rank's last queries, ``[1, 1, num_queries, num_keys]``."""
        positions = token_positions(num_keys, self.cp_group)
        query_positions = positions[-num_queries:, None]
        key_positions = torch.arange(num_keys, device=positions.device)
        is_future = key_positions > query_positions
        return is_future[None, None]

    def _gather(self, x: Tensor) -> Tensor:
        """All-gather keys or values over context-parallel ranks, in the order of the sequence.

        Each rank has two chunks, see :func:`token_positions`.
        """
        ranks = self.cp_group.size()
        if ranks == 1:
            return x
        gathered = gather_from_sequence_parallel_region(x, group=self.cp_group)
        chunks_of_ranks = gathered.unflatten(0, (ranks, 2, -1))
        first_half = chunks_of_ranks[:, 0]
        second_half = chunks_of_ranks[:, 1].flip(0)
        ordered = torch.cat([first_half, second_half])
        return ordered.flatten(0, 1)


def token_positions(length: int, cp_group: torch.distributed.ProcessGroup) -> Tensor:
    """Get the positions of this rank's tokens in a sequence of ``length`` tokens.

    With context parallelism, Megatron cuts sequences into ``2 * cp`` chunks and gives chunks ``i``
    and ``2 * cp - 1 - i`` to rank ``i``.
    """
    device = torch.cuda.current_device()
    positions = torch.arange(length, device=device)
    ranks = cp_group.size()
    if ranks == 1:
        return positions
    first_chunk = cp_group.rank()
    second_chunk = 2 * ranks - 1 - first_chunk
    chunks = positions.view(2 * ranks, -1)
    local_chunks = chunks[[first_chunk, second_chunk]]
    return local_chunks.flatten()
