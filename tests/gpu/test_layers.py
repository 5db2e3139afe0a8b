"""Layers with KHA from Transformer Engine, and with our kernels, compared with local layers.

The reference is Megatron's local layers in float32 with the same weights and without our kernels
(``models.errors``). The tested layers may be twice as far from the reference as local layers of
the same dtype. The last tests check on the CPU that the comparison can fail.
"""

import functools
import importlib.util
import itertools
import os
from unittest import mock

import pytest
import torch

from kha_megatron.heads import CollaborativeHeads, Gate, Knock, MixtureOfHeads, TalkingHeads
from kha_megatron.heads.config import HeadsConfig

KHAS = {
    "linear": HeadsConfig(Knock(query="linear", key="linear", value="linear")),
    "mlp": HeadsConfig(Knock(value="mlp")),
    "gate": HeadsConfig(Knock(value="gate")),
    "mixed": HeadsConfig(Knock(query="linear", key="gate", value="mlp")),
    "output gate": HeadsConfig(Knock(value="mlp"), Gate(output="element", dense="element")),
    "gates": HeadsConfig(Knock(value="mlp"), Gate(query="element", key="shared", value="head")),
    # all heads for every token, as of experts
    "moh": HeadsConfig(Knock(value="mlp"), MixtureOfHeads(shared=1, active=3, balance=0.0)),
    "talking": HeadsConfig(Knock(value="mlp"), TalkingHeads()),
    "collaborative": HeadsConfig(Knock(value="mlp"), CollaborativeHeads(dim=64)),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 2**-8, "fp16": 2**-11}
"""One rounding of norms. Errors below it are not compared."""


def errors(kha, impl, dtype, moe, spoil=None):
    """Return ``models.errors`` of logits and of all gradients."""
    from tests.gpu import models

    return models.errors(
        KHAS[kha],
        impl,
        dtype,
        models.outcome,
        moe=moe,
        spoil=spoil,
    )


def accumulated_errors(kha, impl, moe, fused, spoil=None):
    """Return ``models.errors`` of accumulated gradients of models without an output layer."""
    from tests.gpu import models

    return models.errors(
        KHAS[kha],
        impl,
        torch.bfloat16,
        models.accumulated,
        moe=moe,
        head=False,
        gradient_accumulation_fusion=fused,
        spoil=spoil,
    )


CASES = [
    pytest.param(kha, dtype, moe, id=f"{kha}-{dtype}-{'moe' if moe else 'dense'}")
    for kha, dtype, moe in itertools.product(KHAS, DTYPES, [False, True])
]


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize(("kha", "dtype", "moe"), CASES)
def test_transformer_engine_equals_local_layers(gpu_rank, gpu_engine, kha, dtype, moe):
    found = gpu_rank(errors, kha, "transformer_engine", DTYPES[dtype], moe)
    assert not found.beyond(FLOOR[dtype])


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("kha", KHAS)
def test_gradients_accumulate_beside_fused_weight_gradients(gpu_rank, gpu_engine, kha, moe, fused):
    """Transformer Engine then writes ``main_grad`` itself; our matrices use Megatron's hooks."""
    found = gpu_rank(accumulated_errors, kha, "transformer_engine", moe, fused)
    assert not found.beyond(FLOOR["bf16"])


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "apex"])
def test_gradients_accumulate_beside_those_of_apex(gpu_rank, fused):
    """In local layers and in the output layer, apex adds weight gradients to ``main_grad``."""
    if fused and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        pytest.skip("NOT TESTED: NVIDIA's apex is not installed")
    assert not gpu_rank(accumulated_errors, "mixed", "local", False, fused).beyond(FLOOR["bf16"])


BACKENDS = {
    "flash": "FlashAttention",
    "fused": "FusedAttention",
    "unfused": "UnfusedDotProductAttention",
}
"""By value of ``--attention-backend``: Transformer Engine's module that must run."""


def errors_and_backends(backend):
    """Return the errors of layers with an attention backend, and the modules that ran."""
    from megatron.core.transformer.enums import AttnBackend
    from transformer_engine.pytorch.attention import dot_product_attention

    from tests.gpu import models

    def watch(model):
        for module in model.modules():
            if type(module).__name__ in BACKENDS.values():
                module.register_forward_hook(lambda module, *_: ran.add(type(module).__name__))

    ran = set()
    sizes = {"attention_backend": AttnBackend[backend]}
    # it remembers its choice for these sizes, whatever the environment
    chosen = dot_product_attention.dot_product_attention._attention_backends
    with mock.patch.dict(os.environ), mock.patch.dict(chosen, attention_params=None):
        for name in ("FLASH", "FUSED", "UNFUSED"):
            os.environ.pop(f"NVTE_{name}_ATTN", None)  # Megatron sets them
        found = models.errors(
            KHAS["mixed"],
            "transformer_engine",
            torch.bfloat16,
            models.outcome,
            spoil=watch,
            sizes=sizes,
        )
    return found, ran


def check_backend(rank, backend, record_property):
    found, ran = rank(errors_and_backends, backend)
    record_property("detail", f"--attention-backend {backend}: {', '.join(sorted(ran))} ran")
    assert ran == {BACKENDS[backend]}
    assert not found.beyond(FLOOR["bf16"])


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_backends_agree(gpu_rank, gpu_engine, backend, record_property):
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("NOT TESTED: flash-attn is not installed")
    check_backend(gpu_rank, backend, record_property)


@pytest.mark.te
def test_the_unfused_backend_runs_on_the_cpu(ranks_with_engine, record_property):
    def on_one_rank(case, name):
        (result,) = ranks_with_engine(case, 1, name)
        return result

    check_backend(on_one_rank, "unfused", record_property)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kha",
    [pytest.param(kha, marks=[pytest.mark.first] * (kha == "mlp")) for kha in KHAS],
)
def test_local_layers_with_kernels_equal_those_without(gpu_rank, kha):
    found = gpu_rank(errors, kha, "local", torch.bfloat16, False)
    assert not found.beyond(FLOOR["bf16"])


def spoil_a_matrix(model):
    """Change a weight, which a comparison must notice."""
    model.decoder.layers[1].self_attention.knock_value.weight.data.mul_(1.1)


def test_the_comparison_notices_a_changed_weight(ranks):
    (found,) = ranks(errors, 1, "mixed", "local", torch.bfloat16, True)
    assert found.ours == found.plain
    assert 1e-4 < found.ours["logits"] < 2**-5
    (spoiled,) = ranks(errors, 1, "mixed", "local", torch.bfloat16, True, spoil_a_matrix)
    assert "logits" in spoiled.beyond(FLOOR["bf16"])


def lose_a_microbatch(model):
    """Scale all gradients as if one of three microbatches were missing."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2 / 3)


@pytest.mark.whole
def test_the_comparison_notices_a_lost_microbatch(ranks):
    run = functools.partial(ranks, accumulated_errors, 1, "mixed", "local", False, False)
    (found,) = run()
    assert found.ours == found.plain
    (short,) = run(lose_a_microbatch)
    assert short.beyond(FLOOR["bf16"]).keys() == short.plain.keys()


MATRICES = {f"d decoder.layers.{i}.self_attention.knock_value.weight" for i in (0, 1)}
MISTAKES = {
    "knock_forward": {"logits"},
    "knock_backward_input": {"d decoder.layers.0.self_attention.linear_qkv.weight"},
    "knock_backward_weight": MATRICES,
}
"""By the kernel whose result is halved, what the comparison must notice."""


def errors_with_kernels(mistake):
    """Return the errors of small layers in Triton's interpreter."""
    from kha_megatron.heads.kernels import knock_launch
    from tests.gpu import models

    name = mistake or "knock_forward"
    factor = 0.5 if mistake else 1
    right = getattr(knock_launch, name)
    with (
        mock.patch.multiple(models, SEQUENCE=16, BATCH=1),
        mock.patch.object(knock_launch, name, lambda *args: factor * right(*args)),
    ):
        return errors("mlp", "local", torch.bfloat16, False)


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_comparison_notices_wrong_kernels(interpreting_rank, mistake):
    found = interpreting_rank(errors_with_kernels, mistake)
    assert found.ours != found.plain  # the kernels ran
    noticed = found.beyond(FLOOR["bf16"])
    assert noticed.keys() >= MISTAKES[mistake] if mistake else not noticed
