"""Convert a Hugging Face KHA directory to Megatron and back with Megatron-Bridge's AutoBridge.

Run it on the CPU in the environment of ``make test-bridge``, with the test double of Transformer
Engine in ``tests/``: ``PYTHONPATH=. .venv-bridge/bin/python examples/bridge_round_trip.py``.

On GPUs, use torchrun and omit the lines marked "CPU only". Call ``torch.cuda.set_device`` and
``dist.init_process_group("nccl")``, and pass parallel sizes to ``initialize_model_parallel`` and to
the provider.
"""

import tempfile

from kha_megatron import bridge
from tests import transformer_engine  # CPU only

transformer_engine.install()  # CPU only, before the import of Megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state

bridge.register_bridge()  # before AutoBridge reads a directory

from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from kha_megatron.hf import KHAForCausalLM, KHAModelConfig


def save_model(directory: str) -> None:
    """Save a two-layer model with KHA-MLP on the values."""
    config = KHAModelConfig(
        vocab_size=51,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        kha_value="mlp",
    )
    KHAForCausalLM(config).save_pretrained(directory)


def main() -> None:
    """Import a model, print its modules and export it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # CPU only
    parallel_state.initialize_model_parallel()
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        auto = AutoBridge.from_hf_pretrained(directory)
        provider = auto.to_megatron_provider()  # a KHAModelProvider, for any recipe
        print(type(provider).__name__, "knocks", provider.kha)

        provider.gradient_accumulation_fusion = False  # CPU only
        provider.finalize()
        model = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=True,  # CPU only
        )
        attention = model[0].decoder.layers[0].self_attention
        print(type(attention.linear_qkv).__name__, "and", attention.knock_value)

        exported = dict(auto.export_hf_weights(model, cpu=True, show_progress=False))
        original = load_file(f"{directory}/model.safetensors")
        same = all(torch.equal(tensor, exported.pop(name)) for name, tensor in original.items())
        print("the same tensors, bit for bit:", same and not exported)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# What you should see:
#   KHAModelProvider knocks value=mlp
#   TELayerNormColumnParallelLinear and KnockingHeads(knock_value, weight=(3, 16, 16))
#   the same tensors, bit for bit: True
