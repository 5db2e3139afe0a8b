"""Put KHA into a HybridModel from Python. Runs on the CPU: ``python examples/plug_spec.py``.

On a GPU, omit ``cpu.install`` and its import, and ``use_cpu_initialization``. Use
``transformer_impl="transformer_engine"`` and the backend "nccl", and move tokens, positions and
mask to the device with ``.cuda()``.
"""

from kha_megatron import HeadsConfig, Knock
from kha_megatron.mcore import cpu

cpu.install(despite_cuda=True)  # before the first import of Megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import TransformerConfig

from kha_megatron.mcore.specs import kha_hybrid_stack_spec


def build(kha: HeadsConfig) -> HybridModel:
    """Build a model with 8 query heads and 4 key/value heads. The weights are fixed."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=32,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
    )
    spec = kha_hybrid_stack_spec(kha)
    return HybridModel(config, spec, 256, max_sequence_length=64, hybrid_layer_pattern="*-*-")


def main() -> None:
    """Compare the losses of a KHA model and its baseline, and compute gradients."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tokens = torch.randint(256, (2, 16))
    positions = torch.arange(16).expand(2, -1)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]

    baseline, model = build(HeadsConfig()), build(HeadsConfig(Knock(value="mlp")))
    losses = [m(tokens, positions, mask, labels=tokens) for m in (baseline, model)]
    print("same losses, bit for bit:", torch.equal(*losses))

    losses[1].mean().backward()
    attention = model.decoder.layers[0].self_attention
    print(attention.knock_value)
    print("its gradient has norm > 0:", bool(attention.knock_value.weight.grad.norm() > 0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# What you should see:
#   same losses, bit for bit: True
#   KnockingHeads(knock_value, weight=(3, 32, 32))
#   its gradient has norm > 0: True
