"""A torch norm for the local backend that sequence parallelism accepts."""

import copy

import torch
from megatron.core.transformer import transformer_block
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


def accept_sequence_parallelism() -> None:
    """Let a block made of one repeated layer spec end in :class:`TorchNorm`.

    Such a spec (``--spec`` names one) cannot choose the block's final norm: Megatron takes
    Transformer Engine's, apex's, or without both ``WrappedTorchNorm``. Only that last is replaced,
    by what builds the same norm and refuses nothing more.
    """
    if transformer_block.LayerNormImpl is WrappedTorchNorm:
        transformer_block.LayerNormImpl = TorchNorm
