"""The maths of Knocking-Heads Attention, free of any parallelism."""

from kha_megatron.ops.fused import knock
from kha_megatron.ops.knocking import fold, initial_weight

__all__ = ["fold", "initial_weight", "knock"]
