"""Mixture-of-Head attention (MoH, https://arxiv.org/abs/2410.11842).

For each token, a router picks some of the query heads and weights them. The first heads are
"shared", i.e. all tokens use them. The others are "routed": each token uses those with the highest
router scores. Some details differ between the paper and the authors' code (SkyworkAI/MoH), so there
are settings to choose between them. Equation numbers refer to the paper.

Every rank computes the routing of all heads in float32 or higher. Otherwise, ranks could disagree
on the selected heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import (
    Costs,
    HeadFacts,
    HeadSizes,
    HeadTensor,
    Mechanism,
    Stage,
)
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Router = Literal["learned", "query_norm"]
Source = Literal["code", "paper"]
RouterStart = Literal["normal", "zeros"]

GROUPS = 2
"""A learned router also weights two groups, the shared heads and the routed heads (eq. 6)."""

SAVED_FOR_ROUTING = 10
"""16-bit values that autograd saves per head for the routing, i.e. five float32 tensors."""


@dataclass(frozen=True, kw_only=True)
class MixtureOfHeads(Mechanism):
    """Settings of the router and of the number of heads to use.

    You can specify the number of heads either directly or as a fraction::

        MixtureOfHeads(shared=4, active=8)
        MixtureOfHeads(share=0.75)
    """

    name: ClassVar[str] = "moh"
    stages: ClassVar[tuple[Stage, ...]] = ("qkv", "output")
    is_sparse: ClassVar[bool] = True
    presets: ClassVar = MappingProxyType(
        {
            "moh_50": {"share": 0.5},
            "moh_75": {"share": 0.75},
            "moh_90": {"share": 0.9},
        }
    )

    shared: int | None = None
    """Number of heads that are used by every token (section 4.4)."""
    active: int | tuple[int, ...] | None = None
    """Number of routed heads per token. A list sets it separately for each layer."""
    share: float | None = None
    """Fraction of heads that a token uses, i.e. ``(shared + active) / num_heads``. By default, half
    of them (rounded down) are shared heads. Set ``shared`` or ``active`` to change this."""
    router: Router = "learned"
    """``learned``: linear projection of the layer input (eq. 5 and 6). ``query_norm``: no
    parameters; heads are ranked by the norms of their queries after KHA and before QK-norm (section
    4.4)."""
    quantized: bool = False
    """Use weight 1 for all selected heads and a straight-through gradient for the router (eq. 9 and
    10). This is useful to convert a trained model."""
    scale: Source = "code"
    """How to scale the head weights. ``paper``: eq. 5, so the weights of a learned router sum to at
    most 1. ``code``: weights are around 1, and query norms are divided by their standard deviation
    over the routed heads."""
    balance: float = 0.01
    """Coefficient of the load-balancing loss (``beta`` in eq. 8). 0 disables the loss."""
    balance_scale: Source = "code"
    """``paper``: eq. 7, summed over layers. ``code``: eq. 7 times the number of routed heads,
    averaged over layers."""
    anneal: int = 0
    """If positive, start with all routed heads and reduce them to ``active`` over this many
    iterations."""
    start: RouterStart = "normal"
    """How to initialize a learned router. ``zeros`` together with ``scale=code`` starts with weight
    1 for all heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_head_counts()
        error = self._setting_without_effect()
        if error is not None:
            raise ConfigError(error)

    def _check_head_counts(self) -> None:
        settings = []
        for name in ("shared", "active", "share"):
            if getattr(self, name) is not None:
                settings.append(name)
        is_sufficient = "share" in settings or settings == ["shared", "active"]
        if not is_sufficient or len(settings) == 3:
            raise ConfigError(
                "moh requires either shared and active, or share with at most one of the two, got "
                f"{', '.join(settings) or 'none of them'}. For example, use moh.share=0.75."
            )
        if isinstance(self.active, tuple):
            is_positive = len(self.active) > 0 and 0 not in self.active
            is_valid_active = is_positive and self.share is None
        else:
            is_valid_active = self.active != 0
        is_valid_share = self.share is None or 0 < self.share <= 1
        if not (is_valid_active and is_valid_share):
            raise ConfigError(
                "moh.active must be at least 1 (a list of numbers cannot be combined with "
                f"moh.share) and moh.share must be in (0, 1], got active={self.active} and "
                f"share={self.share}."
            )

    def _setting_without_effect(self) -> str | None:
        """Return an error message for a setting that other settings disable."""
        if self.start != "normal" and self.router == "query_norm":
            return f"moh.start={self.start} requires moh.router=learned. Remove moh.start."
        if self.balance_scale != "code" and not self.balance:
            return f"moh.balance_scale={self.balance_scale} has no effect with moh.balance=0."
        if self.scale != "code" and self.quantized and self.router == "learned":
            return (
                f"moh.scale={self.scale} has no effect with moh.quantized=true, which gives all "
                "selected heads the weight 1. Remove moh.scale."
            )
        return None

    def shared_heads(self, heads: int) -> int:
        """Return the number of shared heads if there are ``heads`` query heads."""
        if self.shared is not None:
            return self.shared
        assert not isinstance(self.active, tuple)
        used = self._used_heads(heads)
        if self.active is None:
            return used // 2
        return used - self.active

    def active_heads(self, heads: int, iteration: int | None = None) -> int:
        """Return the number of routed heads per token. Pass ``iteration`` to apply annealing."""
        shared = self.shared_heads(heads)
        active = self.active
        assert not isinstance(active, tuple)
        if active is None:
            active = self._used_heads(heads) - shared
        if iteration is None or iteration >= self.anneal:
            return active
        routed = heads - shared
        inactive = routed - active
        inactive_so_far = inactive * iteration // self.anneal
        return routed - inactive_so_far

    def _used_heads(self, heads: int) -> int:
        assert self.share is not None
        return round(self.share * heads)

    def for_layer(self, layer: int) -> Self:
        if not isinstance(self.active, tuple):
            return self
        return replace(self, active=self.active[layer])

    def tensors(self, sizes: HeadSizes) -> tuple[HeadTensor, ...]:
        if self.router == "query_norm":
            return ()
        return (
            HeadTensor(
                name="moh_router",
                shape=(sizes.query_heads + GROUPS, sizes.hidden_size),
                gradient="whole",
                heads="query",
                initial=(self.start,),
                hf="moh_router",
                reads_input=True,
            ),
        )

    def apply(
        self,
        tensors: "Mapping[str, Tensor]",
        weights: "Mapping[str, Tensor]",
        ranks: Ranks,
    ) -> "dict[str, Tensor]":
        if "query" in tensors:  # stage qkv, only for the router query_norm
            query = _widen(tensors["query"])
            return {"moh_norms": query.norm(dim=-1)}
        if self.router == "learned":
            scores = tensors["moh_router"]
        else:
            scores = ranks.all_heads(tensors["moh_norms"])
        return {"output": self._weight_heads(tensors["output"], scores, ranks)}

    def _weight_heads(
        self,
        output: "Tensor",
        scores: "Tensor",
        ranks: Ranks,
    ) -> "Tensor":
        """Multiply the local heads of ``output`` by their weights.

        Args:
            output (Tensor): Output of core attention.
            scores (Tensor): Scores of all heads, see :func:`route`.
            ranks (Ranks): Ranks with the other heads.
        """
        iteration = ranks.iteration("moh.anneal") if self.anneal else None
        routing = route(scores, self, iteration)
        ranks.observe("moh-load", partial(_load, routing, ranks))
        ranks.observe("moh-entropy", partial(_entropy, routing.probabilities))
        head_weights = routing.weights
        if ranks.trains:
            head_weights = _add_balance_loss(routing, self, ranks)
        local_weights = ranks.own_heads(head_weights)
        weighted = output * local_weights.unsqueeze(-1)
        return weighted.to(output.dtype)

    def costs(self, sizes: HeadSizes) -> Costs:
        heads = sizes.query_heads
        query_dim = sizes.dim("query")
        value_dim = sizes.dim("value")
        idle_heads = 0
        if not isinstance(self.active, tuple):  # see for_layer
            used_heads = self.shared_heads(heads) + self.active_heads(heads)
            idle_heads = heads - used_heads
        skippable_rows = value_dim  # of the projections, per idle head
        saved_per_head = value_dim + SAVED_FOR_ROUTING
        if self.router == "query_norm":
            saved_per_head += 2 * query_dim  # queries in float32
        else:  # the queries of idle heads are not needed
            skippable_rows += query_dim
        return Costs(
            flops=2 * self.parameters(sizes),
            skippable_flops=2 * idle_heads * sizes.hidden_size * skippable_rows,
            skippable_pair_flops=2 * idle_heads * (query_dim + value_dim),
            activations=heads * saved_per_head,
        )

    def acts_at(self, stage: Stage) -> bool:
        if stage == "qkv":
            return self.router == "query_norm"
        return stage == "output"

    @property
    def keeps_value_features(self) -> bool:
        return True

    @property
    def adds_loss(self) -> bool:
        return self.balance > 0

    @property
    def is_exact_at_start(self) -> bool:
        return self.quantized and (self.anneal > 0 or self.share == 1)

    def projections_to_double(self) -> tuple[()]:
        if self.router == "learned" or not self.quantized:
            raise ConfigError(
                f"{self} changes the head weights of a trained model. Set "
                "moh.router=query_norm and moh.quantized=true."
            )
        return ()

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        reason = super().unsupported_reason(facts)
        if reason is not None:
            return reason
        weights_by_norm = self.router == "query_norm" and self.scale == "paper"
        if facts.scales_queries and weights_by_norm and not self.quantized:
            return f"{self} depends on query norms, which change when the heads are folded"
        if facts.layers and isinstance(self.active, tuple):
            count = len(self.active)
            if count != facts.layers:
                return (
                    "moh.active must be a number or a list with one number for each of the "
                    f"{facts.layers} layers, got {count} numbers."
                )
        if facts.query_heads:
            return self._unsupported_heads(facts.query_heads)
        return None

    def _unsupported_heads(self, heads: int) -> str | None:
        """Return an error message if the numbers of heads do not fit together."""
        shared = self.shared_heads(heads)
        routed = heads - shared
        # a learned router weights shared against routed heads (equation 6)
        least_shared = 1 if self.router == "learned" else 0
        if isinstance(self.active, tuple):
            least_active = min(self.active)
            most_active = max(self.active)
        else:
            least_active = self.active_heads(heads)
            most_active = least_active
        has_enough_shared = shared >= least_shared
        has_enough_active = least_active >= 1
        if not (has_enough_shared and has_enough_active and most_active <= routed):
            return (
                f"{self} needs {shared} shared and {most_active} active of {heads} heads, but at "
                f"least {least_shared} shared and 1 active are required, and the sum must not "
                f"exceed {heads}. Change moh.shared or moh.active."
            )
        if self.router == "query_norm" and routed == 1:
            return f"{self} has no effect with a single routed head. Decrease moh.shared."
        if self.anneal and least_active == routed:
            return "moh.anneal has no effect if all heads are active. Remove moh.anneal."
        return None


class Routing(NamedTuple):
    weights: "Tensor"  # [..., num_heads], 0 for inactive heads
    probabilities: "Tensor"  # [..., num_routed], softmax over the routed heads
    chosen: "Tensor"  # [..., num_routed], 1 for active heads, else 0 (no gradient)


def route(
    scores: "Tensor",
    moh: MixtureOfHeads,
    iteration: int | None = None,
) -> Routing:
    """Select and weight the heads of each token.

    Args:
        scores (Tensor): Output of the learned router, of shape [..., num_heads + 2] (scores of the
            shared heads, of the routed heads, and of shared vs. routed), or the query norms of
            shape [..., num_heads] if there is no learned router.
        moh (MixtureOfHeads): Settings of the current layer.
        iteration (int, optional): Training iteration, see :meth:`MixtureOfHeads.active_heads`.
    """
    import torch

    scores = _widen(scores)
    is_learned = moh.router == "learned"
    groups = GROUPS if is_learned else 0
    heads = scores.shape[-1] - groups
    shared = moh.shared_heads(heads)
    routed = heads - shared
    active = moh.active_heads(heads, iteration)
    shared_scores, routed_scores, group_scores = scores.split(
        [shared, routed, groups],
        dim=-1,
    )
    if not is_learned and moh.scale == "code":
        routed_scores = routed_scores / _spread(routed_scores)
    probabilities = routed_scores.softmax(-1)
    chosen = _mark_highest(routed_scores, active)
    if is_learned:
        group_weights = group_scores.softmax(-1)  # equation 6
        shared_factor, routed_factor = group_weights.split(1, dim=-1)
        shared_weights = shared_scores.softmax(-1) * shared_factor
    else:
        shared_weights = shared_scores.new_ones(shared_scores.shape)
        routed_factor = probabilities.new_ones(())
    if moh.quantized:
        weights = _quantized_weights(shared_weights, probabilities * routed_factor, chosen)
        return Routing(weights, probabilities, chosen)
    routed_weights = probabilities * chosen
    if moh.scale == "code":  # increase the mean weight of the used heads to about 1
        total = routed_weights.sum(-1, keepdim=True)
        routed_weights = routed_weights * active / total
        if is_learned:
            shared_weights = shared_weights * (GROUPS * shared)
            routed_weights = routed_weights * GROUPS
    routed_weights = routed_weights * routed_factor
    weights = torch.cat([shared_weights, routed_weights], dim=-1)
    return Routing(weights, probabilities, chosen)


def _mark_highest(scores: "Tensor", active: int) -> "Tensor":
    """Return 1 for the ``active`` highest scores of each token and 0 for the others."""
    highest = scores.detach().topk(active, dim=-1)
    zeros = scores.new_zeros(scores.shape)
    return zeros.scatter(-1, highest.indices, 1.0)


def _quantized_weights(
    shared_weights: "Tensor",
    routed_weights: "Tensor",
    chosen: "Tensor",
) -> "Tensor":
    """Return weight 1 for used heads and 0 for the others (equation 9).

    The gradient is that of equation 5 without its threshold, i.e. as if the given weights were
    used.
    """
    import torch

    continuous = torch.cat([shared_weights, routed_weights], dim=-1)
    zero = continuous - continuous.detach()
    ones = chosen.new_ones(shared_weights.shape)
    discrete = torch.cat([ones, chosen], dim=-1)
    return discrete + zero


def _add_balance_loss(
    routing: Routing,
    moh: MixtureOfHeads,
    ranks: Ranks,
) -> "Tensor":
    """Add the load-balancing loss (eq. 7 and 8) in the backward pass of the head weights."""
    frequency = ranks.token_mean(routing.chosen)
    probabilities = routing.probabilities.flatten(0, -2)
    mean_probabilities = probabilities.mean(0)
    loss = (mean_probabilities * frequency).sum()  # equation 7
    weight = moh.balance
    if moh.balance_scale == "code":
        loss = loss * len(frequency)
        weight /= ranks.layers
    ranks.observe("moh-balance-loss", loss.detach)
    if not weight:
        return routing.weights
    return ranks.add_loss(routing.weights, weight * loss)


def _load(routing: Routing, ranks: Ranks) -> "Tensor":
    """Return the fraction of tokens that use each head, of shape [num_heads]."""
    import torch

    frequency = ranks.token_mean(routing.chosen)
    heads = routing.weights.shape[-1]
    shared_frequency = frequency.new_ones(heads - len(frequency))
    return torch.cat([shared_frequency, frequency])


def _spread(norms: "Tensor") -> "Tensor":
    """Return the standard deviation over heads, which is positive even if all norms are equal."""
    import torch

    offset = norms - norms.mean(-1, keepdim=True)
    degrees_of_freedom = max(1, norms.shape[-1] - 1)
    variance = offset.square().sum(-1, keepdim=True) / degrees_of_freedom
    smallest = torch.finfo(norms.dtype).eps
    return variance.clamp_min(smallest).sqrt()


def _entropy(probabilities: "Tensor") -> "Tensor":
    """Return the mean entropy of the router, from 0 to 1 (all routed heads are equally likely)."""
    import torch

    heads = max(2, probabilities.shape[-1])
    entropy = torch.special.entr(probabilities).sum(-1)
    return entropy.mean() / math.log(heads)


def _widen(x: "Tensor") -> "Tensor":
    """Convert to float32 unless the dtype is already at least as precise."""
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))
