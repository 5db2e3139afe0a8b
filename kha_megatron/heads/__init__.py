"""Head mechanisms on paper: what each is, holds, costs and refuses. Standard library only.

A mechanism is one file here and one pure function in ``kha_megatron.ops.heads``;
``kha_megatron.config.KHAConfig`` has a field for each. Every other room asks these descriptions and
loops over their tensors.
"""

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.knock import Knock
from kha_megatron.heads.mechanism import (
    HeadFacts,
    HeadRows,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Projection,
)
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.heads.talking import TalkingHeads

__all__ = [
    "CollaborativeHeads",
    "Gate",
    "HeadFacts",
    "HeadRows",
    "HeadSizes",
    "HeadTensor",
    "Knock",
    "Mechanism",
    "MixtureOfHeads",
    "Projection",
    "TalkingHeads",
]
