"""Test that NaN and Inf stop training before the optimizer step, with their origin."""

import pytest
import torch

from kha_megatron.config import KHAConfig


def train(fault, culprit, layout, ddp, config, bad_step=0):
    """Train with Megatron's schedule. Step ``bad_step`` has a fault on rank ``culprit``.

    Return the step, the error, and whether the parameters of this rank are unchanged.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from kha_megatron.errors import NonFiniteError
    from kha_megatron.mcore.finite import stop_before_non_finite_steps
    from tests.distributed import models

    models.initialize(**layout)
    transformer = models.transformer_config(num_layers=4, **layout, **config)
    torch.manual_seed(7)
    model = models.gpt_model(
        transformer,
        KHAConfig(value="mlp", key="linear"),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    stop_before_non_finite_steps([model])
    wrapped = DistributedDataParallel(
        transformer,
        DistributedDataParallelConfig(grad_reduce_in_fp32=transformer.bf16, **ddp),
        Float16Module(transformer, model) if transformer.bf16 else model,
    )
    if ddp.get("overlap_grad_reduce"):
        transformer.no_sync_func = wrapped.no_sync
    distributed = ddp.get("use_distributed_optimizer", False)
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, bf16=transformer.bf16, use_distributed_optimizer=distributed
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    transformer.grad_scale_func = optimizer.scale_loss
    step = get_forward_backward_func()
    mine = torch.distributed.get_rank() == culprit
    try:
        for number in range(bad_step + 1):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            handles = fault(model) if mine and number == bad_step else []
            try:
                step(
                    forward_step_func=_forward,
                    data_iterator=iter([1, 2]),
                    model=wrapped,
                    num_microbatches=2,
                    seq_length=models.SEQUENCE,
                    micro_batch_size=models.BATCH,
                    forward_only=False,
                )
            except NonFiniteError as error:
                unchanged = all(map(_same, before, model.parameters()))
                return number, str(error), unchanged
            finally:
                for handle in handles:
                    handle.remove()
            assert optimizer.step()[0]
        return None
    finally:
        vars(wrapped).clear()


def _forward(data, model):
    from tests.distributed import models

    tokens, positions, mask = models.batch(next(data))
    output = model(tokens, positions, mask, labels=tokens)
    return output, lambda losses: (losses.mean(), {})


def _same(before, after):
    """Return whether all finite elements are equal."""
    return bool(((before == after) | ~after.isfinite()).all())


def _layer(model, index):
    return next(x for x in model.decoder.layers if x.layer_number == index + 1)


def healthy(model):
    return []


def nan_parameter(model):
    _layer(model, 2).self_attention.knock_value.weight.data[0, 1, 2] = float("nan")
    return []


def inf_activation(model):
    """Spoil one element once, so that a second forward pass would not show it."""

    def spoil(module, inputs, output):
        handle.remove()
        output = output.clone()
        output[3, 1, 0, 2] = float("inf")
        return output

    module = _layer(model, 2).self_attention.knock_value
    handle = module.register_forward_hook(spoil, prepend=True)
    return [handle]


def nan_gradient(model):
    """Spoil the gradient of one parameter. The loss and all activations are finite."""
    weight = _layer(model, 1).self_attention.linear_proj.weight

    def spoil(gradient):
        gradient = gradient.clone()
        gradient[2, 3] = float("nan")
        return gradient

    return [weight.register_hook(spoil)]


def nan_backward(model):
    """Spoil the gradient of an activation, which spreads to all earlier layers."""

    def spoil(module, gradients):
        return (gradients[0] * float("nan"), *gradients[1:])

    return [_layer(model, 2).register_full_backward_pre_hook(spoil)]


KNOCK = "decoder.layers.2.self_attention.knock_value"
FAULTS = {
    nan_parameter: f"NaN in 1 of 108 elements of parameter {KNOCK}.weight on {{}}.",
    inf_activation: f"Inf in the output of {KNOCK} on {{}}.",
    nan_gradient: "NaN in 1 of {size} elements of the gradient of "
    "decoder.layers.1.self_attention.linear_proj.weight{note} on {}.",
    nan_backward: "the gradient of decoder.layers.2.",
}

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}


def check(ranks, n, fault, culprit, layout=None, ddp=None, config=None, where=None, **kwargs):
    answers = ranks(train, n, fault, culprit, layout or {}, ddp or {}, config or {}, **kwargs)
    tp = (layout or {}).get("tensor_model_parallel_size", 1)
    overlap = (ddp or {}).get("overlap_grad_reduce")
    note = ", summed over data-parallel ranks (--overlap-grad-reduce)," if overlap else ""
    words = FAULTS[fault].format(where or f"rank {culprit}", size=1920 // tp, note=note)
    for number, message, unchanged in answers:
        assert number == kwargs.get("bad_step", 0)
        assert words in message
        assert "\n" not in message
        assert unchanged
    assert len({message for _, message, _ in answers}) == 1


@pytest.mark.parametrize("fault", [nan_parameter, inf_activation, nan_gradient])
def test_a_later_step_with_the_distributed_optimizer_in_bf16(ranks, fault):
    check(ranks, 2, fault, 1, ddp=DISTRIBUTED, config=BF16, bad_step=2)


def test_pipeline_stages_with_full_recompute(ranks):
    check(ranks, 2, nan_backward, 1, {"pipeline_model_parallel_size": 2}, config=FULL)


def test_tensor_parallel_ranks(ranks):
    check(ranks, 2, nan_gradient, 1, {"tensor_model_parallel_size": 2})


def test_overlapped_gradient_reduction_reports_the_ranks_of_the_sum(ranks):
    check(ranks, 2, nan_gradient, 1, ddp={"overlap_grad_reduce": True}, where="ranks 0, 1")


def test_a_healthy_run_does_not_stop(ranks):
    layout = {"pipeline_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    assert ranks(train, 1, healthy, 0, {}, overlap, BF16, 2) == [None]
    assert ranks(train, 2, healthy, 0, layout, {}, {}, 1) == [None] * 2
