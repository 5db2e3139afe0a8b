"""Build small Megatron models with awkward sizes on the ranks of ``launcher.py``."""

import warnings
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.mcore.attention import KnockedAttention
from kha_megatron.mcore.specs import kha_hybrid_stack_spec, kha_layer_spec

VOCAB = 56
SEQUENCE = 12
BATCH = 3

LATENT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "rope_type": "rope",
}
"""Sizes of multi-latent attention: all different and divisible by four ranks."""


def transformer_config(**overrides: Any) -> TransformerConfig:
    """Return a config of two layers, 8 query heads of 6 features, float32 and local modules."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 40,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 6,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    settings |= overrides
    build: type[TransformerConfig] = TransformerConfig
    if settings.get("multi_latent_attention"):
        build = MLATransformerConfig
        settings = LATENT | settings | {"num_query_groups": None, "kv_channels": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(**settings)


def initialize(seed: int = 7, **sizes: int) -> None:
    """Initialize process groups and random states, e.g. ``tensor_model_parallel_size=2``."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def gpt_model(
    config: TransformerConfig,
    kha: HeadsConfig,
    *,
    layer_spec: Any = None,
    **options: Any,
) -> GPTModel:
    """Build a GPTModel. See :func:`_build` for other options."""
    spec = layer_spec or kha_layer_spec(config, kha, options.get("vp_stage"))
    return _build(GPTModel, config, spec, kha, **options)


def hybrid_model(
    config: TransformerConfig,
    kha: HeadsConfig,
    *,
    pattern: str,
    **options: Any,
) -> HybridModel:
    """Build a HybridModel with the same sizes as :func:`gpt_model`."""
    spec = kha_hybrid_stack_spec(kha)
    return _build(
        HybridModel,
        config,
        spec,
        kha,
        hybrid_layer_pattern=pattern,
        **options,
    )


def _build(
    kind: Any,
    config: Any,
    spec: Any,
    kha: HeadsConfig,
    *,
    perturbed: bool = True,
    **options: Any,
) -> Any:
    """Build a model. If ``perturbed``, move the shared matrices away from their initial value."""
    if kha is not None and kha.attention == "gta":
        options["rotary_percent"] = 0.5
    options = {"vocab_size": VOCAB, "max_sequence_length": SEQUENCE} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(config, spec, position_embedding_type="rope", **options)
    if perturbed:
        perturb(model)
    return model


def attention(
    config: TransformerConfig,
    kha: HeadsConfig,
    layer_number: int = 1,
    **options: Any,
) -> Any:
    """Build the attention of one layer from the layer spec of a GPTModel."""
    spec = kha_layer_spec(config, kha).layer_specs[0].submodules.self_attention
    return build_module(spec, config=config, layer_number=layer_number, **options)


@torch.no_grad()
def perturb(model: torch.nn.Module, scale: float = 0.3) -> None:
    """Add noise to every shared matrix. At the identity, half of the gradients are zero."""
    for module in model.modules():
        if not isinstance(module, KnockedAttention):
            continue
        for name, parameter in module.named_parameters():
            if name.startswith("knock_"):
                generator = torch.Generator().manual_seed(module.layer_number)
                noise = torch.randn(
                    parameter.shape,
                    generator=generator,
                    dtype=torch.float32,
                )
                parameter += (scale * noise).to(parameter)


def batch(
    seed: int = 11,
    size: tuple[int, int] = (BATCH, SEQUENCE),
    vocab: int = VOCAB,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids ``[b, s]``, position ids ``[b, s]`` and the causal mask ``[1, 1, s, s]``."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, size, generator=generator)
    positions = torch.arange(size[1])[None].expand(size)
    mask = torch.ones(size[1], size[1], dtype=torch.bool).triu(1)[None, None]
    return tokens, positions, mask
