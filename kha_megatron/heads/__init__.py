"""Head mechanisms: settings, parameters, costs, unsupported models, and the computation.

Each mechanism is one class in one file, and a field of ``kha_megatron.config.KHAConfig``. The other
rooms loop over these classes. Importing this package does not import torch.
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
