"""What a mechanism's function asks of the ranks over which heads and tokens are spread."""

from torch import Tensor


class Ranks:
    """One rank that has all heads and all tokens; Megatron's is ``mcore.head_ranks``.

    ``...`` are any leading dimensions, the tokens among them.
    """

    def all_heads(self, x: Tensor) -> Tensor:
        """``[..., heads]`` of every rank from this rank's, the same on all."""
        return x

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of ``[..., heads]``, which all ranks computed alike from all heads.

        The backward pass gives every rank the gradient of the whole.
        """
        return x

    def token_mean(self, x: Tensor) -> Tensor:
        """``[n]`` from ``[..., n]``: the mean over all tokens of the sequence, without gradient."""
        return x.detach().flatten(0, -2).mean(0)

    def add_loss(self, carrier: Tensor, loss: Tensor, name: str) -> Tensor:
        """``carrier``, whose backward pass adds the gradient of ``loss`` (a mean over tokens).

        Nothing is added to the loss that is printed, and nothing at all where no model is trained.
        """
        return carrier

    def observe(self, name: str, values: Tensor) -> None:
        """Hand a figure of this layer to whoever draws it."""
