"""Gates in Transformer Engine's own linear layers, which run on the CPU (``cpu.engine``).

Its first projection norms its input inside, where gates that read the input must find it. The truth
is the local layer behind a norm.
"""

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate

pytestmark = pytest.mark.te

KHA = KHAConfig(value="mlp", gate=Gate(query="shared", key="head", value="shared", form="add"))


def both_backends():
    """Outputs and gradients by name of the layer before its core attention, of both."""
    from tests.distributed import models
    from tests.mcore.test_attention import attention_layer

    models.initialize()
    options = {"num_query_groups": 3, "qk_layernorm": False}
    ours = attention_layer(models, KHA, transformer_impl="transformer_engine", **options)
    local = attention_layer(models, KHA, **options)
    models.perturb(ours)
    scale = torch.nn.Parameter(torch.rand(ours.linear_qkv.layer_norm_weight.shape) + 0.5)
    with torch.no_grad():
        ours.linear_qkv.layer_norm_weight.copy_(scale)
        theirs = dict(ours.named_parameters())
        for name, parameter in local.named_parameters():
            parameter.copy_(theirs[name])
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 2, scale.numel(), generator=generator)
    found = []
    for layer in (ours, local):
        x = hidden.clone().requires_grad_()
        normed = x
        if layer is local:
            normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
        outputs = layer.get_query_key_value_tensors(normed)
        sum((y * (i + 1)).square().sum() for i, y in enumerate(outputs)).backward()
        gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        gradients.setdefault("linear_qkv.layer_norm_weight", scale.grad)
        found.append(dict(enumerate(y.detach() for y in outputs)) | gradients | {"input": x.grad})
    return found


def test_gates_read_the_normalised_input_of_the_projection(ranks_with_engine):
    ours, local = ranks_with_engine(both_backends, 1)[0]
    assert ours.keys() == local.keys()
    assert {"gate_query.weight", "gate_value.weight"} < ours.keys()
    for name, expected in local.items():
        # float32 on both sides, in another order of sums
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=str(name))
