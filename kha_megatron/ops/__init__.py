"""The computation of Knocking-Heads Attention on plain tensors, without parallelism."""

from kha_megatron.ops.fused import knock
from kha_megatron.ops.heads import initial_weight
from kha_megatron.ops.heads.knock import fold

__all__ = ["fold", "initial_weight", "knock"]
