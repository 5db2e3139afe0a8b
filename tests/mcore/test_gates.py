"""Gated attention against the float64 oracle, on one rank and on several.

Each comparison is of the output, the gradient of the input and that of every weight, in float64;
1e-6 is the rounding of Megatron's rotary frequencies, which are float32.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate, HeadFacts, HeadSizes
from kha_megatron.model.qkv import QKVLayout
from tests import oracle
from tests.distributed.pieces import as_array, assemble, fill, pieces
from tests.mcore import test_family

HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 8, 2, 6, 28, 12, 2
BOUND = 1e-6

GRANULARITIES = ("element", "head", "shared")
OUTPUT = KHAConfig(gate=Gate(output="element"))
FORMS = [*product(("multiply", "add"), ("sigmoid", "silu", "half_sigmoid"), (True, False))]
PLACES = [*product(("output", "value", "key", "query"), GRANULARITIES), ("dense", "element")]


def in_every_form(places):
    """Gates at these places, in each form."""
    return [
        KHAConfig(gate=Gate(**dict(places), form=form, activation=activation, reads_input=reads))
        for form, activation, reads in FORMS
    ]


EVERYWHERE = KHAConfig(
    query="linear",
    value="mlp",
    gate=Gate(output="element", value="head", key="shared", query="element", dense="element"),
)
"""Megatron's own rows beside ours, and all rules of gradients."""
HEADS_ALONE = KHAConfig(gate=Gate(output="head", value="element", key="element", form="add"))
SHARED = KHAConfig(value="mlp", gate=Gate(output="shared", value="shared", query="shared"))
UNREAD = KHAConfig(
    gate=Gate(output="head", value="element", key="shared", dense="element", reads_input=False)
)
ON_RANKS = [
    OUTPUT,
    replace(OUTPUT, value="mlp"),
    EVERYWHERE,
    HEADS_ALONE,
    SHARED,
    UNREAD,
]


def passes(khas, size=1, sp=False, mutate=None, **overrides):
    """Of this rank, for each configuration: output and input gradient of all tokens that it has,
    and the pieces of weights and gradients."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tests.distributed import models

    if mutate is not None:
        mutate()
    models.initialize(tensor_model_parallel_size=size)
    rank = torch.distributed.get_rank()
    settings = {
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM,
        "hidden_size": HIDDEN,
        "tensor_model_parallel_size": size,
        "sequence_parallel": sp,
        "params_dtype": torch.float64,
    }
    config = models.transformer_config(**settings | overrides)
    rotary = RotaryEmbedding(HEAD_DIM, 1.0, rotary_base=10000, use_cpu_initialization=True)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    options = {} if config.multi_latent_attention else {"rotary_pos_emb": rotary(TOKENS).double()}

    def mine(x):
        return x.chunk(size)[rank] if sp else x

    found = []
    for kha in khas:
        layer = models.attention(config, kha).double()
        fill([layer])
        hidden, upstream = inputs()
        hidden = mine(hidden).requires_grad_()
        output, _ = layer(hidden, mask, **options)
        output.backward(mine(upstream))
        for name, parameter in layer.named_parameters():
            if "layernorm" in name and size > 1:  # as Megatron's finalize_model_grads does
                torch.distributed.all_reduce(parameter.grad)
        gradients = list(pieces([layer], lambda p: p.grad))
        found.append(
            (as_array(output.detach()), as_array(hidden.grad), list(pieces([layer])), gradients)
        )
    return found


def inputs():
    generator = torch.Generator().manual_seed(3)
    shape = (TOKENS, BATCH, HIDDEN)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]


def whole(ranks, sp):
    """The passes of all ranks, as one process would hold them."""
    for of_ranks in zip(*ranks, strict=True):
        outputs, hiddens, filled, gradients = zip(*of_ranks, strict=True)
        if sp:
            yield (
                np.concatenate(outputs),
                np.concatenate(hiddens),
                *map(assemble, (filled, gradients)),
            )
            continue
        for replicas in (outputs, hiddens):
            assert all(np.array_equal(x, replicas[0]) for x in replicas)
        yield outputs[0], hiddens[0], *map(assemble, (filled, gradients))


def reference(kha, filled):
    """Output, input gradient and gradients of the oracle on the weights of a layer."""
    weights = {n: torch.from_numpy(x).double().requires_grad_() for n, x in filled.items()}
    hidden, upstream = inputs()
    hidden.requires_grad_()
    sizes = HeadSizes(query_heads=HEADS, kv_heads=GROUPS, head_dim=HEAD_DIM, hidden_size=HIDDEN)
    layout = QKVLayout(
        groups=GROUPS, queries=HEADS // GROUPS, head_dim=HEAD_DIM, extra=kha.rows(sizes)
    )
    rows = weights["linear_qkv.weight"].unflatten(0, (GROUPS, -1))
    parts = {name: rows[:, part.rows].flatten(0, 1) for name, part in layout.parts.items()}
    gates = {
        row.name.removeprefix("gate_"): parts[row.name].unflatten(0, (-1, row.features))
        for row in layout.extra
    }
    own = [n.removesuffix(".weight") for n in weights if n.startswith("gate_")]
    gates |= {name.removeprefix("gate_"): weights[f"{name}.weight"] for name in own}
    output = oracle.attention(
        hidden.transpose(0, 1),
        *(parts[name].T for name in ("query", "key", "value")),
        weights["linear_proj.weight"].T,
        kha,
        {p: list(weights[f"knock_{p}.weight"]) for p in kha.variants},
        num_query_groups=GROUPS,
        head_dim=HEAD_DIM,
        q_norm=weights.get("q_layernorm.weight"),
        k_norm=weights.get("k_layernorm.weight"),
        rotary_base=10000.0,
        gate=kha.gate,
        gate_weights=gates,
    ).transpose(0, 1)
    output.backward(upstream)
    return output.detach(), hidden.grad, {name: x.grad for name, x in weights.items()}


def wrong(kha, found, expected=reference):
    """The quantities that differ by more than rounding."""
    output, hidden, filled, gradients = found
    want, want_hidden, want_gradients = expected(kha, filled)
    pairs = {"output": (output, want), "input gradient": (hidden, want_hidden)}
    assert gradients.keys() == want_gradients.keys()
    pairs |= {name: (gradients[name], want_gradients[name]) for name in gradients}
    errors = {
        n: float(np.linalg.norm(a - b.numpy()) / np.linalg.norm(b)) for n, (a, b) in pairs.items()
    }
    return {name: error for name, error in errors.items() if not error < BOUND}


def normed_and_not(khas):
    """Those that QK-norm leaves something of, and those that it does not."""
    refused = [bool(kha.gate.unsupported_reason(HeadFacts(qk_norm=True))) for kha in khas]
    for normed in (True, False):
        yield (
            normed,
            [k for k, is_refused in zip(khas, refused, strict=True) if is_refused != normed],
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gates_at_every_position_equal_the_oracle(ranks, granularity):
    places = [place for place in PLACES if place[1] == granularity or place[0] == "dense"]
    for normed, khas in normed_and_not(in_every_form(places)):
        found = ranks(passes, 1, khas, qk_layernorm=normed)
        for kha, one in zip(khas, whole(found, False), strict=True):
            assert not wrong(kha, one), kha


@pytest.mark.parametrize("qk_norm", [True, False])
def test_knocking_heads_without_gates_equal_the_oracle(ranks, qk_norm):
    khas = [KHAConfig(query="linear", key="gate", value="mlp"), KHAConfig()]
    for kha, one in zip(
        khas, whole(ranks(passes, 1, khas, qk_layernorm=qk_norm), False), strict=True
    ):
        assert not wrong(kha, one), kha


@pytest.mark.parametrize(
    ("size", "sp"), [(2, False), (2, True), pytest.param(4, True, marks=pytest.mark.whole)]
)
def test_gates_and_knocking_heads_on_ranks_equal_the_oracle(ranks, size, sp):
    """Four ranks share two key/value heads."""
    found = ranks(passes, size, ON_RANKS, size, sp)
    for kha, one in zip(ON_RANKS, whole(found, sp), strict=True):
        assert not wrong(kha, one), kha


@pytest.mark.parametrize("reads", [True, False], ids=["", "without-input"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_latent_attention_has_a_gate_on_its_output(ranks, granularity, reads):
    gate = Gate(output=granularity, reads_input=reads)
    test_family.check(ranks, KHAConfig(value="linear", gate=gate), True, 8)


def trained_a_step(dtype):
    """Losses and gradients by name: of stock Megatron with its flag, of ours with that flag, and of
    ours with the gate asked for by its other name."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.distributed import models

    models.initialize()
    bf16 = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "num_query_groups": 2}
    flagged = models.transformer_config(attention_output_gate=True, **bf16)
    plain = models.transformer_config(**bf16)
    stock = get_gpt_decoder_block_spec(flagged, False, normalization="RMSNorm")
    found = []
    for config, kha, spec in (
        (flagged, KHAConfig(), stock),
        (flagged, KHAConfig(), None),
        (flagged, OUTPUT, None),
        (plain, OUTPUT, None),
    ):
        models.initialize()
        model = models.gpt_model(config, kha, layer_spec=spec, perturbed=False)
        tokens, positions, mask = models.batch()
        losses = model(tokens, positions, mask, labels=tokens)
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"losses": losses.detach()} | gradients)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_gate_equals_megatrons_bit_for_bit(ranks, dtype):
    """Bit for bit, from the start that both draw, whichever name it was asked for by."""
    stock, *others = ranks(trained_a_step, 1, dtype)[0]
    for other in others:
        assert stock.keys() == other.keys()
        assert all(torch.equal(stock[name], other[name]) for name in stock)


def built(kha, size, overrides):
    """This rank's rows of ``linear_qkv``, as it was built, and what folding says."""
    from tests.distributed import models
    from tests.mcore.test_attention import attention_layer

    models.initialize(tensor_model_parallel_size=size)
    layer = attention_layer(models, kha, tensor_model_parallel_size=size, **overrides)
    return layer.linear_qkv.weight.detach(), layer.folding.obstacle


@pytest.mark.parametrize(("size", "groups"), [(1, 3), (3, 3), (2, 1)])
def test_only_padding_rows_start_at_zero(ranks, size, groups):
    """Nothing reads them, so they stay there, and an exported model comes back as it was."""
    kha = KHAConfig(gate=Gate(output="head", value="head"))
    found = ranks(built, size, kha, size, {"num_query_groups": groups})
    rows = torch.cat([rows for rows, _ in found]).unflatten(0, (groups, -1))
    sizes = HeadSizes(query_heads=6, kv_heads=groups, head_dim=10)
    layout = QKVLayout(groups=groups, queries=6 // groups, head_dim=10, extra=kha.rows(sizes))
    zero = ~rows.any(-1)
    assert layout.padding.stop > layout.padding.start
    assert zero[:, layout.padding].all()
    assert zero.sum() == groups * (layout.padding.stop - layout.padding.start)


def test_folding_needs_gates_with_rows_of_whole_heads(ranks):
    knock = KHAConfig(query="linear")
    obstacles = [
        ranks(built, 1, replace(knock, gate=gate), 1, {})[0][1]
        for gate in (Gate(output="element"), Gate(output="head"), Gate(dense="element"))
    ]
    assert obstacles == [
        None,
        "gates have rows between the heads of queries, keys and values",
        None,
    ]
