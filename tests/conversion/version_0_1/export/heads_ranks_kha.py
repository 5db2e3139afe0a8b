# kha_megatron.heads.ranks of kha-megatron 0.1.0 (Apache-2.0)
"""Collectives across the ranks that share a layer's heads and tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[[str, Callable[[], "Tensor"]], None]
"""Callback for metrics. The second argument computes the value, so that unused metrics are free."""


class Ranks:
    """Single-rank version, where all collectives are no-ops. Megatron's is ``mcore.head_ranks``."""

    listeners: Sequence[Listener] = ()

    @property
    def trains(self) -> bool:
        """Whether we need auxiliary losses, i.e. whether the model is training."""
        return False

    @property
    def layers(self) -> int:
        return 1

    def iteration(self, setting: str) -> int | None:
        """Return the number of completed training iterations (None for a trained model).

        ``setting`` is the name of the setting that needs it, for error messages.
        """
        return None

    def all_heads(self, x: "Tensor") -> "Tensor":
        """All-gather a tensor of shape [..., num_heads] along its last dimension.

        No gradient reduction in backward, because all ranks compute the same thing afterwards.
        """
        return x

    def own_heads(self, x: "Tensor") -> "Tensor":
        """Slice the local heads from a replicated [..., num_heads] tensor."""
        return x

    def token_mean(self, x: "Tensor") -> "Tensor":
        """Average over all tokens of the sequence, keeping only the last dimension. Not
        differentiable."""
        return x.detach().flatten(0, -2).mean(0)

    def add_loss(self, carrier: "Tensor", loss: "Tensor") -> "Tensor":
        """Attach an auxiliary loss to ``carrier``, similar to Megatron's ``MoEAuxLossAutoScaler``.

        Args:
            carrier (Tensor): Any tensor that contributes to the model output. Returned unchanged.
            loss (Tensor): Scalar mean over the local tokens, identical on all TP ranks. It only
                affects the gradients, not the logged loss.
        """
        return carrier

    def observe(self, name: str, figure: "Callable[[], Tensor]") -> None:
        """Report a metric (logged as ``kha-{name}/layer-{i}``).

        ``figure`` must return a mean over the local tokens: either a scalar or one value per head.
        """
        for listener in self.listeners:
            listener(name, figure)
