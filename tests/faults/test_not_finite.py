"""Test that NaN and Inf stop training before the optimizer step, with their origin."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from tests.distributed.cases import FULL, OVERLAP, ZERO, case
from tests.distributed.parallelism import _Run, initialize


def train(case, fault, bad_step=0):
    """Train with Megatron's schedule. Step ``bad_step`` has a fault on rank 1.

    Return the step, the error, and whether the parameters of this rank are unchanged.
    """
    from kha_megatron.errors import NonFiniteError
    from kha_megatron.mcore.finite import stop_before_non_finite_steps

    initialize(case.layout)
    run = _Run(case, case.khas[0])
    (model,) = run.chunks
    stop_before_non_finite_steps([model])
    culprit = torch.distributed.get_rank() == 1
    try:
        for number in range(bad_step + 1):
            before = [p.detach().clone() for p in model.parameters()]
            handles = fault(model) if culprit and number == bad_step else []
            try:
                run._accumulate(4)
            except NonFiniteError as error:
                unchanged = all(map(_same, before, model.parameters()))
                return number, str(error), unchanged
            finally:
                for handle in handles:
                    handle.remove()
            assert run.optimizer.step()[0]
        return None
    finally:
        vars(run.ddp[0]).clear()


def _same(before, after):
    """Return whether all finite elements are equal."""
    return bool(((before == after) | ~after.isfinite()).all())


def _layer(model, number):
    return next(x for x in model.decoder.layers if x.layer_number == number + 1)


def healthy(model):
    return []


def nan_parameter(model):
    _layer(model, 4).self_attention.knock_value.weight.data[0, 1, 2] = float("nan")
    return []


def inf_activation(model):
    """Spoil one element once, so that a second forward pass would not show it."""

    def spoil(module, inputs, output):
        handle.remove()
        output = output.clone()
        output[3, 1, 0, 2] = float("inf")
        return output

    module = _layer(model, 4).self_attention.knock_value
    handle = module.register_forward_hook(spoil, prepend=True)
    return [handle]


def inf_expert_output(model):
    def spoil(module, inputs, outputs):
        output, *rest = outputs
        output = output.clone()
        output[1, 0, 2] = -float("inf")
        return (output, *rest)

    return [_layer(model, 3).mlp.register_forward_hook(spoil)]


def nan_gradient(model):
    """Spoil the gradient of one parameter. The loss and all activations are finite."""
    weight = _layer(model, 2).self_attention.linear_proj.weight

    def spoil(gradient):
        gradient = gradient.clone()
        gradient[2, 3] = float("nan")
        return gradient

    return [weight.register_hook(spoil)]


def nan_backward(model):
    """Spoil the gradient of an activation, which spreads to all earlier layers."""

    def spoil(module, gradients):
        return (gradients[0] * float("nan"), *gradients[1:])

    return [_layer(model, 4).register_full_backward_pre_hook(spoil)]


KNOCK = "decoder.layers.4.self_attention.knock_value"
FAULTS = {
    nan_parameter: f"NaN in 1 of 108 elements of parameter {KNOCK}.weight on {{}}.",
    inf_activation: f"Inf in the output of {KNOCK} on {{}}.",
    nan_gradient: "NaN in 1 of {size} elements of the gradient of "
    "decoder.layers.2.self_attention.linear_proj.weight{note} on {}.",
    nan_backward: "the gradient of decoder.layers.4.",
    inf_expert_output: "Inf in the output of decoder.layers.3 on {}.",
}

SMALL = {"khas": (HeadsConfig(Knock(value="mlp", key="linear")),), "layers": 4}


@pytest.mark.parametrize(
    ("fault", "fields", "bad_step", "where"),
    [
        *((fault, {"dp": 2, "ddp": ZERO, "bf16": True}, 2, "rank 1") for fault in list(FAULTS)[:3]),
        pytest.param(nan_backward, {"pp": 2, "savings": FULL}, 0, "rank 1", id="full recompute"),
        pytest.param(nan_gradient, {"tp": 2}, 0, "rank 1", id="tensor parallel"),
        pytest.param(
            inf_expert_output,
            {"tp": 2, "sp": True, "ep": 2, "model": "moe"},
            0,
            "rank 1",
            id="experts",
        ),
        # the ranks of the sum
        pytest.param(nan_gradient, {"dp": 2, "ddp": OVERLAP}, 0, "ranks 0, 1", id="overlap"),
    ],
)
def test_every_rank_stops_and_names_the_origin(ranks, fault, fields, bad_step, where):
    answers = ranks(train, 2, case(**SMALL, **fields), fault, bad_step)
    summed = fields.get("ddp") is OVERLAP
    note = ", summed over data-parallel ranks (--overlap-grad-reduce)," if summed else ""
    words = FAULTS[fault].format(
        where,
        size=1920 // fields.get("tp", 1),
        note=note,
    )
    (message,) = {message for _, message, _ in answers}
    assert words in message
    assert "\n" not in message
    assert [(step, unchanged) for step, _, unchanged in answers] == [(bad_step, True)] * 2


def test_a_healthy_run_does_not_stop(ranks):
    overlapped = case(**SMALL, ddp=OVERLAP | ZERO, bf16=True)
    assert ranks(train, 1, overlapped, healthy, 2) == [None]
    assert ranks(train, 2, case(**SMALL, pp=2), healthy, 1) == [None] * 2


class Operators(TorchDispatchMode):
    """Count operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


def recorded_peaks(dtype):
    """Return the peaks that a hook records for outputs with one bad element, and its operators."""
    from kha_megatron.mcore.finite import _recorder

    torch.manual_seed(0)
    module = torch.nn.Identity()
    largest = torch.zeros(3)
    module.register_forward_hook(_recorder(largest[1]))
    hidden = 100 * torch.randn(67, 3, 133).to(dtype)
    peaks = {}
    for bad in (math.nan, math.inf, -math.inf):
        for position in ((0, 0, 0), (31, 1, 77), (66, 2, 132)):
            spoiled = hidden.clone()
            spoiled[position] = bad
            for name, output in {
                "tensor": spoiled,
                "transposed": spoiled.mT,
                "with bias": (spoiled, None),
            }.items():
                largest.zero_()
                module(output)
                module(hidden)  # must not hide it
                peaks[bad, position, name] = largest.tolist()
    largest.zero_()
    module(hidden / 2)
    module(hidden.requires_grad_())
    module(hidden[:0])
    module.eval()(2 * hidden)
    exact = hidden.double().abs().max().item()
    with Operators() as operators:
        module.train()(hidden)
    return peaks, largest.tolist(), exact, operators.counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_operators_find_every_bad_element(ranks, dtype):
    ((peaks, healthy_peaks, exact, operators),) = ranks(recorded_peaks, 1, dtype)
    assert len(peaks) == 27
    for (bad, *_), (before, peak, after) in peaks.items():
        assert (before, after) == (0, 0)
        assert math.isnan(peak) == math.isnan(bad)
        assert not math.isfinite(peak)
    assert healthy_peaks == [0, exact, 0]
    assert operators.total() == 2, operators
