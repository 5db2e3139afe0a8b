"""The maths of the head mechanisms on plain tensors: one file, one pure function for each.

:data:`FUNCTIONS` is asked by Megatron's attention and by that of our transformers class, wherever a
:data:`~kha_megatron.heads.mechanism.Stage` is reached.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kha_megatron.heads.mechanism import Mechanism, Stage, Start
from kha_megatron.ops.heads.collaborative import apply as collaborative
from kha_megatron.ops.heads.gate import apply as gate
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


@torch.no_grad()
def initial_weight(
    weight: Tensor, starts: Sequence[Start], *, std: float = 0.02, seed: int | None = None
) -> Tensor:
    """Fill a parameter in place with its initial value (``HeadTensor.starts``).

    Args:
        weight: ``[n, ...]``, any device and dtype: one entry for each start.
        starts: ``identity`` for a square matrix, ``zeros``, ``ones``, ``normal``, or ``blocks`` for
            a matrix each of whose rows has as many columns of its own, with a mean square of 1.
        std: standard deviation of ``normal``.
        seed: seed of ``normal``, drawn on the CPU in float32 from a generator of its own, so that
            every rank and device gets the same numbers; None uses torch's current state.

    Returns:
        ``weight``.
    """
    if "normal" in starts:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        weight.copy_(torch.randn(weight.shape, device="cpu", generator=generator) * std)
    for part, start in zip(weight, starts, strict=True):
        if start == "identity":
            torch.nn.init.eye_(part)
        elif start == "blocks":
            rows, columns = part.shape
            owner = torch.arange(columns, device=part.device) * rows // columns
            mine = owner == torch.arange(rows, device=part.device)[:, None]
            part.copy_(mine * (columns / mine.sum(1, keepdim=True)).sqrt())
        elif start != "normal":
            part.fill_(start == "ones")
    return weight
