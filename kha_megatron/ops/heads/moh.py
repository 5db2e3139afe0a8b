"""Mixture-of-Head attention on plain tensors (arXiv 2410.11842), equations by the paper's numbers.

Shape legend: ``...`` tokens; ``H`` query heads, of which the first ``S`` are shared and ``R`` are
routed; ``K`` routed heads that a token has. Routing is computed over all heads on every rank, in
float32 at least, so that all ranks choose the same.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kha_megatron.heads.moh import MixtureOfHeads
from kha_megatron.ops.heads.ranks import Ranks


class Routing(NamedTuple):
    """Who is chosen for each token, and with what weight."""

    weights: Tensor
    """``[..., H]``: 0 for a head that the token does not have."""
    probabilities: Tensor
    """``[..., R]``: the softmax over the routed heads."""
    chosen: Tensor
    """``[..., R]``: 1 for a head that the token has, else 0; without gradient."""


def apply(
    tensors: dict[str, Tensor], weights: Mapping[str, Tensor], moh: MixtureOfHeads, ranks: Ranks
) -> dict[str, Tensor]:
    """Score heads by their queries at ``qkv``, if so; weigh what they give at ``output``."""
    if "query" in tensors:
        return {"moh_norms": torch.linalg.vector_norm(_wide(tensors["query"]), dim=-1)}
    if moh.router == "learned":
        scores = tensors["moh_router"]
    else:
        scores = ranks.all_heads(tensors["moh_norms"])
    routing = route(scores, moh, ranks.iteration() if moh.anneal else None)
    ranks.observe("moh-load", partial(_load, routing, ranks))
    ranks.observe("moh-entropy", partial(_entropy, routing.probabilities))
    given = routing.weights
    if ranks.trains:
        given = _balanced(routing, moh, ranks)
    output = tensors["output"]
    return {"output": (output * ranks.own_heads(given).unsqueeze(-1)).to(output.dtype)}


def route(scores: Tensor, moh: MixtureOfHeads, iteration: int | None = None) -> Routing:
    """Choose and weigh the heads of each token.

    Args:
        scores: ``[..., H + 2]`` of a learned router: ``W_s x``, ``W_r x`` and ``W_h x``. Else
            ``[..., H]``: norms.
        moh: of one layer.
        iteration: see :meth:`~kha_megatron.heads.moh.MixtureOfHeads.active_heads`.
    """
    scores = _wide(scores)
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
    if moh.quantized:  # equation 9, whose gradient is that of equation 5 without the threshold
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


def _balanced(routing: Routing, moh: MixtureOfHeads, ranks: Ranks) -> Tensor:
    """The weights, with the gradient of the load-balance loss (equations 7 and 8) on their way."""
    _, probabilities, chosen = routing
    frequency = ranks.token_mean(chosen)
    mean = probabilities.flatten(0, -2).mean(0)
    loss = (mean * frequency).sum()
    weight = moh.balance
    if moh.balance_scale == "code":
        loss = loss * len(frequency)
        weight /= ranks.layers
    ranks.observe("moh-balance-loss", loss.detach)
    return ranks.add_loss(routing.weights, weight * loss) if weight else routing.weights


def _load(routing: Routing, ranks: Ranks) -> Tensor:
    """``[H]``: the share of tokens that have a head."""
    frequency = ranks.token_mean(routing.chosen)
    shared = routing.weights.shape[-1] - len(frequency)
    return torch.cat([frequency.new_ones(shared), frequency])


def _spread(norms: Tensor) -> Tensor:
    """``[..., 1]``: the standard deviation over heads; not 0 where all of them are alike."""
    offset = norms - norms.mean(-1, keepdim=True)
    variance = offset.square().sum(-1, keepdim=True) / max(1, norms.shape[-1] - 1)
    return variance.clamp_min(torch.finfo(norms.dtype).eps).sqrt()


def _entropy(probabilities: Tensor) -> Tensor:
    """Of a token's probabilities, the mean over tokens; 1 where all heads are alike, 0 for one."""
    entropy = torch.special.entr(probabilities).sum(-1).mean()
    return entropy / torch.tensor(float(max(2, probabilities.shape[-1]))).log()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
