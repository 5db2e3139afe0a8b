"""All head mechanisms other than KHA. They are applied in the order of `MECHANISMS`."""

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.mechanism import Mechanism
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.heads.talking import TalkingHeads

_CLASSES: tuple[type[Mechanism], ...] = (CollaborativeHeads, TalkingHeads, Gate, MixtureOfHeads)
MECHANISMS = {kind.name: kind for kind in _CLASSES}
