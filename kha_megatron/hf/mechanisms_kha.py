"""The head mechanisms that this code can compute, in the order in which they act."""

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.mechanism import Mechanism
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.heads.talking import TalkingHeads

KINDS: tuple[type[Mechanism], ...] = (CollaborativeHeads, TalkingHeads, Gate, MixtureOfHeads)
MECHANISMS = {kind.name: kind for kind in KINDS}
"""Classes by name. An export lists only the mechanisms of its model."""
