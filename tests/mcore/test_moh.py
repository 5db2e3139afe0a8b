"""Mixture-of-Head attention against the float64 oracle, and on ranks against one.

The balance weight is 5 throughout: at the 0.01 of the paper a load-balance loss that counts twice
moves no gradient by more than 1e-4. Each rule for gradients and choices is taken out once, and the
same comparison must then fail.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads.gate import Gate
from kha_megatron.heads.moh import MixtureOfHeads
from tests.distributed.pieces import Piece, assemble
from tests.mcore.sharded_layer import decoded

HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH, LAYERS = 8, 2, 6, 28, 8, 3, 2
BALANCE, SCALE = 5.0, 0.5


def moh(**settings):
    return MixtureOfHeads(**{"shared": 3, "active": 2, "balance": BALANCE} | settings)


LEARNED = moh()
NORMS = moh(router="query_norm")
QUANTIZED = moh(router="query_norm", quantized=True)
KINDS = (
    KHAConfig(moh=LEARNED),
    KHAConfig(moh=moh(scale="paper", balance_scale="paper")),
    KHAConfig(moh=moh(quantized=True)),
    KHAConfig(moh=NORMS),
    KHAConfig(moh=moh(router="query_norm", scale="paper", balance_scale="paper")),
    KHAConfig(moh=QUANTIZED, query="mlp"),
    KHAConfig(moh=moh(active=[5, 1]), value="linear"),
    KHAConfig(moh=moh(shared=None, active=None, share=0.75), query="linear", value="mlp"),
)
GATED = KHAConfig(moh=NORMS, gate=Gate(query="head", value="element", output="shared"))


def layer_of(kha, number=2, tp=1, **overrides):
    from tests.distributed import models
    from tests.distributed.pieces import fill

    models.initialize(tensor_model_parallel_size=tp)
    config = models.transformer_config(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        hidden_size=HIDDEN,
        tensor_model_parallel_size=tp,
        params_dtype=torch.float64,
        **overrides,
    )
    layer = models.attention(config, kha, number).double()
    fill([layer])
    return layer


def passed(layer, part=slice(None)):
    """Output and input of a pass over this rank's tokens, which has been taken back."""
    generator = torch.Generator().manual_seed(3)
    shape = (TOKENS, BATCH, HIDDEN)
    hidden = torch.randn(shape, dtype=torch.float64, generator=generator)[part].requires_grad_()
    upstream = torch.randn(shape, dtype=torch.float64, generator=generator)[part]
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    output, _ = layer(hidden, mask)
    output.backward(upstream)
    return output, hidden, upstream


def against_oracle(kha):
    """Errors of the output and of every gradient, relative to their norms, in float64."""
    from tests import oracle

    heard = []
    door = {"experimental_attention_variant_loss_scale_func": heard.append}
    layer = layer_of(kha, **door)
    layer.config.experimental_attention_variant_loss_scale_func(torch.tensor([SCALE]))  # a schedule
    assert heard == [torch.tensor([SCALE])]  # whoever was there before
    output, hidden, upstream = passed(layer)
    ours = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    each = HEADS // GROUPS
    blocks = ours["linear_qkv.weight"].view(GROUPS, each + 2, HEAD_DIM, HIDDEN)
    weights = [b.reshape(-1, HIDDEN).T for b in (blocks[:, :each], blocks[:, -2], blocks[:, -1])]
    twin = hidden.detach().clone().requires_grad_()
    routing = kha.moh
    shared, active = routing.shared, routing.active
    if routing.share:  # 75 % of 8: 6 heads, half of them shared
        shared, active = 3, 3
    if isinstance(active, tuple):
        active = active[1]  # of the second layer
    losses = []

    def weigh(queries):
        found, loss = oracle.mixture_weights(
            twin.transpose(0, 1),
            queries,
            ours.get("moh_router.weight"),
            shared=shared,
            active=active,
            scale=routing.scale,
            quantized=routing.quantized,
        )
        losses.append(loss)
        return found

    expected = oracle.attention(
        twin.transpose(0, 1),
        *weights,
        ours["linear_proj.weight"].T,
        kha,
        {p: list(ours[f"knock_{p}.weight"]) for p in kha.variants},
        num_query_groups=GROUPS,
        head_dim=HEAD_DIM,
        q_norm=ours["q_layernorm.weight"],
        k_norm=ours["k_layernorm.weight"],
        weigh=weigh,
    ).transpose(0, 1)
    factor = (HEADS - shared) / LAYERS if routing.balance_scale == "code" else 1
    ((expected * upstream).sum() + SCALE * BALANCE * factor * losses[0]).backward()
    pairs = {"output": (output, expected), "input gradient": (hidden.grad, twin.grad)}
    pairs |= {n: (p.grad, ours[n].grad) for n, p in layer.named_parameters()}
    return {n: ((a - b).norm() / b.norm()).item() for n, (a, b) in pairs.items()}


def all_against_oracle():
    return [against_oracle(kha) for kha in KINDS]


def test_equals_the_oracle(ranks):
    for kha, found in zip(KINDS, ranks(all_against_oracle, 1)[0], strict=True):
        assert ("moh_router.weight" in found) == (kha.moh.router == "learned")
        wrong = {n: e for n, e in found.items() if not e < 1e-11}
        assert not wrong, f"{kha}: {wrong}"


def on_ranks(khas, tp, sp, mutate=None):
    """Output, input gradient and weights' gradients, as pieces of what one rank would have."""
    with mutate() if mutate else mock.MagicMock():
        return [_pieces(kha, tp, sp) for kha in khas]


def _pieces(kha, tp, sp):
    from megatron.core import parallel_state

    from tests.distributed.pieces import pieces

    # the gradients of QK-norms are parts, which Megatron sums after the backward pass
    layer = layer_of(kha, tp=tp, sequence_parallel=sp, qk_layernorm=False)
    each = TOKENS // tp if sp else TOKENS
    first = parallel_state.get_tensor_model_parallel_rank() * each if sp else 0
    output, hidden, _ = passed(layer, slice(first, first + each))
    found = [Piece(p.name, p.shape, p.offsets, p.data) for p in pieces([layer], lambda p: p.grad)]
    for name, x in (("output", output.detach()), ("input gradient", hidden.grad)):
        found.append(Piece(name, (TOKENS, BATCH, HIDDEN), (first, 0, 0), x.float().numpy()))
    return found


def errors(ranks, khas, tp, sp, mutate=None):
    """Of the worst quantity of each configuration; a text where replicas differ."""
    wanted = ranks(on_ranks, 1, khas, 1, False)[0]
    found = ranks(on_ranks, tp, khas, tp, sp, mutate)
    result = []
    for want, *got in zip(wanted, *found, strict=True):
        one = assemble([want])
        try:
            many = assemble(got)
        except AssertionError as difference:
            result.append(str(difference))
            continue
        assert one.keys() == many.keys()
        off = {n: np.linalg.norm(many[n] - one[n]) / np.linalg.norm(one[n]) for n in one}
        result.append({n: float(e) for n, e in off.items() if not e < 1e-6})
    return result


@pytest.mark.parametrize(("tp", "sp"), [(2, False), pytest.param(4, True, marks=pytest.mark.whole)])
def test_ranks_choose_weigh_and_learn_as_one(ranks, tp, sp):
    """At TP 4 there are fewer key/value heads than ranks."""
    khas = (*KINDS, GATED)
    assert errors(ranks, khas, tp, sp) == [{}] * len(khas)


def decoded_on_ranks(kha):
    return decoded(kha, 2, {"num_attention_heads": HEADS, "num_query_groups": 1})


@pytest.mark.parametrize("routing", [LEARNED, QUANTIZED], ids=str)
def test_decodes_with_megatrons_static_cache(ranks, routing):
    """A later token may have any head, so all keys and values are kept."""
    for whole, steps in ranks(decoded_on_ranks, 2, KHAConfig(moh=routing)):
        torch.testing.assert_close(steps, whole, rtol=1e-12, atol=1e-12)


def outside_of_megatrons_loop():
    layer = layer_of(KHAConfig(moh=moh(anneal=3)))
    trained = layer_of(KHAConfig(moh=moh()))
    assert torch.equal(passed_without_gradient(layer), passed_without_gradient(trained))
    with pytest.raises(ConfigError) as caught:
        passed(layer)
    return str(caught.value)


def passed_without_gradient(layer):
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        return layer(hidden, torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None])[0]


def test_heads_are_turned_off_where_iterations_are_counted(ranks):
    """Elsewhere a model is a trained one, and none is trained."""
    said = ranks(outside_of_megatrons_loop, 1)[0]
    assert "moh.anneal needs Megatron's training loop" in said


# What the comparison must catch: each rule taken out where it is needed.


def _projected(self, hidden, weight):
    """What a router's projection gives, with another weight."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    scores = torch.nn.functional.linear(hidden, weight)
    if not self.config.sequence_parallel:
        return scores
    return gather_from_sequence_parallel_region(
        scores, tensor_parallel_output_grad=False, group=self.tp_group
    )


def with_the_knocks_rule_on_the_router():
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    from kha_megatron.mcore.head_inputs import InputProjection

    def forward(self, hidden):
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return _projected(self, hidden, weight)

    return mock.patch.object(InputProjection, "forward", forward)


def without_the_sum_over_parts_of_the_sequence():
    from kha_megatron.mcore.head_inputs import InputProjection

    return mock.patch.object(
        InputProjection, "forward", lambda self, hidden: _projected(self, hidden, self.weight)
    )


def with_whole_gradients_reduced_and_scattered():
    from kha_megatron.mcore import head_inputs

    gather = head_inputs.gather_from_sequence_parallel_region

    def summing(x, tensor_parallel_output_grad=True, group=None):
        return gather(x, tensor_parallel_output_grad=True, group=group)

    return mock.patch.object(head_inputs, "gather_from_sequence_parallel_region", summing)


def with_slices_in_place_of_scattered_weights():
    from kha_megatron.mcore.head_ranks import HeadRanks

    return mock.patch.object(
        HeadRanks, "own_heads", lambda self, x: x.chunk(self.tp.size(), -1)[self.tp.rank()]
    )


def with_each_rank_choosing_of_its_own_heads():
    from megatron.core import parallel_state

    from kha_megatron.heads import moh

    route = moh.route

    def local(scores, *settings):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        each, rank = HEADS // ranks, parallel_state.get_tensor_model_parallel_rank()
        mine = torch.zeros(scores.shape[-1], dtype=torch.bool)
        mine[rank * each : (rank + 1) * each] = True
        mine[:3] = mine[HEADS:] = True  # shared heads and kinds are no choice
        return route(scores.masked_fill(~mine, -1e9), *settings)

    return mock.patch.object(moh, "route", local)


@pytest.mark.parametrize(
    ("mutate", "routing", "tp", "sp", "caught"),
    [
        (with_the_knocks_rule_on_the_router, LEARNED, 2, False, {"moh_router.weight"}),
        (without_the_sum_over_parts_of_the_sequence, LEARNED, 2, True, "replicas of moh_router"),
        (with_whole_gradients_reduced_and_scattered, LEARNED, 2, True, {"moh_router.weight"}),
        (with_slices_in_place_of_scattered_weights, LEARNED, 2, False, "replicas of "),
        # at TP 2 a rank has all of the routed heads, and is right by accident
        (with_slices_in_place_of_scattered_weights, NORMS, 4, False, {"input gradient"}),
        (with_each_rank_choosing_of_its_own_heads, LEARNED, 2, False, "replicas of "),
    ],
)
def test_without_a_rule_the_comparison_fails(ranks, mutate, routing, tp, sp, caught):
    (wrong,) = errors(ranks, [KHAConfig(moh=routing)], tp, sp, mutate)
    if isinstance(caught, str):
        assert str(wrong).startswith(caught), wrong
    else:
        assert caught <= wrong.keys(), wrong
