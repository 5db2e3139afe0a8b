"""One row of the conversion's table: a Megatron tensor, and the Hugging Face tensors it holds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.layouts import Layout
from kha_megatron.heads import Projection

Shape = Callable[[Architecture], tuple[int, ...]]
When = Callable[[Architecture, int], bool]


class Knocked(NamedTuple):
    """What a projection knocks of a tensor's rows: ``knocked_dim`` of each head's, from ``start``.

    A linear knock folds into them.
    """

    projection: Projection
    head_rows: int
    start: int = 0


KnockedRows = Callable[[Architecture], Sequence[Sequence[Knocked]]]


class Row(NamedTuple):
    """A tensor of one layer, or of one expert, or of the model as a whole."""

    layout: Layout
    shape: Shape
    """Of the Megatron tensor."""
    names: tuple[str, ...]
    """In Megatron checkpoints. Transformer Engine fuses norms into the linear layer behind them, so
    some have two; the first is the one to write."""
    when: When
    """Whether layer ``i`` (from 0) of a model has it."""
    both: bool = False
    """Write it under all its names: Megatron's two backends ask for different ones."""
    per_expert: bool = False
    knocked: KnockedRows = lambda model: ()
    """For each of its Hugging Face tensors, what knocks it."""


def tensor_row(
    layout: Layout,
    shape: Shape,
    *names: str,
    when: When = lambda model, layer: True,
    both: bool = False,
    per_expert: bool = False,
    knocked: KnockedRows = lambda model: (),
) -> Row:
    """A :class:`Row`; the Megatron names are the last positional arguments."""
    return Row(layout, shape, names, when, both, per_expert, knocked)


def hidden(model: Architecture) -> tuple[int, ...]:
    """The shape of a norm in the residual stream."""
    return (model.hidden_size,)


def is_latent(model: Architecture, layer: int) -> bool:
    """Whether the layers have MLA or GLA."""
    return model.latent is not None
