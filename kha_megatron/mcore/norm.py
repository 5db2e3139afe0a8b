"""A torch norm for the local backend that sequence parallelism accepts."""

import copy

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """Megatron's ``WrappedTorchNorm`` with the mark that sequence parallelism needs.

    Upstream refuses sequence parallelism only because torch's norms do not set the
    ``sequence_parallel`` attribute by which Megatron sums the weight gradients of sequence shards;
    the norm itself works row by row. Transformer Engine's and apex's set it, and so does this one.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Build the ``torch.nn`` norm that ``config.normalization`` names."""
        accepted = copy.copy(config)
        accepted.sequence_parallel = False
        norm = WrappedTorchNorm(accepted, hidden_size, eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm
