"""Tiny models with sizes that divide nothing: 6 query heads on 3 key/value heads of 10."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from kha_megatron.heads.knock import MATRICES, PROJECTIONS, module_name
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig
from kha_megatron.hf.modeling_kha import attention_class

HIDE_PACKAGE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "kha_megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
"""Start of a program in which kha_megatron cannot be imported."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 22,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "shared_expert_intermediate_size": 9,
    "shared_expert_gate": True,
}
LATENT = {
    "num_key_value_heads": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
MIXED = {"query": "linear", "key": "gate", "value": "mlp"}
LINEAR = {"query": "linear", "key": "linear", "value": "linear"}
FAMILY = {
    "gta": ({"query": "gate", "value": "mlp"}, {"kha_attention": "gta", "head_dim": 12}),
    "gta, no norm": (
        {"value": "linear"},
        {"kha_attention": "gta", "head_dim": 12, "use_qk_norm": False},
    ),
    "mla": (LINEAR, LATENT | {"q_lora_rank": 9}),
    "mla, direct queries, no norm": (LINEAR, LATENT | {"use_qk_norm": False}),
    "gla": (LINEAR, LATENT | {"q_lora_rank": 9, "kha_attention": "gla"}),
    "gla, 3 latent heads, direct queries": (
        {"key": "linear"},
        LATENT | {"kha_attention": "gla", "kha_latent_heads": 3},
    ),
}
"""KHA variants and sizes of models with GTA, MLA or GLA."""
EVERYWHERE = {
    "output": "head",
    "query": "element",
    "key": "shared",
    "value": "head",
}
ADDED = {
    "output": "shared",
    "query": "shared",
    "key": "element",
    "value": "element",
    "form": "add",
    "activation": "silu",
}
ROUTED = {"shared": 2, "active": 2}
TOKENS = 7


def mark_whole(names, whole) -> list:
    """Return test parameters for all names. Those in ``whole`` run in ``make test-all`` only."""
    parameters = []
    for name in names:
        marks = [pytest.mark.whole] if name in whole else []
        parameters.append(pytest.param(name, marks=marks))
    return parameters


def make_config(kha=None, **overrides) -> KHAModelConfig:
    """Return a configuration. ``kha`` maps projections to variants."""
    fields = {f"kha_{projection}": variant for projection, variant in (kha or {}).items()}
    return KHAModelConfig(**{**SIZES, **fields, **overrides})


def make_model(
    kha=None,
    *,
    attention=None,
    learnt=True,
    dtype=torch.float32,
    **overrides,
) -> KHAForCausalLM:
    """Return a model in evaluation mode. ``learnt`` changes every weight from its initial value.

    ``.to(dtype)`` would also round the frequencies of RoPE and the correction bias.
    """
    config = make_config(kha, **overrides)
    attention = attention or ("eager" if "kha_talking" in overrides else "sdpa")
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=dtype,
        attn_implementation=attention,
    ).eval()
    if learnt:
        biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
        with torch.no_grad():
            for tensor in (*model.parameters(), *biases):
                tensor += 0.1 * torch.randn_like(tensor)
    return model


def load(directory, **settings):
    """Load a saved model without remote code. No tensor may be missing, new or mismatched.

    Returns a copy. Loaded tensors are unaligned in the mapped file, and the CPU's matrix product
    rounds differently on those.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        output_loading_info=True,
        trust_remote_code=False,
        **settings,
    )
    assert not any(info.values())
    return deepcopy(model)


def tokens(batch: int = 2, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length))


def every_projection(variant: str) -> dict[str, str]:
    return dict.fromkeys(PROJECTIONS, variant)


def knock_matrices(layer, kha) -> dict[str, list[torch.Tensor]]:
    """Return the matrices of each projection as the oracle expects them."""
    knocks = {projection: getattr(layer, f"{projection[0]}_knock") for projection in kha}
    return {
        p: [knock.get_submodule(module_name(m)).weight.T for m in MATRICES[kha[p]]]
        for p, knock in knocks.items()
    }


def norm_weights(layer, q_norm="q_norm", **others) -> dict[str, torch.Tensor]:
    """Return the weights of the norms that ``layer`` has by the names of the oracle's arguments."""
    names = {"q_norm": q_norm} | (others or {"k_norm": "k_norm"})
    found = {ours: getattr(layer, theirs, None) for ours, theirs in names.items()}
    return {name: norm.weight for name, norm in found.items() if hasattr(norm, "weight")}


def transposed_weights(layer, *names) -> list[torch.Tensor]:
    return [getattr(layer, name).weight.T for name in names]


def check_layer_against_oracle(config, oracle):
    """Compare the output and every gradient of one float64 layer with ``oracle(layer, hidden)``."""
    tolerance = 5e-6 if config.use_qk_norm else 1e-12  # transformers' norms compute in float32.
    eager = "talking" in config.mechanisms
    config._attn_implementation = "eager" if eager else "sdpa"
    layer = attention_class(config)(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    hidden = torch.randn(
        2,
        TOKENS,
        SIZES["hidden_size"],
        dtype=torch.float64,
        requires_grad=True,
    )
    mask = torch.full((1, 1, TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    out_grad = torch.randn_like(hidden)
    leaves = {"hidden": hidden, **dict(layer.named_parameters())}
    # The model would round these to float32.
    dim = config.qk_rope_head_dim or config.head_dim
    frequency = 1e4 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(TOKENS, dtype=torch.float64), frequency).repeat(1, 2)[None]
    angles = angle.cos(), angle.sin()
    results = []
    for output in (oracle(layer, hidden), layer(hidden, angles, mask if eager else None)[0]):
        results.append((output, *torch.autograd.grad(output, leaves.values(), out_grad)))
    for name, theirs, ours in zip(["output", *leaves], *results, strict=True):
        assert theirs.abs().max() > 1e-4, f"{name} is too small to prove anything"
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"
