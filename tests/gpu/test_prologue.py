"""What core attention gets through the fused prologue, against Megatron's own split, norm and RoPE.

The same layer computes twice, with the same weights: in its dtype through the kernels, and in
float64 as Megatron does without them. The core attention only keeps what it gets and adds it up.
"""

import os
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from tests.kernels.test_gpu import TOLERANCE
from tests.mcore.test_attention import HIDDEN, attention_layer

KHAS = {
    "baseline": KHAConfig(),
    "mlp": KHAConfig(value="mlp"),
    "mixed": KHAConfig(query="linear", key="gate", value="mlp"),
}


class Sum(torch.nn.Module):
    """In the place of core attention: query, key and value, whose gradients are kept too."""

    def forward(self, query, key, value, *args, **kwargs):
        """Of ``[s, b, heads, D]`` all as ``[s, b, heads * D]``."""
        self.seen = {"query": query, "key": key, "value": value}
        for tensor in self.seen.values():
            tensor.retain_grad()
        each = query.shape[2] // key.shape[2]
        return (query + (key + value).repeat_interleave(each, dim=2)).flatten(2)


def errors(kha, dtype, length, batch, rotary=1.0):
    """Relative errors of what core attention gets, of its gradients and of all others, by name."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from kha_megatron.mcore import cpu
    from kha_megatron.mcore.fused_forward import FusedPrologue
    from tests.distributed import models
    from tests.gpu.models import device

    models.initialize()
    layer = attention_layer(models, KHAS[kha], kv_channels=64, params_dtype=dtype)
    models.perturb(layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "layernorm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    layer = layer.to(device(), dtype)
    layer.core_attention = Sum()
    turns = RotaryEmbedding(64, rotary, use_cpu_initialization=cpu.is_installed())(length)
    sizes = length, batch, HIDDEN
    hidden, upstream = (torch.randn(sizes).to(device(), dtype) for _ in range(2))
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device())
    run = FusedPrologue.run_fused
    found = []
    for way, exact in (("triton", dtype), ("torch", torch.float64)):
        layer.to(exact)
        layer.zero_grad(set_to_none=True)
        inputs = hidden.detach().to(exact).requires_grad_()
        angles = turns.to(device(), torch.promote_types(exact, torch.float32))
        with (
            mock.patch.dict(os.environ, {"KHA_KERNELS": way}),
            mock.patch.object(FusedPrologue, "run_fused", autospec=True, side_effect=run) as runs,
        ):
            layer(inputs, mask, rotary_pos_emb=angles)[0].backward(upstream.to(exact))
        assert runs.call_count == (way == "triton")
        seen = layer.core_attention.seen
        found.append(
            {name: x.detach() for name, x in seen.items()}
            | {f"d {name}": x.grad for name, x in seen.items()}
            | {f"d {name}": p.grad for name, p in layer.named_parameters()}
            | {"d input": inputs.grad}
        )
    got, want = found
    return {name: ((got[name].double() - x).norm() / x.norm()).item() for name, x in want.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [1.0, 0.5], ids=["whole", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kha", KHAS)
def test_equals_megatrons_own_over_many_tiles(gpu, gpu_rank, kha, dtype, rotary):
    """Tokens as in ``tests/kernels/test_sizes.py``, with key/value heads that are as many."""
    found = gpu_rank(errors, kha, dtype, 3001, 3, rotary)
    assert all(error < 2 * TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("kha", KHAS)
def test_equals_megatrons_own_in_the_interpreter(interpreting_rank, kha):
    found = interpreting_rank(errors, kha, torch.float32, 23, 3)
    assert {"query", "d key", "d q_layernorm.weight", "d linear_qkv.weight"} <= found.keys()
    assert all(error < 2 * TOLERANCE[torch.float32] for error in found.values()), found
