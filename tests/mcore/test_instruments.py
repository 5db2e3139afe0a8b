"""The instruments measure on every layout what plain formulas give for the unsharded run."""

import pytest
import torch

from kha_megatron.heads import Gate
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES
from tests.distributed.cases import FULL, GTA, LATENT, MIXED, MLA, OVERLAP, TIED, ZERO, case
from tests.distributed.parallelism import MICROBATCHES

TOLERANCE = 1e-5  # float32 sums in another order, as in tests/distributed/test_parallelism.py


def _start(case):
    from tests.distributed.parallelism import _Run, initialize

    initialize(case.layout)
    return _Run(case, case.khas[0])


def _watched(case):
    """Return what is written in four iterations, and whether the trained weights are the same."""
    from kha_megatron.mcore.instruments import watch_heads

    now = [0]
    written = []
    ends = []
    for watching in (False, True):
        run = _start(case)
        if watching:
            watch_heads(
                run.chunks,
                case.khas[0],
                interval=2,
                iteration=lambda: now[0],
                write=lambda values, at: written.append((at, values)),
            )
        for iteration in range(1, 5):
            now[0] = iteration
            run._accumulate(MICROBATCHES[0] if iteration == 2 else MICROBATCHES[1])
            if iteration > 1:  # the second step is of the filled weights, as in the reference
                run.optimizer.step()
                run._gather_parameters()
        ends.append([p.detach().clone() for chunk in run.chunks for p in chunk.parameters()])
        for ddp in run.ddp:
            vars(ddp).clear()
    same = all(torch.equal(_local(a), _local(b)) for a, b in zip(*ends, strict=True))
    return written, same


def _local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _reference(case):
    """The same names from plain formulas, on one process: hooks keep all microbatches' tensors."""
    from kha_megatron.heads.diagnostics import diagnose

    first = [r * MICROBATCHES[0] // case.layout.dp for r in range(case.layout.dp)]
    run = _start(case.twin())
    (model,) = run.chunks
    kept = {}
    gate = case.khas[0].get(Gate)
    gates = gate.positions if gate else ()

    def keep(what, index):
        def hook(module, inputs):
            kept.setdefault(what, {})[run.microbatch] = inputs[index].detach().double()

        return hook

    def hand_on(what):
        def hook(module, inputs, result):
            result = result[0] if isinstance(result, tuple) else result
            kept.setdefault(what, {})[run.microbatch] = result.detach().double()

        return hook

    layers = model.decoder.layers[::2]  # every other layer is an MLP
    for layer in layers:
        attention = layer.self_attention
        if gates:
            attention.linear_qkv.register_forward_hook(hand_on((layer.layer_number, "rows")))
        for position in gates:
            if module := getattr(attention, f"gate_{position}", None):
                module.register_forward_hook(hand_on((layer.layer_number, position)))
        for index, what in enumerate(("asking", "asked")):
            attention.core_attention.register_forward_pre_hook(
                keep((layer.layer_number, what), index)
            )
        for p in case.khas[0].variants:
            knocking = getattr(attention, f"knock_{p}")
            knocking.register_forward_pre_hook(keep((layer.layer_number, p), 0))
    run._accumulate(MICROBATCHES[0])

    expected = {}
    for layer in layers:
        attention, number = layer.self_attention, layer.layer_number
        end = f"layer-{number - 1}"

        def heard(what, number=number):
            return torch.cat([kept[number, what][m].flatten(0, 1) for m in first])

        sinks = torch.stack(
            [_sinks(kept[number, "asking"][m], kept[number, "asked"][m]) for m in first]
        )
        for head, share in enumerate(sinks.mean(0).tolist()):
            expected[f"kha-attention-sink/head-{head}/{end}"] = share
        expected[f"kha-attention-sink/mean/{end}"] = sinks.mean().item()
        for position in gates:
            name = f"gate_{position}"
            if hasattr(attention, name):
                score = heard(position)
            else:
                score = attention.split(attention.split.groups(heard("rows")[None]))[name]
            score = 1 / (1 + torch.exp(-score))
            expected[f"kha-gate-score/{position}/{end}"] = score.mean().item()
            expected[f"kha-gate-shut/{position}/{end}"] = (score < 0.1).double().mean().item()
        for p, variant in case.khas[0].variants.items():
            weight = getattr(attention, f"knock_{p}").weight
            for numbers in diagnose(weight, variant):
                place = f"{p}-{numbers.matrix}/{end}"
                expected[f"kha-distance/{place}"] = numbers.distance
            if "gate" in MATRICES[variant]:
                matrix = weight[MATRICES[variant].index("gate")].double()
                gate = 2 / (1 + torch.exp(-heard(p) @ matrix))
                expected[f"kha-gate-openness/{p}/{end}"] = gate.mean().item()
                expected[f"kha-gate-spread/{p}/{end}"] = gate.std(correction=0).item()
    for ddp in run.ddp:
        vars(ddp).clear()
    return expected


def _sinks(query, key):
    """Of each head, the first token's mean share in the attention of all tokens behind it.

    There are few enough that all are asked.
    """
    shares, length = [], len(query)
    for head in range(query.shape[2]):
        group = head // (query.shape[2] // key.shape[2])
        logits = query[:, 0, head] @ key[:, 0, group].T / query.shape[-1] ** 0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        shares.append(logits.masked_fill(~seen, -torch.inf).softmax(-1)[1:, 0].mean())
    return torch.stack(shares)


CASES = [
    case(tp=2, sp=True, dp=2, ddp=ZERO | OVERLAP),
    case(khas=(MIXED.updated(init="random"),), pp=2, vpp=2, layers=4),
    case(khas=(HeadsConfig(Gate(output="element", value="head")),), tp=2, groups=2),
]
WHOLE = [
    case(cp=2, tp=2, per_token_loss=True),
    case(tp=2, savings=FULL),
    case(dp=2, fsdp="torch"),
    case(khas=(HeadsConfig(Gate(output="shared", dense="element")),), tp=2, sp=True, dp=2),
    case(khas=(MLA,), tp=2, sp=True, config=LATENT),
    case(khas=(GTA,), tp=4, groups=2, config=TIED),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.whole) for case in WHOLE)], ids=str
)
def test_equal_to_plain_formulas_on_every_rank_and_without_effect(ranks, case):
    (expected,) = ranks(_reference, 1, case)
    answers = ranks(_watched, case.layout.world, case)
    for written, same in answers:
        assert same, "the weights after the last step differ"
        assert [at for at, _ in written] == [2, 4]
        assert written == answers[0][0]
    values = answers[0][0][0][1]
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert value == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-7), name
