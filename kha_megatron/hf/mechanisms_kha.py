"""The head mechanisms that this copy of the code can compute, in the order in which they act."""

from typing import Any

from kha_megatron.heads.collaborative import CollaborativeHeads
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.heads.talking import TalkingHeads
from kha_megatron.ops.heads.collaborative import apply as apply_collaborative
from kha_megatron.ops.heads.gate import apply as apply_gate
from kha_megatron.ops.heads.moh import apply as apply_moh
from kha_megatron.ops.heads.talking import attend as attend_talking

MECHANISMS: dict[str, tuple[Any, Any]] = {
    "collaborative": (CollaborativeHeads, apply_collaborative),
    "talking": (TalkingHeads, attend_talking),
    "gate": (Gate, apply_gate),
    "moh": (MixtureOfHeads, apply_moh),
}
"""Settings and computation by name. An export lists only the mechanisms of its model."""
