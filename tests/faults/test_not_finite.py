"""Test that NaN and Inf stop training before the optimizer step, with their origin."""

import pytest
import torch

from kha_megatron.config import KHAConfig

LAYERS = 4


def _data_parallel(config, ddp, model):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    wrapped = Float16Module(config, model) if config.bf16 else model
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16, **ddp)
    return DistributedDataParallel(config, settings, wrapped)


def train(fault, culprit, layout, ddp, config, bad_step=0, variant="mlp"):
    """Train with Megatron's schedule. Step ``bad_step`` has a fault on rank ``culprit``.

    Return the step, the error, and whether the parameters of this rank are unchanged.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from kha_megatron.errors import NonFiniteError
    from kha_megatron.mcore.finite import stop_before_non_finite_steps
    from kha_megatron.mcore.specs import kha_layer_spec
    from tests.distributed import models

    models.initialize(**layout)
    transformer = models.transformer_config(num_layers=LAYERS, **layout, **config)
    kha = KHAConfig(value=variant, key="linear")
    stages = layout.get("virtual_pipeline_model_parallel_size")
    first, last = (
        parallel_state.is_pipeline_first_stage,
        parallel_state.is_pipeline_last_stage,
    )
    chunks = []
    for stage in range(stages) if stages else [None]:
        placed = {"vp_stage": stage, "ignore_virtual": False} if stages else {}
        torch.manual_seed(7)
        chunks.append(
            models.gpt_model(
                transformer,
                kha,
                layer_spec=kha_layer_spec(transformer, kha, stage),
                pre_process=first(**placed),
                post_process=last(**placed),
                **({"vp_stage": stage} if stages else {}),
            )
        )
    stop_before_non_finite_steps(chunks)
    wrapped = [_data_parallel(transformer, ddp, chunk) for chunk in chunks]
    if ddp.get("overlap_grad_reduce"):
        transformer.no_sync_func = wrapped[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            bf16=transformer.bf16,
            use_distributed_optimizer=ddp.get("use_distributed_optimizer", False),
        ),
        wrapped,
    )
    transformer.grad_scale_func = optimizer.scale_loss
    step = get_forward_backward_func()
    mine = torch.distributed.get_rank() == culprit
    try:
        for number in range(bad_step + 1):
            for chunk in wrapped:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
            handles = fault(chunks) if mine and number == bad_step else []
            try:
                step(
                    forward_step_func=_forward,
                    data_iterator=[iter([1, 2])] * len(wrapped) if stages else iter([1, 2]),
                    model=wrapped if stages else wrapped[0],
                    num_microbatches=2,
                    seq_length=models.SEQUENCE,
                    micro_batch_size=models.BATCH,
                    forward_only=False,
                )
            except NonFiniteError as error:
                after = [p.detach() for chunk in chunks for p in chunk.parameters()]
                unchanged = all(map(_same, before, after))
                return number, str(error), unchanged
            finally:
                for handle in handles:
                    handle.remove()
            assert optimizer.step()[0]
        return None
    finally:
        for chunk in wrapped:
            vars(chunk).clear()


def _forward(data, model):
    from tests.distributed import models

    tokens, positions, mask = models.batch(next(data))
    output = model(tokens, positions, mask, labels=tokens)
    return output, lambda losses: (losses.mean(), {})


def _same(before, after):
    """Return whether all finite elements are equal."""
    return bool(((before == after) | ~after.isfinite()).all())


def _layer(chunks, index):
    layers = (layer for chunk in chunks for layer in chunk.decoder.layers)
    return next(layer for layer in layers if layer.layer_number == index + 1)


def healthy(chunks):
    return []


def nan_parameter(chunks):
    _layer(chunks, 2).self_attention.knock_value.weight.data[0, 1, 2] = float("nan")
    return []


def inf_parameter(chunks):
    _layer(chunks, 2).self_attention.knock_key.weight.data[0, 0, 5] = float("inf")
    return []


def nan_activation(chunks):
    """Spoil one element once, so that a second forward pass would not show it."""

    def spoil(module, inputs, output):
        handle.remove()
        output = output.clone()
        output[3, 1, 0, 2] = float("nan")
        return output

    module = _layer(chunks, 2).self_attention.knock_value
    handle = module.register_forward_hook(spoil, prepend=True)
    return [handle]


def nan_gradient(chunks):
    """Spoil the gradient of one parameter. The loss and all activations are finite."""
    weight = _layer(chunks, 1).self_attention.linear_proj.weight

    def spoil(gradient):
        gradient = gradient.clone()
        gradient[2, 3] = float("nan")
        return gradient

    return [weight.register_hook(spoil)]


def nan_backward(chunks):
    """Spoil the gradient of an activation, which spreads to all earlier layers."""

    def spoil(module, gradients):
        return (gradients[0] * float("nan"), *gradients[1:])

    return [_layer(chunks, 2).register_full_backward_pre_hook(spoil)]


KNOCK = "decoder.layers.2.self_attention.knock_value"
FAULTS = {
    nan_parameter: f"NaN in 1 of 108 elements of parameter {KNOCK}.weight on {{}}.",
    inf_parameter: "Inf in 1 of 36 elements of parameter "
    "decoder.layers.2.self_attention.knock_key.weight on {}.",
    nan_activation: f"NaN in the output of {KNOCK} on {{}}.",
    nan_gradient: "NaN in 1 of {size} elements of the gradient of "
    "decoder.layers.1.self_attention.linear_proj.weight{note} on {}.",
    nan_backward: "the gradient of decoder.layers.2.",
}

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
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


WHOLE = (inf_parameter, nan_backward)
"""Faults whose paths the other tests and faults cover."""


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.whole if f in WHOLE else ()) for f in FAULTS]
)
def test_a_later_step_with_the_distributed_optimizer_in_bf16(ranks, fault):
    check(ranks, 2, fault, 1, ddp=DISTRIBUTED, config=BF16, bad_step=2)


@pytest.mark.parametrize(
    "fault", [pytest.param(nan_activation, marks=pytest.mark.whole), nan_backward]
)
def test_pipeline_stages_with_full_recompute(ranks, fault):
    check(ranks, 2, fault, 1, {"pipeline_model_parallel_size": 2}, config=FULL)


def test_tensor_parallel_ranks(ranks):
    check(ranks, 2, nan_gradient, 1, {"tensor_model_parallel_size": 2})


def test_overlapped_gradient_reduction_reports_the_ranks_of_the_sum(ranks):
    check(ranks, 2, nan_gradient, 1, ddp={"overlap_grad_reduce": True}, where="ranks 0, 1")


def test_a_healthy_run_does_not_stop(ranks):
    layout = {"pipeline_model_parallel_size": 2}
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    assert ranks(train, 1, healthy, 0, {}, overlap, BF16, 2) == [None]
    assert ranks(train, 2, healthy, 0, layout, {}, {}, 1) == [None] * 2
