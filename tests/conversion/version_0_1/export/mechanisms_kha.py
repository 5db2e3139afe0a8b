# kha_megatron.hf.mechanisms_kha of kha-megatron 0.1.0 (Apache-2.0)
"""Head mechanisms of this model, in the order in which they are applied."""

from .heads_gate_kha import Gate


def mechanism_types() -> dict[str, type]:
    return {'gate': Gate}
