"""Folding in Transformer Engine's own linear layers, with torch in place of its CUDA kernels.

What runs is all of its Python: where a layer looks for its weight, what its autograd functions
save and return, and when it makes its FP8 copy anew. What needs a GPU, FP8 and its caches among it,
was never run.
"""

import importlib.util
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from tests.distributed.launcher import RankPool

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="NOT TESTED: Transformer Engine is not installed (pip install 'kha-megatron[te]' "
        "with a CUDA toolkit); folding was not tried in its linear layers",
    ),
]

LINEAR = KHAConfig(query="linear", key="linear", value="linear")
HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 6, 3, 10, 28, 7, 2


@pytest.fixture(scope="module")
def ranks_with_te():
    pool = RankPool(hide_cuda_only=False)
    yield pool
    pool.close()


def gemm(a, b, out_dtype=None, *, layout="TN", out=None, bias=None, grad=False, **options):
    """``general_gemm``: ``b a^T``, ``b a`` or ``b^T a``, and the gradient of a bias."""
    rows = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if layout == "NT":
        result, of_bias = rows[1].mT @ rows[0], rows[1].sum(0) if bias is not None else None
        if out is not None:
            result = out.add_(result) if options["accumulate"] else out.copy_(result)
        return result, of_bias, None, None
    result = b @ (a.mT if layout == "TN" else a)
    if bias is not None and not grad:
        result = result + bias
    return result, None, None, None


def norm(x, out, weight, bias, eps, *rest):
    """``apply_normalization``: RMSNorm, and the reciprocal that its backward takes."""
    reciprocal = (x.square().mean(-1) + eps).rsqrt()
    return x * reciprocal[:, None] * weight, None, reciprocal


def norm_backward(gradient, x, reciprocal, weight, *rest):
    """``rmsnorm_bwd``, from autograd."""
    with torch.enable_grad():
        inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        eps = (1 / reciprocal.square() - x.square().mean(-1))[:, None]
        output = inputs[0] * (inputs[0].square().mean(-1, keepdim=True) + eps).rsqrt() * inputs[1]
        return torch.autograd.grad(output, inputs, gradient)


@contextmanager
def torch_kernels():
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import layernorm_linear, linear

    with ExitStack() as stack:
        for module in (linear, layernorm_linear):
            stack.enter_context(mock.patch.object(module, "general_gemm", gemm))
        stack.enter_context(mock.patch.object(layernorm_linear, "apply_normalization", norm))
        stack.enter_context(mock.patch.object(tex, "rmsnorm_bwd", norm_backward, create=True))
        always = property(lambda tensor: True)
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", always, create=True))
        yield


def layer(fold, plain, overrides):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    from kha_megatron.mcore.specs import kha_layer_spec
    from tests.distributed import models

    config = models.transformer_config(
        transformer_impl="transformer_engine",
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        hidden_size=HIDDEN,
        qk_layernorm=False,
        **overrides,
    )
    spec = kha_layer_spec(config, replace(LINEAR, fold=fold))
    spec = spec.layer_specs[0].submodules.self_attention
    if plain:
        spec.submodules.linear_qkv = TEColumnParallelLinear
    torch.manual_seed(3)
    built = build_module(spec, config=config, layer_number=1)
    models.perturb(built)
    return built


def two_ways(plain, overrides):
    """Errors of folded against direct: what the projection returns, and all gradients."""
    from tests.distributed import models

    models.initialize()
    seen = []
    for fold in ("never", "always"):
        built = layer(fold, plain, overrides)
        found = {}
        with torch_kernels():
            for microbatch in range(3):
                generator = torch.Generator().manual_seed(microbatch)
                hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).requires_grad_()
                outputs = built.get_query_key_value_tensors(hidden)
                upstream = [torch.randn(x.shape, generator=generator) for x in outputs]
                torch.autograd.backward(outputs, upstream)
                found |= {f"output {microbatch}.{i}": x.detach() for i, x in enumerate(outputs)}
                found[f"input gradient {microbatch}"] = hidden.grad
        found |= {n: p.grad for n, p in built.named_parameters() if p.grad is not None}
        seen.append(found)
    direct, folded = seen
    assert direct.keys() == folded.keys()
    name = type(built.linear_qkv).__name__
    return name, {n: ((folded[n] - x).norm() / x.norm()).item() for n, x in direct.items()}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("plain", [False, True], ids=["with-norm", "plain"])
def test_folded_equals_direct(ranks_with_te, plain, bias):
    name, found = ranks_with_te(two_ways, 1, plain, {"add_qkv_bias": bias})[0]
    assert name == ("TEColumnParallelLinear" if plain else "TELayerNormColumnParallelLinear")
    assert len(found) == 3 * 4 + 1 + 3 + bias + (not plain)
    assert max(found.values()) < 1e-5, found


def fused_gradients():
    """Whether the layers accumulate into ``main_grad``: the projection, and the one after it."""
    from tests.distributed import models

    models.initialize()
    answers = {}
    for fold in ("auto", "never"):
        built = layer(fold, False, {"gradient_accumulation_fusion": True})
        linears = built.linear_qkv, built.linear_proj
        answers[fold] = [linear.fuse_wgrad_accumulation for linear in linears]
    return answers


def test_fused_gradient_accumulation_is_off_where_the_weight_is_folded(ranks_with_te):
    answers = ranks_with_te(fused_gradients, 1)[0]
    assert answers == {"auto": [False, True], "never": [True, True]}


def copies_made_anew():
    """Whether the FP8 copy of the weight is made anew, for microbatches of these sizes."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from tests.distributed import models

    models.initialize()
    built = layer("auto", False, {})
    asked = []
    forward = type(built.linear_qkv).__mro__[1].forward

    def recording(self, inputs, is_first_microbatch=None):
        asked.append((self.weight.grad_fn is not None, is_first_microbatch))
        return forward(self, inputs, is_first_microbatch=is_first_microbatch)

    assert issubclass(type(built.linear_qkv), TransformerEngineBaseModule)
    with (
        torch_kernels(),
        mock.patch.object(type(built.linear_qkv).__mro__[1], "forward", recording),
    ):
        for tokens in (40, 40, 3, 3, 40):
            built.get_query_key_value_tensors(torch.randn(tokens, BATCH, HIDDEN))
    return asked


def test_a_weight_cached_in_fp8_is_not_taken_for_the_other_one(ranks_with_te):
    assert ranks_with_te(copies_made_anew, 1)[0] == [
        (True, True),
        (True, False),
        (False, True),
        (False, False),
        (True, True),
    ]
