"""AutoBridge with our bridge on gloo ranks, with local and Transformer Engine modules."""

import pytest
import torch

from kha_megatron.hf import KHAModelConfig
from tests.bridge import cases
from tests.bridge.models import CONFIGS, SIZES, described, tokens

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
HYBRID = {"hybrid": True}
PADDED = {"make_vocab_size_divisible_by": 8}


def build(folder, implementation, layout, **overrides):
    """Build a model. ``layout`` may also contain ``hybrid``."""
    layout = dict(layout)
    hybrid = layout.pop("hybrid", False)
    return cases.build(folder, implementation, layout, hybrid=hybrid, **overrides)


def round_trip(folder, target, implementation, layout, overrides):
    auto, model = build(folder, implementation, layout, **overrides)
    cases.write(auto, model, target)


ROUND_TRIPS = [
    *((name, "te", 2, TP2 | {"sequence_parallel": True}) for name in CONFIGS if name != "dense"),
    ("dense", "te", 1, {}),
    ("dense", "local", 1, {}),
    ("dense", "local", 2, TP2),
    ("tied", "te", 2, PP2),
    ("sigmoid", "te", 2, PP2),
    ("gated_heads", "local", 2, PP2),
    ("moh", "te", 2, PP2),
    ("sigmoid", "te", 2, EP2),
    ("sigmoid", "local", 2, EP2),
    ("softmax", "local", 2, TP2 | EP2),
    ("dense", "local", 1, HYBRID),
    ("gated_heads", "local", 2, PP2 | HYBRID),
    ("tied", "te", 2, PP2 | HYBRID),
    ("sigmoid", "te", 2, TP2 | HYBRID | {"sequence_parallel": True}),
    ("softmax", "local", 2, TP2 | EP2 | HYBRID),
    ("moh", "te", 1, HYBRID),
]


@pytest.mark.parametrize(("name", "implementation", "n", "layout"), ROUND_TRIPS, ids=str)
def test_round_trip_is_equal(bridge_ranks, folders, tmp_path, name, implementation, n, layout):
    source = folders[name]
    target = str(tmp_path / "out")
    bridge_ranks(round_trip, n, source, target, implementation, layout, PADDED)
    before = cases.tensors(source)
    after = cases.tensors(target)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    first, second = (described(KHAModelConfig.from_pretrained(f)) for f in (source, target))
    assert first == second


def loaded_logits(folder, implementation, layout):
    _, model = build(
        folder,
        implementation,
        layout,
        parallel_output=False,
        **PADDED,
    )
    return cases.logits(model, tokens()).numpy()


@pytest.mark.parametrize(
    ("name", "implementation", "n", "layout"),
    [
        *((name, implementation, 1, {}) for name in CONFIGS for implementation in ("local", "te")),
        *((name, "local", 2, TP2) for name in ("dense", "gated_heads", "gated_alike", "moh")),
        *((name, "te", 2, TP2) for name in ("gated_heads", "moh")),
        ("sigmoid", "local", 2, EP2),
        ("sigmoid", "te", 2, EP2),
        *((name, "te", 1, HYBRID) for name in ("dense", "sigmoid", "talking")),
        ("gated_heads", "local", 2, TP2 | HYBRID),
        ("moh", "local", 2, TP2 | HYBRID),
        ("softmax", "local", 2, EP2 | HYBRID),
    ],
    ids=str,
)
def test_loaded_model_computes_the_same(bridge_ranks, folders, name, implementation, n, layout):
    """A layout that is wrong in both directions passes a round trip but not this test."""
    expected = cases.hf_logits(folders[name], tokens())
    assert expected.abs().max() > 1
    for found in bridge_ranks(loaded_logits, n, folders[name], implementation, layout):
        # Two implementations in float32.
        torch.testing.assert_close(
            torch.from_numpy(found)[..., : SIZES["vocab_size"]],
            expected,
            rtol=0,
            atol=1e-5,
        )
