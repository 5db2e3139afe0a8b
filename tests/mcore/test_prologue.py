"""The fused prologue's place in Megatron's attention: who calls it, with what, and who does not.

Here its torch definition stands in for the kernels, whose numbers are those of ``tests/kernels``:
what must hold is that the layer around it computes what it computes without it, under every
parallelism. Tolerance: as in ``tests/distributed/test_parallelism.py``.
"""

import contextlib
import io
import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.heads.moh import MixtureOfHeads
from tests.distributed.parallelism import train
from tests.distributed.pieces import errors, quantities
from tests.distributed.test_parallelism import FULL, MIXED, OVERLAP_ALL, SELECTIVE, case
from tests.mcore.test_attention import EVERY_PLACE, against_oracle, attention_layer
from tests.versions import needs_added_losses

MLP = KHAConfig(value="mlp")
FOLDED = KHAConfig(query="linear", key="linear", value="linear", fold="always")
FP32 = 1e-5
ROUTED = KHAConfig(value="mlp", moh=MixtureOfHeads(shared=3, active=2, balance=5.0))
AFTER = KHAConfig(value="mlp", gate=Gate(output="shared", dense="element"))
"""Gates behind the core attention, whose scores have no rows in ``linear_qkv``."""
TOKENS, BATCH, HIDDEN = 7, 2, 28


@contextmanager
def fused(*, optional=False):
    """Take the definition for a kernel, and list its calls, of which there must be one."""
    from kha_megatron.mcore import fused_forward as room
    from kha_megatron.ops.prologue import prologue

    calls, compared = [], []

    def counted(*inputs):
        calls.append(inputs)
        assert case_of(*inputs) in compared, "the kernels were compared for other calls"
        return prologue(*inputs)

    rules = room.prologue_kernel, room.trusts_prologue
    room.prologue_kernel = lambda x, head_dim: (counted, "")
    room.trusts_prologue = lambda case: compared.append(case) is None
    try:
        yield calls
        assert calls or optional, "no layer came through the fused prologue"
    finally:
        room.prologue_kernel, room.trusts_prologue = rules


def case_of(qkv, weights, query_norm, key_norm, angles, settings):
    """How the kernels are called."""
    from kha_megatron.ops.verification import PrologueCase

    assert qkv[0].numel() == 0 or qkv[0, 0].is_contiguous()
    return PrologueCase(
        settings=settings,
        dtype=qkv.dtype,
        batch=qkv.shape[1],
        groups=qkv.shape[2],
        features=qkv.shape[3],
        width=qkv.stride(0) // qkv.shape[1],
        norms=tuple(None if norm is None else norm.dtype for norm in (query_norm, key_norm)),
        turning=0 if angles is None else angles.shape[-1],
        own_angles=angles is not None and angles.shape[1] > 1,
        device=qkv.device,
    )


def against_oracle_fused(*args):
    """As ``against_oracle``, through the prologue."""
    with fused():
        return against_oracle(*args)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kha", [*EVERY_PLACE, MIXED, KHAConfig()], ids=str)
def test_equals_the_oracle(ranks, kha, qk_norm):
    found = ranks(against_oracle_fused, 1, kha, qk_norm, 3)[0]
    assert len(found) == 4 + 2 * qk_norm + len(kha.variants)
    wrong = {n: e for n, e in found.items() if not e < 1e-6}
    assert not wrong


PARALLEL = [
    case(tp=2),
    case(tp=2, sp=True, groups=1),  # two ranks share the one key/value head
    case(tp=4, groups=2),
    case(tp=2, sp=True, dp=2, ddp=OVERLAP_ALL),  # waits for parameters on their way
    case(pp=2, vpp=2, layers=4),
    case(cp=2),
    case(tp=2, sp=True, groups=2, savings=FULL),
    case(tp=2, sp=True, groups=2, savings=SELECTIVE),
    case(tp=2, khas=(FOLDED,)),
    case(tp=2, sp=True, khas=(ROUTED,)),
]


@pytest.fixture(scope="module")
def unfused(ranks):
    """Quantities of the unsharded run without the prologue, computed once for each model."""
    known = {}

    def run(case):
        twin = case.twin()
        if repr(twin) not in known:
            known[repr(twin)] = quantities(ranks(train, 1, twin)[0])
        return known[repr(twin)]

    return run


@pytest.mark.parametrize("case", PARALLEL, ids=str)
def test_trains_as_the_unsharded_layer_without_it(ranks, unfused, case):
    if case.khas == (ROUTED,):
        needs_added_losses()
    results = ranks(train, case.layout.world, case, fused, timeout=600)
    found = errors(quantities([result for (result,) in results]), unfused(case))
    wrong = {name: e for name, e in found.items() if not e <= FP32}
    assert not wrong


@contextmanager
def one_rank_distrusts():
    """The second rank finds that its kernels are wrong."""
    from kha_megatron.mcore import fused_forward as room

    with fused(optional=True) as calls:
        room.trusts_prologue = lambda case: torch.distributed.get_rank() == 0
        yield
        assert not calls, "another rank all-reduces in another order"


@contextmanager
def one_rank_has_a_hook():
    """The second rank listens to all norms, as of somebody who looks for a mistake."""
    from kha_megatron.mcore import fused_forward as room

    def passed_by(attention, folds):
        return iter(["a hook"] if torch.distributed.get_rank() else [])

    with (
        mock.patch.object(room.FusedPrologue, "_passed_by", passed_by),
        fused(optional=True) as calls,
    ):
        yield
        assert not calls, "another rank all-reduces in another order"


@pytest.mark.parametrize("other", [one_rank_distrusts, one_rank_has_a_hook])
def test_a_rank_that_cannot_take_its_kernels_takes_the_others_along(ranks, unfused, other):
    results = ranks(train, 2, case(tp=2, sp=True), other)
    found = errors(quantities([result for (result,) in results]), unfused(case(tp=2, sp=True)))
    assert not {name: e for name, e in found.items() if not e <= FP32}


@contextmanager
def without_the_sum():
    """The prologue, with its own rule for shared matrices taken out."""
    from kha_megatron.mcore import fused_forward as room

    rule = room.copy_to_tensor_model_parallel_region
    room.copy_to_tensor_model_parallel_region = lambda weight, group=None: weight
    try:
        with fused():
            yield
    finally:
        room.copy_to_tensor_model_parallel_region = rule


def test_without_the_tensor_parallel_rule_replicas_drift(ranks):
    results = ranks(train, 2, case(tp=2), without_the_sum)
    with pytest.raises(AssertionError, match=r"replicas of .*\.knock_\w+\.weight differ"):
        quantities([result for (result,) in results])


def run_layer(kha=MLP, mutate=None, rotary=None, overrides=None):
    """Output and gradients of one layer, not fused and fused, and how often the prologue ran."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from tests.distributed import models

    models.initialize()
    layer = attention_layer(models, kha, qk_layernorm=True, **overrides or {})
    models.perturb(layer)
    rotary = RotaryEmbedding(10, rotary or 1.0, use_cpu_initialization=True)(TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    hidden = torch.randn(TOKENS, BATCH, HIDDEN)
    upstream = torch.randn(TOKENS, BATCH, HIDDEN)
    if mutate is not None:
        mutate(layer)

    def once():
        inputs = hidden.clone().requires_grad_()
        layer.zero_grad()
        output, _ = layer(inputs, mask, rotary_pos_emb=rotary)
        output.backward(upstream)
        gradients = {n: p.grad.clone() for n, p in layer.named_parameters()}
        return {"output": output.detach(), "input gradient": inputs.grad} | gradients

    plain = once()
    with fused(optional=True) as calls:
        through = once()
    heard = getattr(layer, "heard", [])
    assert heard[: len(heard) // 2] == heard[len(heard) // 2 :]
    return plain, through, len(calls)


def close(plain, through, tolerance):
    return {
        name: error
        for name, x in plain.items()
        if not (error := ((through[name] - x).norm() / x.norm()).item()) <= tolerance
    }


@pytest.mark.parametrize("rotary", [1.0, 0.4], ids=["whole", "partial"])
@pytest.mark.parametrize("kha", [MLP, MIXED, FOLDED, KHAConfig(), AFTER], ids=str)
def test_equals_the_layer_without_it(ranks, kha, rotary):
    plain, through, calls = ranks(run_layer, 1, kha, rotary=rotary)[0]
    assert calls == 1
    assert not close(plain, through, 1e-6)


def test_leaves_layers_without_rope_unturned(ranks):
    overrides = {"no_rope_freq": [1, 0]}
    plain, through, calls = ranks(run_layer, 1, overrides=overrides)[0]
    assert calls == 1
    assert not close(plain, through, 1e-6)
    turned, _, _ = ranks(run_layer, 1)[0]
    assert close(turned, plain, 1e-6)


def gate_values(layer):
    """Hooks that see what is knocked and change what comes out."""
    seen = []
    layer.knock_value.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def double(module, inputs, output):
        assert inputs[0] is seen[-1]
        expected = type(module).forward(module, inputs[0])
        torch.testing.assert_close(output, expected)
        return 2 * output

    layer.knock_value.register_forward_hook(double)


def test_hooks_of_a_knocked_value_get_its_input_and_output(ranks):
    plain, through, calls = ranks(run_layer, 1, mutate=gate_values)[0]
    assert calls == 1
    assert not close(plain, through, 1e-6)


def watch_everything(layer):
    """A hook on each knocked projection, as ``mcore/finite.py`` has them."""
    layer.heard = []
    for projection in ("query", "key", "value"):

        def heard(module, inputs, output, projection=projection):
            if inputs:  # it is not asked for its matrices
                layer.heard.append(projection)
                assert inputs[0].shape[-1] == 10
                assert torch.equal(output, inputs[0])

        getattr(layer, f"knock_{projection}").register_forward_hook(heard)


def test_hooks_hear_what_the_projection_has_knocked(ranks):
    plain, through, calls = ranks(run_layer, 1, FOLDED, mutate=watch_everything)[0]
    assert calls == 1
    assert not close(plain, through, 1e-6)


def watch_for_finite_steps(layer):
    from kha_megatron.mcore import finite

    for projection in ("query", "key", "value"):
        largest = torch.zeros(1)
        getattr(layer, f"knock_{projection}").register_forward_hook(finite._recorder(largest, 0))


def test_the_watch_for_finite_steps_leaves_it_in_place(ranks):
    """Our entry point has it always; what queries and keys become is in the output that it sees."""
    plain, through, calls = ranks(run_layer, 1, MIXED, mutate=watch_for_finite_steps)[0]
    assert calls == 1
    assert not close(plain, through, 1e-6)


def hook_a_norm(layer):
    layer.k_layernorm.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_a_knocked_query(layer):
    layer.knock_query.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def differ_in_eps(layer):
    layer.k_layernorm.eps = 0.25


def add_a_bias(layer):
    layer.q_layernorm = torch.nn.LayerNorm(10)


@pytest.mark.parametrize(
    ("why", "settings"),
    [
        ("hook of a RMSNorm", {"mutate": hook_a_norm}),
        ("hook of a KnockingHeads", {"mutate": hook_a_knocked_query, "kha": MIXED}),
        ("differ in eps", {"mutate": differ_in_eps}),
        ("LayerNorm", {"mutate": add_a_bias}),
        ("rotary_interleaved", {"overrides": {"rotary_interleaved": True}}),
        ("attention_output_gate", {"overrides": {"attention_output_gate": True}}),
        ("gate(output=head) has more", {"kha": KHAConfig(gate=Gate(output="head"))}),
        ("gate(value=shared) has more", {"kha": KHAConfig(gate=Gate(value="shared"))}),
    ],
)
def test_falls_back_where_it_would_be_wrong(ranks, why, settings):
    plain, through, calls, said = ranks(run_and_listen, 1, settings)[0]
    assert calls == 0
    assert not close(plain, through, 0.0)
    assert said.count("fused prologue not used: ") == 1
    assert why in said


def run_and_listen(settings):
    """``run_layer`` and what it printed."""
    from kha_megatron import announcements

    announcements.forget()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        result = run_layer(**settings)
    return *result, said.getvalue()


def refusals():
    """Why a forward is not fused, for calls that this machine cannot run."""
    from tests.distributed import models

    models.initialize()
    layer = attention_layer(models, MLP, qk_layernorm=True)
    hidden = torch.zeros(TOKENS, BATCH, HIDDEN)
    angles = torch.zeros(TOKENS, 1, 1, 10)

    def first(kv=None, context=None, rotary=angles, *args, **kwargs):
        return next(layer._call_refusals(hidden, kv, context, rotary, *args, **kwargs), None)

    return {
        "none": first(),
        "none without angles": first(rotary=None),
        "angles of each sequence": first(rotary=angles.expand(-1, BATCH, -1, -1)),
        "cross": first(kv=hidden),
        "inference": first(context=object()),
        "old inference": first(inference_params=object()),
        "packed": first(packed_seq_params=object()),
        "two angles": first(rotary=(angles, angles.clone())),
        "other tokens": first(rotary=angles[1:]),
        "other dtype": next(layer._call_refusals(hidden.bfloat16(), None, None, None), None),
        "too many features": first(rotary=torch.zeros(TOKENS, 1, 1, 12)),
    }


def test_says_why_a_call_is_not_fused(ranks):
    found = ranks(refusals, 1)[0]
    fused_calls = [name for name, why in found.items() if why is None]
    assert fused_calls == ["none", "none without angles", "angles of each sequence"]
    assert len({why for why in found.values() if why}) == 7  # both ways to infer say the same


def model_with_kernels(kha):
    """Losses and gradients of a model without kernels and with them, and what was said."""
    from kha_megatron import announcements
    from tests.distributed import models

    announcements.forget()
    results = []
    for choice in ("torch", "triton"):
        models.initialize()
        config = models.transformer_config(
            kv_channels=64, num_attention_heads=6, num_query_groups=3, num_layers=1
        )
        model = models.gpt_model(config, kha)
        tokens, positions, mask = models.batch()
        with (
            mock.patch.dict(os.environ, {"KHA_KERNELS": choice}),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            losses = model(tokens, positions, mask, labels=tokens)
            losses.sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append({"losses": losses.detach()} | gradients)
    return *results, said.getvalue()


@pytest.mark.parametrize("kha", [MLP, MIXED], ids=str)
def test_a_model_through_the_kernels_equals_one_without(interpreting_rank, kha):
    plain, through, said = interpreting_rank(model_with_kernels, kha)
    assert "fused prologue used" in said
    assert not close(plain, through, 1e-5)
