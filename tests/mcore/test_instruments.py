"""The instruments measure on every layout what plain formulas give for the unsharded run."""

from collections import defaultdict

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

    current = 0
    written = []

    def train(watch):
        nonlocal current
        run = _start(case)
        if watch:
            watch_heads(
                run.chunks,
                case.khas[0],
                interval=2,
                iteration=lambda: current,
                write=lambda values, iteration: written.append((iteration, values)),
            )
        for current in range(1, 5):  # which the instruments read
            run._accumulate(MICROBATCHES[0] if current == 2 else MICROBATCHES[1])
            if current > 1:  # the second step is of the filled weights, as in the reference
                run.optimizer.step()
                run._gather_parameters()
        weights = []
        for chunk in run.chunks:
            weights += [_local(parameter.detach().clone()) for parameter in chunk.parameters()]
        for ddp in run.ddp:
            vars(ddp).clear()
        return weights

    unwatched = train(watch=False)
    watched = train(watch=True)
    assert len(watched) == len(unwatched)
    return written, all(map(torch.equal, watched, unwatched))


def _local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _reference(case):
    """Return the same values from plain formulas in one process.

    Hooks keep the tensors of all microbatches.
    """
    from kha_megatron.heads.diagnostics import diagnose

    replicas = case.layout.dp
    first_of_replicas = [rank * MICROBATCHES[0] // replicas for rank in range(replicas)]
    run = _start(case.twin())
    (model,) = run.chunks
    kha = case.khas[0]
    gate = kha.get(Gate)
    gates = gate.positions if gate else ()
    kept = defaultdict(dict)

    def keep_input(name, index):
        def hook(module, inputs):
            kept[name][run.microbatch] = inputs[index].detach().double()

        return hook

    def keep_output(name):
        def hook(module, inputs, output):
            if isinstance(output, tuple):
                output = output[0]
            kept[name][run.microbatch] = output.detach().double()

        return hook

    layers = model.decoder.layers[::2]  # every other layer is an MLP
    for layer in layers:
        attention = layer.self_attention
        number = layer.layer_number
        if gates:
            attention.linear_qkv.register_forward_hook(keep_output((number, "rows")))
        for position in gates:
            projection = getattr(attention, f"gate_{position}", None)
            if projection is not None:
                projection.register_forward_hook(keep_output((number, position)))
        core = attention.core_attention
        core.register_forward_pre_hook(keep_input((number, "queries"), 0))
        core.register_forward_pre_hook(keep_input((number, "keys"), 1))
        for projection in kha.variants:
            knocking = getattr(attention, f"knock_{projection}")
            knocking.register_forward_pre_hook(keep_input((number, projection), 0))
    run._accumulate(MICROBATCHES[0])

    expected = {}
    for layer in layers:
        attention = layer.self_attention
        number = layer.layer_number
        end = f"layer-{number - 1}"

        def tokens_of(name, number=number):
            return torch.cat([kept[number, name][m].flatten(0, 1) for m in first_of_replicas])

        sinks = []
        for microbatch in first_of_replicas:
            queries = kept[number, "queries"][microbatch]
            keys = kept[number, "keys"][microbatch]
            sinks.append(_sinks(queries, keys))
        sinks = torch.stack(sinks)
        for head, share in enumerate(sinks.mean(0).tolist()):
            expected[f"kha-attention-sink/head-{head}/{end}"] = share
        expected[f"kha-attention-sink/mean/{end}"] = sinks.mean().item()
        for position in gates:
            name = f"gate_{position}"
            if hasattr(attention, name):
                score = tokens_of(position)
            else:
                groups = attention.split.groups(tokens_of("rows")[None])
                score = attention.split(groups)[name]
            score = 1 / (1 + torch.exp(-score))
            expected[f"kha-gate-score/{position}/{end}"] = score.mean().item()
            expected[f"kha-gate-shut/{position}/{end}"] = (score < 0.1).double().mean().item()
        for projection, variant in kha.variants.items():
            weight = getattr(attention, f"knock_{projection}").weight
            for numbers in diagnose(weight, variant):
                name = f"kha-distance/{projection}-{numbers.matrix}/{end}"
                expected[name] = numbers.distance
            if "gate" in MATRICES[variant]:
                matrix = weight[MATRICES[variant].index("gate")].double()
                gate = 2 / (1 + torch.exp(-tokens_of(projection) @ matrix))
                expected[f"kha-gate-openness/{projection}/{end}"] = gate.mean().item()
                expected[f"kha-gate-spread/{projection}/{end}"] = gate.std(correction=0).item()
    for ddp in run.ddp:
        vars(ddp).clear()
    return expected


def _sinks(query, key):
    """Return for each head the mean attention of the other tokens to the first one.

    There are so few tokens that the instruments use all queries.
    """
    length, _, heads, dim = query.shape
    heads_of_group = heads // key.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    shares = []
    for head in range(heads):
        group = head // heads_of_group
        logits = query[:, 0, head] @ key[:, 0, group].T / dim**0.5
        attention = logits.masked_fill(future, -torch.inf).softmax(-1)
        shares.append(attention[1:, 0].mean())
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
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.whole) for case in WHOLE)],
    ids=str,
)
def test_equal_to_plain_formulas_on_every_rank_and_without_effect(ranks, case):
    (expected,) = ranks(_reference, 1, case)
    answers = ranks(_watched, case.layout.world, case)
    first_written, _ = answers[0]
    for written, same in answers:
        assert same, "the weights after the last step differ"
        assert [iteration for iteration, _ in written] == [2, 4]
        assert written == first_written
    _, values = first_written[0]
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert value == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-7), name
