"""The maths of Knocking-Heads Attention, free of any parallelism."""

from kha_megatron.ops.fused import knock
from kha_megatron.ops.heads import initial_weight
from kha_megatron.ops.heads.knock import fold

__all__ = ["fold", "initial_weight", "knock"]
