"""What a mechanism's function asks of the ranks over which heads and tokens are spread."""

from collections.abc import Callable, Sequence

from torch import Tensor

Listener = Callable[[str, Callable[[], Tensor]], None]
"""Gets the name of a figure, and a function that computes it (:meth:`Ranks.observe`)."""


class Ranks:
    """One rank that has all heads and all tokens; Megatron's is ``mcore.head_ranks``.

    ``...`` are any leading dimensions, the tokens among them.
    """

    listeners: Sequence[Listener] = ()
    """Who draws figures, if anybody does."""

    @property
    def trains(self) -> bool:
        """Whether a model is trained here: only then losses are added."""
        return False

    @property
    def layers(self) -> int:
        """How many the model has."""
        return 1

    def iteration(self) -> int | None:
        """How many iterations of its training are behind the model; None for a trained one."""
        return None

    def all_heads(self, x: Tensor) -> Tensor:
        """``[..., heads]`` of every rank from this rank's, the same on all.

        Every rank computes the same from it: the backward pass sums nothing.
        """
        return x

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of ``[..., heads]``, which all ranks computed alike from all heads.

        The backward pass gives every rank the gradient of the whole.
        """
        return x

    def token_mean(self, x: Tensor) -> Tensor:
        """``[n]`` from ``[..., n]``: the mean over all tokens of the sequence, without gradient."""
        return x.detach().flatten(0, -2).mean(0)

    def add_loss(self, carrier: Tensor, loss: Tensor) -> Tensor:
        """``carrier``, whose backward pass adds the gradient of ``loss``.

        Nothing is added to the loss that is printed. Only where a model trains.

        Args:
            carrier: any tensor on the way to the model's output.
            loss: 0-d, a mean over this rank's tokens, the same on all tensor-parallel ranks.
        """
        return carrier

    def observe(self, name: str, figure: Callable[[], Tensor]) -> None:
        """Hand a figure of this layer to whoever draws it.

        Args:
            name: ``kha-{name}/layer-L`` in TensorBoard.
            figure: computes it, where somebody listens: one number ``[]``, a mean over the tokens
                of this rank; or ``[heads]`` of all heads, drawn as ``kha-{name}/head-i/layer-L``.
        """
        for listener in self.listeners:
            listener(name, figure)
