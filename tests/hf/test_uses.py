"""Every attention and mechanism in every use that transformers offers."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kha_megatron.config import KHAConfig
from kha_megatron.hf import read_kha
from tests.hf.conftest import FAMILY, MIXED, MOE, TOKENS, load, make_model, tokens

EVERYWHERE = {"output": "head", "query": "element", "key": "shared", "value": "head"}
ADDED = {"output": "shared", "query": "shared", "key": "element", "value": "element"}
GATE = {"output": "head", "value": "element"}
MODELS = {
    "dense": (MIXED, {}),
    "moe": (MIXED, MOE),
    **FAMILY,
    "gates": ({"value": "mlp"}, MOE | {"kha_gate": EVERYWHERE | {"dense": "element"}}),
    "added gates": ({}, {"kha_gate": ADDED | {"form": "add", "activation": "silu"}}),
    "gates without input": ({}, {"kha_gate": EVERYWHERE | {"reads_input": False}}),
    "moh": ({"value": "mlp"}, {"kha_moh": {"shared": 1, "active": [1, 3, 2]}}),
    "moh by norms": (
        {},
        {"kha_gate": GATE, "kha_moh": {"shared": 2, "active": 2, "router": "query_norm"}},
    ),
    "talking": ({"value": "mlp"}, {"kha_talking": {}}),
    "collaborative": ({"value": "mlp"}, {"kha_collaborative": {"dim": 14}, "kha_gate": GATE}),
}
VARIATIONS = (
    *("gta, no norm", "mla, direct queries, no norm", "gla, 3 latent heads, direct queries"),
    *("added gates", "gates without input", "moh by norms"),
)
every_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.whole] * (n in VARIATIONS)) for n in MODELS]
)
NEW = 5


def model_of(name, **settings):
    kha, sizes = MODELS[name]
    settings.setdefault("attention", "eager" if name == "talking" else "sdpa")
    return make_model(kha, **(sizes | settings))


def greedy(model, ids, **settings):
    """Generate ``NEW`` tokens without an end token."""
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
    )


@every_model
def test_greedy_tokens_with_and_without_cache_agree(name):
    model, ids = model_of(name, initializer_range=0.5), tokens()
    without = greedy(model, ids, use_cache=False)
    assert without[:, ids.shape[1] :].unique().numel() > 2, "a constant output proves nothing"
    for cache in ("dynamic", "static"):
        assert torch.equal(greedy(model, ids, cache_implementation=cache), without)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_model
def test_logits_of_chunks_with_a_cache_equal_one_pass(name, static):
    """One of the two sequences is padded on the left."""
    model, lengths = model_of(name), (5, 2, 1, 1)
    ids = tokens(2, sum(lengths))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=12)
    parts, start = [], 0
    with torch.no_grad():
        alone = [model(ids[:1, 3:]).logits[0], model(ids[1:]).logits[0]]
        for length in lengths:
            end = start + length
            parts.append(
                model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                ).logits
            )
            start = end
    expected = torch.cat(alone)
    assert expected.std(dim=0).mean() > 0.3, "similar logits prove nothing"
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], expected, rtol=1e-5, atol=2e-5)


@every_model
def test_generation_ignores_padding_on_the_left(name):
    model = model_of(name, initializer_range=0.5)
    short, long = (tokens(1, length).clamp(min=1) for length in (4, 7))  # 0 is padding
    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    together = greedy(model, padded, attention_mask=(padded != 0).long())[:, -NEW:]
    alone = [greedy(model, ids)[0, -NEW:] for ids in (short, long)]
    assert torch.equal(together, torch.stack(alone))


@every_model
def test_eager_attention_returns_its_weights(name):
    with torch.no_grad():
        weights = model_of(name, attention="eager")(tokens(), output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, 6, TOKENS, TOKENS)] * 3
    if name != "talking":  # Its weights are mixed over heads.
        torch.testing.assert_close(weights[1].sum(-1), torch.ones(2, 6, TOKENS))


@every_model
def test_gradient_checkpointing_gives_the_same_gradients(name):
    ids, gradients = tokens(), []
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


@pytest.mark.parametrize(
    "name", ["moe", *(pytest.param(n, marks=pytest.mark.whole) for n in MODELS if n != "moe")]
)
def test_a_decoding_step_compiles_to_one_graph(name):
    model = model_of(name)
    if model.config.num_experts:
        model.set_experts_implementation("batched_mm")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    prompt, steps, runs = tokens(), tokens(2, 3), []
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


@every_model
def test_a_saved_model_loads_unchanged(name, tmp_path):
    model, ids = model_of(name), tokens()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, attn_implementation=model.config._attn_implementation)
    kha, sizes = MODELS[name]
    settings = {k[4:]: v for k, v in sizes.items() if k.startswith("kha_")}
    assert read_kha(loaded.config) == KHAConfig.from_dict(kha | settings)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
