"""Communication of head mechanisms over the ranks that share a layer's heads and tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[[str, Callable[[], "Tensor"]], None]
"""Receives the name of a figure and a function that computes it (:meth:`Ranks.observe`)."""


class Ranks:
    """A single rank with all heads and all tokens. ``mcore.head_ranks`` has Megatron's.

    ``...`` stands for any leading dimensions, including the tokens.
    """

    listeners: Sequence[Listener] = ()
    """Receive the figures of :meth:`observe`."""

    @property
    def trains(self) -> bool:
        """Whether a model is training, so that losses are added."""
        return False

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return 1

    def iteration(self) -> int | None:
        """Return the number of completed training iterations, or None for a trained model."""
        return None

    def all_heads(self, x: "Tensor") -> "Tensor":
        """Gather ``[..., heads]`` over the ranks.

        All ranks compute the same from the result, so backward does not sum gradients.
        """
        return x

    def own_heads(self, x: "Tensor") -> "Tensor":
        """Return this rank's part of ``[..., heads]``, which is equal on all ranks.

        Backward gathers the gradients, so that every rank has the gradient of the whole.
        """
        return x

    def token_mean(self, x: "Tensor") -> "Tensor":
        """Return the mean ``[n]`` of ``[..., n]`` over the sequence's tokens, without gradient."""
        return x.detach().flatten(0, -2).mean(0)

    def add_loss(self, carrier: "Tensor", loss: "Tensor") -> "Tensor":
        """Return ``carrier``; its backward pass adds the gradient of ``loss`` during training.

        The printed loss does not change.

        Args:
            carrier: any tensor that the model's output depends on.
            loss: 0-d, a mean over this rank's tokens, equal on all tensor-parallel ranks.
        """
        return carrier

    def observe(self, name: str, figure: "Callable[[], Tensor]") -> None:
        """Pass a figure of this layer to the listeners.

        Args:
            name: logged as ``kha-{name}/layer-L``.
            figure: returns a mean ``[]`` over this rank's tokens, or ``[heads]`` of all heads,
                logged as ``kha-{name}/head-i/layer-L``.
        """
        for listener in self.listeners:
            listener(name, figure)
