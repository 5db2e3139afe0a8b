"""Build, load, run and export models on the ranks of the Bridge tests."""

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LOCAL = {
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}
"""Megatron's own modules, for the CPU."""
TE = {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": False}
IMPLEMENTATIONS = {"local": LOCAL, "te": TE}


@contextmanager
def quiet():
    """Ignore deprecation warnings of Megatron and Bridge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def auto_bridge(folder: str) -> Any:
    """Register our bridge and return the AutoBridge of a directory."""
    from kha_megatron import bridge

    bridge.register_bridge()
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(folder)


def build(
    folder: str,
    implementation: str = "local",
    layout: dict[str, Any] | None = None,
    *,
    load: bool = True,
    hybrid: bool = False,
    **overrides: Any,
) -> tuple[Any, list[torch.nn.Module]]:
    """Return the AutoBridge of a directory and this rank's model, built as in a recipe."""
    from tests.distributed import models

    layout = layout or {}
    models.initialize(**{k: v for k, v in layout.items() if k != "sequence_parallel"})
    auto = auto_bridge(folder)
    provider = auto.to_megatron_provider(load_weights=load)
    if hybrid:
        provider = provider.to_hybrid()
    for name, value in (IMPLEMENTATIONS[implementation] | layout | overrides).items():
        setattr(provider, name, value)
    with quiet():
        provider.finalize()
        return auto, provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=True,
        )


def write(auto: Any, model: list[torch.nn.Module], folder: str, **options: Any) -> None:
    """Export a model with its configuration and tokenizer."""
    with quiet():
        auto.save_hf_pretrained(model, folder, show_progress=False, **options)


def tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face directory."""
    from safetensors.torch import load_file

    return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


@torch.no_grad()
def logits(model: list[torch.nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """Return Megatron's logits ``[B, S, padded vocabulary]`` in float32."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model[0](ids, torch.arange(length).expand_as(ids), mask).float()


@torch.no_grad()
def hf_logits(folder: str, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[B, S, vocabulary]`` of ``KHAForCausalLM``."""
    from kha_megatron.hf import KHAForCausalLM

    return KHAForCausalLM.from_pretrained(folder).eval()(ids).logits.float()
