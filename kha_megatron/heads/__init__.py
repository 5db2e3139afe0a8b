"""Head mechanisms: their settings, parameters, costs, restrictions and computation.

Each mechanism is one class in one file and one field of ``kha_megatron.config.KHAConfig``. The rest
of the package loops over these classes. Note that importing this package does not import torch.
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
