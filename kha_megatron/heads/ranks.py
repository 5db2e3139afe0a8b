"""Collectives over the ranks that share the heads and tokens of a layer."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[[str, Callable[[], "Tensor"]], None]
"""Callback that receives the name of a metric and a function that computes it."""


class Ranks:
    """No-op collectives of a single rank. ``mcore.head_ranks`` implements them for Megatron."""

    listeners: Sequence[Listener] = ()

    @property
    def trains(self) -> bool:
        """Whether the model is training, so that auxiliary losses are needed."""
        return False

    @property
    def layers(self) -> int:
        return 1

    def iteration(self) -> int | None:
        """Return the number of completed training iterations, or None for a trained model."""
        return None

    def all_heads(self, x: "Tensor") -> "Tensor":
        """All-gather ``[..., heads]``. Since all ranks compute the same from the result, gradients
        are not summed in the backward pass."""
        return x

    def own_heads(self, x: "Tensor") -> "Tensor":
        """Return the local slice of a replicated ``[..., heads]`` tensor. The backward pass
        all-gathers gradients, so that every rank has the full gradient."""
        return x

    def token_mean(self, x: "Tensor") -> "Tensor":
        """Average ``[..., n]`` over the tokens of the sequence, without gradient."""
        return x.detach().flatten(0, -2).mean(0)

    def add_loss(self, carrier: "Tensor", loss: "Tensor") -> "Tensor":
        """Return ``carrier`` and add the gradient of ``loss`` in its backward pass during training.

        The logged loss does not change. ``carrier`` can be any tensor that contributes to the model
        output. ``loss`` is a scalar mean over the local tokens, equal on all tensor-parallel ranks.
        """
        return carrier

    def observe(self, name: str, figure: "Callable[[], Tensor]") -> None:
        """Pass a metric to the listeners, which log it as ``kha-{name}/layer-L``. ``figure``
        returns a mean over the local tokens, either as a scalar or for each head of the layer."""
        for listener in self.listeners:
            listener(name, figure)
