"""Every attention and mechanism in every use that transformers offers."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.hf.conftest import (
    ADDED,
    EVERYWHERE,
    FAMILY,
    MIXED,
    MOE,
    ROUTED,
    make_model,
    mark_whole,
    tokens,
)

GATE = {"output": "head", "value": "element"}
MODELS = {
    "dense": (MIXED, {}),
    "moe": (MIXED, MOE),
    **FAMILY,
    "folded": ({"key": "mlp", "value": "mlp"}, MOE | {"kha_folded": ["value", "output"]}),
    "folded gta": (FAMILY["gta"][0], FAMILY["gta"][1] | {"kha_folded": ["value"]}),
    "folded gates": (
        {"value": "mlp"},
        {"kha_gate": {"output": "element"}, "kha_folded": ["value"]},
    ),
    "gates": ({"value": "mlp"}, MOE | {"kha_gate": EVERYWHERE | {"dense": "element"}}),
    "added gates": ({}, {"kha_gate": ADDED}),
    "gates without input": ({}, {"kha_gate": EVERYWHERE | {"reads_input": False}}),
    "moh": ({"value": "mlp"}, {"kha_moh": {"shared": 1, "active": [1, 3, 2]}}),
    "moh by norms": ({}, {"kha_gate": GATE, "kha_moh": ROUTED | {"router": "query_norm"}}),
    "talking": ({"value": "mlp"}, {"kha_talking": {}}),
    "collaborative": ({"value": "mlp"}, {"kha_collaborative": {"dim": 14}, "kha_gate": GATE}),
}
VARIATIONS = (
    *("gta, no norm", "mla, direct queries, no norm", "gla, 3 latent heads, direct queries"),
    *("folded gta", "folded gates", "added gates", "gates without input", "moh by norms"),
)
every_model = pytest.mark.parametrize("name", mark_whole(MODELS, VARIATIONS))
NEW = 5


def model_of(name, **settings):
    kha, sizes = MODELS[name]
    return make_model(kha, **(sizes | settings))


@every_model
def test_greedy_tokens_ignore_caches_and_padding_on_the_left(name):
    model = model_of(name, initializer_range=0.5)
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    short = tokens(1, 4).clamp(min=1)  # 0 is padding
    long = tokens(1, 7).clamp(min=1)
    after_short = model.generate(short, use_cache=False, **settings)
    after_long = model.generate(long, use_cache=False, **settings)
    alone = torch.cat([after_short[:, -NEW:], after_long[:, -NEW:]])
    assert alone.unique().numel() > 2, "a constant output proves nothing"
    padding = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat([torch.cat([padding, short], 1), long])
    settings["attention_mask"] = (padded != 0).long()
    for cache in ("dynamic", "static"):
        together = model.generate(padded, cache_implementation=cache, **settings)
        assert torch.equal(together[:, -NEW:], alone)


@pytest.mark.fast
def test_the_cache_holds_knocked_values_and_a_step_knocks_one_token():
    model = make_model({"value": "mlp"})
    knocked = []
    attention = model.model.layers[1].self_attn
    attention.v_knock.register_forward_hook(lambda _m, _x, y: knocked.append(y))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 7), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache)
    assert [y.shape[1] for y in knocked] == [7, 1]
    assert torch.equal(cache.layers[1].values, torch.cat(knocked, 1).transpose(1, 2))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_model
def test_logits_of_chunks_with_a_cache_equal_one_pass(name, static):
    """One of the two sequences is padded on the left."""
    model = model_of(name)
    lengths = (5, 2, 1, 1)
    ids = tokens(2, sum(lengths))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=12)
    logits = []
    start = 0
    with torch.no_grad():
        alone = [model(ids[:1, 3:]).logits[0], model(ids[1:]).logits[0]]
        for length in lengths:
            end = start + length
            output = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            )
            logits.append(output.logits)
            start = end
    expected = torch.cat(alone)
    assert expected.std(dim=0).mean() > 0.3, "similar logits prove nothing"
    torch.testing.assert_close(
        torch.cat(logits, 1)[mask.bool()],
        expected,
        rtol=1e-5,
        atol=2e-5,
    )


@every_model
def test_gradient_checkpointing_gives_the_same_gradients(name):
    ids = tokens()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = model_of(name).train()
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


@pytest.mark.parametrize("name", mark_whole(MODELS, MODELS.keys() - {"moe"}))
def test_a_decoding_step_compiles_to_one_graph(name):
    model = model_of(name)
    if model.config.num_experts:
        model.set_experts_implementation("batched_mm")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    prompt = tokens()
    steps = tokens(2, 3)
    runs = []
    for step in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=16)
        logits = []
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            for i in range(steps.shape[1]):
                output = step(
                    steps[:, i : i + 1],
                    past_key_values=cache,
                    position_ids=torch.full((2, 1), prompt.shape[1] + i),
                )
                logits.append(output.logits)
        runs.append(torch.cat(logits, 1))
    plain, of_compiled = runs
    torch.testing.assert_close(of_compiled, plain, rtol=1e-5, atol=1e-5)
