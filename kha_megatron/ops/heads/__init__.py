"""The maths of the head mechanisms on plain tensors: one file, one pure function for each.

:data:`FUNCTIONS` is asked by Megatron's attention and by that of our transformers class, wherever a
:data:`~kha_megatron.heads.mechanism.Stage` is reached.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from kha_megatron.heads.mechanism import Mechanism, Stage
from kha_megatron.ops.heads.collaborative import apply as collaborative
from kha_megatron.ops.heads.gate import apply as gate
from kha_megatron.ops.heads.initial import initial_weight
from kha_megatron.ops.heads.moh import apply as moh
from kha_megatron.ops.heads.ranks import Ranks

Tensors = dict[str, Tensor]
Weights = Mapping[str, Tensor]

FUNCTIONS: Mapping[str, Callable[[Tensors, Weights, Any, Ranks], Tensors]] = {
    "collaborative": collaborative,
    "gate": gate,
    "moh": moh,
}
"""By the name of a mechanism, ``(tensors, weights, mechanism, ranks)``. The knock is not there, nor
is one that acts at ``core``, which is no function of what a single head has.

``tensors`` are ``query``, ``key`` and ``value`` at the stage ``qkv``, ``output`` at ``output``, as
``[..., heads, D]`` with the heads of this rank, and ``dense`` ``[..., hidden]`` at ``dense``. What
the mechanism itself ``makes`` is there as its one head that all others share.
Beside them stands, by its name and at every stage, what the layer's input gives with the
mechanism's rows (``[..., heads, features]``) and with its tensors that read it: ``[..., features]``
of all tokens, ``[..., 1, features]`` where every head meets it, or of the tokens of ``dense``.

It answers with those that it changes, and may add others, which later stages then find. ``weights``
are the mechanism's other parameters by their names, as far as they meet those heads. ``ranks`` is
asked for what other ranks know.
"""


def applied(
    stage: Stage,
    mechanisms: Iterable[tuple[Mechanism, Weights]],
    tensors: Tensors,
    kept: Tensors,
    ranks: Ranks,
) -> list[Tensor]:
    """``tensors`` after the mechanisms of a stage, in their order.

    Args:
        stage: which one it is.
        mechanisms: with their weights, in the order in which they act.
        tensors: what the stage acts on.
        kept: what the input and earlier stages gave; what is added here is put there.
        ranks: see :data:`FUNCTIONS`.
    """
    names = list(tensors)
    for mechanism, weights in mechanisms:
        if mechanism.acts_at(stage):
            changed = FUNCTIONS[mechanism.name](tensors | kept, weights, mechanism, ranks)
            tensors = tensors | {name: x for name, x in changed.items() if name in names}
            kept |= {name: x for name, x in changed.items() if name not in names}
    return [tensors[name] for name in names]


__all__ = ["FUNCTIONS", "applied", "initial_weight"]
