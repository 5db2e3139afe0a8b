"""Tiny models with sizes that divide nothing: 6 query heads on 3 key/value heads of 10."""

import torch
from transformers import AutoModelForCausalLM, StaticCache

from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

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
"""What is knocked, and the sizes, of the attentions that are not grouped-query attention."""
TOKENS = 7


def make_config(kha=None, **overrides) -> KHAModelConfig:
    """``kha`` maps projections to variants."""
    fields = {f"kha_{projection}": variant for projection, variant in (kha or {}).items()}
    return KHAModelConfig(**{**SIZES, **fields, **overrides})


def make_model(
    kha=None, *, attention="sdpa", learnt=True, dtype=torch.float32, **overrides
) -> KHAForCausalLM:
    """A model in evaluation mode; ``learnt`` moves every weight away from its initial value.

    The dtype is set while building and not by ``.to``, which would also round the frequencies of
    RoPE and the correction bias.
    """
    config = make_config(kha, **overrides)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    ).eval()
    if learnt:
        with torch.no_grad():
            for tensor in (*model.parameters(), *correction_biases(model)):
                tensor += 0.1 * torch.randn_like(tensor)
    return model


def correction_biases(model) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def tokens(batch: int = 2, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length))


def every_projection(variant: str) -> dict[str, str]:
    return dict.fromkeys(PROJECTIONS, variant)


def check_decoding_is_one_graph(model):
    """Compiled whole, steps with a static cache give what they give uncompiled."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    prompt, steps = tokens(), tokens(2, 3)
    runs = []
    for step in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            logits = [
                step(
                    steps[:, i : i + 1],
                    past_key_values=cache,
                    position_ids=torch.full((2, 1), prompt.shape[1] + i),
                ).logits
                for i in range(steps.shape[1])
            ]
        runs.append(torch.cat(logits, 1))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-5, atol=1e-5)


def check_checkpointing(make):
    """Layers that run twice give the gradients of those that run once.

    Args:
        make: builds the model, from torch's random state.
    """
    ids, gradients = tokens(), []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = make().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        runs = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        model(ids, labels=ids).loss.backward()
        assert len(runs) == (2 if checkpointing else 1)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, recomputed = gradients
    assert all(grad is not None and grad.abs().max() > 0 for grad in plain.values())
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
