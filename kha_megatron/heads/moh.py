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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from kha_megatron.errors import ConfigError
from kha_megatron.heads.mechanism import Costs, HeadFacts, HeadSizes, HeadTensor, Mechanism, Stage
from kha_megatron.heads.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

Router = Literal["learned", "query_norm"]
Source = Literal["code", "paper"]
RouterStart = Literal["normal", "zeros"]


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
        {"moh_50": {"share": 0.5}, "moh_75": {"share": 0.75}, "moh_90": {"share": 0.9}}
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
        if isinstance(self.active, list):  # from JSON
            object.__setattr__(self, "active", tuple(self.active))
        super().__post_init__()
        active = self.active if isinstance(self.active, tuple) else (self.active,)
        given = [name for name in ("shared", "active", "share") if getattr(self, name) is not None]
        if given not in (["shared", "active"], ["share"], ["shared", "share"], ["active", "share"]):
            raise ConfigError(
                "moh requires either shared and active, or share with at most one of the two, got "
                f"{', '.join(given) or 'none of them'}. For example, use moh.share=0.75."
            )
        is_list, share = isinstance(self.active, tuple), self.share
        if not active or 0 in active or (share is not None and (is_list or not 0 < share <= 1)):
            raise ConfigError(
                "moh.active must be at least 1 (a list of numbers cannot be combined with "
                f"moh.share) and moh.share must be in (0, 1], got active={self.active} and "
                f"share={share}."
            )
        if why := self._setting_without_effect():
            raise ConfigError(why)

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
        if self.shared is not None:
            return self.shared
        assert self.share is not None
        assert not isinstance(self.active, tuple)
        on = round(self.share * heads)
        return on // 2 if self.active is None else on - self.active

    def active_heads(self, heads: int, iteration: int | None = None) -> int:
        """Return the number of routed heads per token. Pass ``iteration`` to apply annealing."""
        shared, active = self.shared_heads(heads), self.active
        assert not isinstance(active, tuple)
        if active is None:
            assert self.share is not None
            active = round(self.share * heads) - shared
        if iteration is None or iteration >= self.anneal:
            return active
        routed = heads - shared
        return routed - (routed - active) * iteration // self.anneal

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
                shape=(sizes.query_heads + 2, sizes.hidden_size),
                gradient="whole",
                heads="query",
                initial=(self.start,),
                hf="moh_router",
                reads_input=True,
            ),
        )

    def apply(
        self, tensors: "Mapping[str, Tensor]", weights: "Mapping[str, Tensor]", ranks: Ranks
    ) -> "dict[str, Tensor]":
        if "query" in tensors:
            return {"moh_norms": _widen(tensors["query"]).norm(dim=-1)}
        if self.router == "learned":
            scores = tensors["moh_router"]
        else:
            scores = ranks.all_heads(tensors["moh_norms"])
        routing = route(scores, self, ranks.iteration("moh.anneal") if self.anneal else None)
        ranks.observe("moh-load", partial(_load, routing, ranks))
        ranks.observe("moh-entropy", partial(_entropy, routing.probabilities))
        factors = _add_balance_loss(routing, self, ranks) if ranks.trains else routing.weights
        output = tensors["output"]
        return {"output": (output * ranks.own_heads(factors).unsqueeze(-1)).to(output.dtype)}

    def costs(self, sizes: HeadSizes) -> Costs:
        heads, by_norms = sizes.query_heads, self.router == "query_norm"
        query, value, idle = sizes.dim("query"), sizes.dim("value"), 0
        if not isinstance(self.active, tuple):  # see for_layer
            idle = heads - self.shared_heads(heads) - self.active_heads(heads)
        return Costs(
            flops=2 * sum(tensor.size for tensor in self.tensors(sizes)),
            skippable_flops=2 * idle * sizes.hidden_size * (value + query * (not by_norms)),
            skippable_pair_flops=2 * idle * (query + value),
            activations=heads * (value + 10) + 2 * heads * query * by_norms,
        )

    def acts_at(self, stage: Stage) -> bool:
        return super().acts_at(stage) and (stage == "output" or self.router == "query_norm")

    @property
    def adds_loss(self) -> bool:
        return self.balance > 0

    @property
    def is_exact_at_start(self) -> bool:
        return self.quantized and (self.anneal > 0 or self.share == 1)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return values | {"active": list(self.active)} if isinstance(self.active, tuple) else values

    def projections_to_double(self) -> tuple[()]:
        if self.router == "learned" or not self.quantized:
            raise ConfigError(
                f"{self} changes the head weights of a trained model. Set "
                "moh.router=query_norm and moh.quantized=true."
            )
        return ()

    def unsupported_reason(self, facts: HeadFacts) -> str | None:
        if why := super().unsupported_reason(facts):
            return why
        by_norms = self.router == "query_norm" and self.scale == "paper" and not self.quantized
        if facts.scales_queries and by_norms:
            return f"{self} depends on query norms, which change when the heads are folded"
        layers, heads = facts.layers, facts.query_heads
        per_layer = self.active if isinstance(self.active, tuple) else ()
        if layers and per_layer and len(per_layer) != layers:
            return (
                "moh.active must be a number or a list with one number for each of the "
                f"{layers} layers, got {len(per_layer)} numbers."
            )
        if not heads:
            return None
        # a learned router weights shared against routed heads (equation 6)
        shared, least = self.shared_heads(heads), int(self.router == "learned")
        active = per_layer or (self.active_heads(heads),)
        if shared < least or not 1 <= min(active) <= max(active) <= heads - shared:
            return (
                f"{self} needs {shared} shared and {max(active)} active of {heads} heads, but at "
                f"least {least} shared and 1 active are required, and the sum must not exceed "
                f"{heads}. Change moh.shared or moh.active."
            )
        if self.router == "query_norm" and heads - shared == 1:
            return f"{self} has no effect with a single routed head. Decrease moh.shared."
        if self.anneal and min(active) == heads - shared:
            return "moh.anneal has no effect if all heads are active. Remove moh.anneal."
        return None


class Routing(NamedTuple):
    weights: "Tensor"  # [..., num_heads], 0 for inactive heads
    probabilities: "Tensor"  # [..., num_routed], softmax over the routed heads
    chosen: "Tensor"  # [..., num_routed], 1 for active heads, else 0 (no gradient)


def route(scores: "Tensor", moh: MixtureOfHeads, iteration: int | None = None) -> Routing:
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
    learned = moh.router == "learned"
    heads = scores.shape[-1] - 2 * learned
    shared, active = moh.shared_heads(heads), moh.active_heads(heads, iteration)
    of_shared, of_routed, of_kinds = scores.split([shared, heads - shared, 2 * learned], dim=-1)
    if not learned and moh.scale == "code":
        of_routed = of_routed / _spread(of_routed)
    probabilities = of_routed.softmax(-1)
    chosen = torch.zeros_like(probabilities)
    chosen = chosen.scatter(-1, of_routed.detach().topk(active, dim=-1).indices, 1.0)

    one = torch.ones_like(of_shared)
    if learned:
        shared_kind, routed_kind = of_kinds.softmax(-1).split(1, dim=-1)  # equation 6
        of_shared = of_shared.softmax(-1) * shared_kind
    else:
        of_shared, routed_kind = one, probabilities.new_ones(())
    if moh.quantized:  # equation 9, with the gradient of equation 5 without its threshold
        real = torch.cat([of_shared, probabilities * routed_kind], dim=-1)
        weights = torch.cat([one, chosen], dim=-1) + (real - real.detach())
        return Routing(weights, probabilities, chosen)
    of_routed = probabilities * chosen
    if moh.scale == "code":
        of_routed = of_routed * active / of_routed.sum(-1, keepdim=True)
        if learned:
            of_shared, of_routed = of_shared * (2 * shared), of_routed * 2
    weights = torch.cat([of_shared, of_routed * routed_kind], dim=-1)
    return Routing(weights, probabilities, chosen)


def _add_balance_loss(routing: Routing, moh: MixtureOfHeads, ranks: Ranks) -> "Tensor":
    """Add the load-balancing loss (eq. 7 and 8) in the backward pass of the head weights."""
    _, probabilities, chosen = routing
    frequency = ranks.token_mean(chosen)
    loss = (probabilities.flatten(0, -2).mean(0) * frequency).sum()
    weight = moh.balance
    if moh.balance_scale == "code":
        loss = loss * len(frequency)
        weight /= ranks.layers
    ranks.observe("moh-balance-loss", loss.detach)
    return ranks.add_loss(routing.weights, weight * loss) if weight else routing.weights


def _load(routing: Routing, ranks: Ranks) -> "Tensor":
    import torch

    frequency = ranks.token_mean(routing.chosen)
    shared = routing.weights.shape[-1] - len(frequency)
    return torch.cat([frequency.new_ones(shared), frequency])


def _spread(norms: "Tensor") -> "Tensor":
    import torch

    offset = norms - norms.mean(-1, keepdim=True)
    variance = offset.square().sum(-1, keepdim=True) / max(1, norms.shape[-1] - 1)
    return variance.clamp_min(torch.finfo(norms.dtype).eps).sqrt()


def _entropy(probabilities: "Tensor") -> "Tensor":
    import torch

    entropy = torch.special.entr(probabilities).sum(-1).mean()
    return entropy / math.log(max(2, probabilities.shape[-1]))


def _widen(x: "Tensor") -> "Tensor":
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))
