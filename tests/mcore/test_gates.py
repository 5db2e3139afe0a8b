"""Gated attention compared with the float64 oracle, on one rank and on several."""

from itertools import product

import pytest
import torch

from kha_megatron.heads import Gate, HeadFacts, HeadSizes, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.qkv import QKVLayout
from tests.mcore.sharded_layer import LATENT, differences
from tests.mcore.test_attention import attention_layer, stock_spec

SIZES = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 6}
GRANULARITIES = ("element", "head", "shared")
OUTPUT = HeadsConfig(Gate(output="element"))
FORMS = [*product(("multiply", "add"), ("sigmoid", "silu", "half_sigmoid"), (True, False))]
PLACES = [*product(("output", "value", "key", "query"), GRANULARITIES), ("dense", "element")]


def in_every_form(places):
    """Yield gates at these places in each form."""
    for form, activation, reads_input in FORMS:
        gate = Gate(
            **dict(places),
            form=form,
            activation=activation,
            reads_input=reads_input,
        )
        yield HeadsConfig(gate)


EVERYWHERE = HeadsConfig(
    Knock(query="linear", value="mlp"),
    Gate(output="element", value="head", key="shared", query="element", dense="element"),
)
"""Megatron's own rows beside ours, and all rules of gradients."""
HEADS_ALONE = HeadsConfig(Gate(output="head", value="element", key="element", form="add"))
SHARED = HeadsConfig(Knock(value="mlp"), Gate(output="shared", value="shared", query="shared"))
UNREAD = HeadsConfig(
    Gate(output="head", value="element", key="shared", dense="element", reads_input=False)
)
ON_RANKS = [OUTPUT, OUTPUT.updated(value="mlp"), EVERYWHERE, HEADS_ALONE, SHARED, UNREAD]


def normed_and_not(khas):
    """Yield gates with True if they support QK-norm, and with False if it makes them pointless."""
    for kha in khas:
        gate = kha.get(Gate)
        reason = gate.unsupported_reason(HeadFacts(qk_norm=True))
        yield kha, not reason


@pytest.mark.fast
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gates_at_every_position_equal_the_oracle(ranks, granularity):
    places = [place for place in PLACES if place[1] == granularity or place[0] == "dense"]
    for kha, normed in normed_and_not(in_every_form(places)):
        assert not differences(ranks, kha, qk_layernorm=normed, **SIZES), kha


@pytest.mark.fast
@pytest.mark.parametrize("qk_norm", [True, False])
def test_knocking_heads_without_gates_equal_the_oracle(ranks, qk_norm):
    for kha in (HeadsConfig(Knock(query="linear", key="gate", value="mlp")), HeadsConfig()):
        assert not differences(ranks, kha, qk_layernorm=qk_norm, **SIZES), kha


@pytest.mark.parametrize(
    ("tp", "sp"),
    [(2, False), (2, True), pytest.param(4, True, marks=pytest.mark.whole)],
)
def test_gates_and_knocking_heads_on_ranks_equal_the_oracle(ranks, tp, sp):
    """Four ranks share two key/value heads."""
    for kha in ON_RANKS:
        assert not differences(ranks, kha, tp, sp, **SIZES), kha


@pytest.mark.parametrize("reads", [True, False], ids=["", "without-input"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_latent_attention_has_a_gate_on_its_output(ranks, granularity, reads):
    gate = Gate(output=granularity, reads_input=reads)
    assert not differences(ranks, HeadsConfig(Knock(value="linear"), gate), **LATENT)


def trained_a_step(dtype):
    """Return losses and gradients of four models with an output gate.

    These are stock Megatron with its flag, and our layers with that flag, with the flag and our
    gate, and with our gate.
    """
    from tests.distributed import models

    models.initialize()
    bf16 = {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "num_query_groups": 2,
    }
    flagged = models.transformer_config(attention_output_gate=True, **bf16)
    plain = models.transformer_config(**bf16)
    results = []
    for config, kha, spec in (
        (flagged, HeadsConfig(), stock_spec(flagged)),
        (flagged, HeadsConfig(), None),
        (flagged, OUTPUT, None),
        (plain, OUTPUT, None),
    ):
        models.initialize()
        model = models.gpt_model(config, kha, layer_spec=spec, perturbed=False)
        tokens, positions, mask = models.batch()
        losses = model(tokens, positions, mask, labels=tokens)
        losses.sum().backward()
        tensors = {"losses": losses.detach()}
        for name, parameter in model.named_parameters():
            tensors[name] = parameter.grad
        results.append(tensors)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_gate_equals_megatrons_bit_for_bit(ranks, dtype):
    stock, *others = ranks(trained_a_step, 1, dtype)[0]
    for other in others:
        assert stock.keys() == other.keys()
        assert all(torch.equal(stock[name], other[name]) for name in stock)


def qkv_weight(kha, size, overrides):
    """Return this rank's rows of ``linear_qkv`` as it was built."""
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=size)
    layer = attention_layer(
        models,
        kha,
        tensor_model_parallel_size=size,
        **overrides,
    )
    return layer.linear_qkv.weight.detach()


@pytest.mark.parametrize(("size", "groups"), [(1, 3), (3, 3), (2, 1)])
def test_only_padding_rows_start_at_zero(ranks, size, groups):
    """Nothing reads them, so they stay there, and an exported model comes back as it was."""
    kha = HeadsConfig(Gate(output="head", value="head"))
    shards = ranks(qkv_weight, size, kha, size, {"num_query_groups": groups})
    rows = torch.cat(shards).unflatten(0, (groups, -1))
    sizes = HeadSizes(query_heads=6, kv_heads=groups, head_dim=10)
    layout = QKVLayout(
        groups=groups,
        queries=6 // groups,
        head_dim=10,
        mechanism_rows=kha.rows(sizes),
    )
    zero = ~rows.any(-1)
    assert layout.padding.stop > layout.padding.start
    assert zero[:, layout.padding].all()
    assert zero.sum() == groups * (layout.padding.stop - layout.padding.start)
