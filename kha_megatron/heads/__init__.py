"""Attention head mechanisms: KHA, gates, mixture-of-heads, talking heads and collaborative heads.

Each one is a subclass of ``Mechanism`` in its own file, plus a line in ``registry``. The rest of
the package only iterates over these classes. Importing this package does not import torch.
"""

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.knock import Knock
from kha_megatron.heads.mechanism import (
    Costs,
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
    "Costs",
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
