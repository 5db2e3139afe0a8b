"""Every model, whatever its attention and mechanisms, in every use that transformers offers."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kha_megatron.config import KHAConfig
from kha_megatron.hf import read_kha
from tests.hf.conftest import FAMILY, MOE, TOKENS, make_model, tokens
from tests.hf.packed import check_packed

MIXED = {"query": "linear", "key": "gate", "value": "mlp"}
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
every_model = pytest.mark.parametrize("name", MODELS)
NEW = 6


def model_of(name, **settings):
    kha, sizes = MODELS[name]
    settings.setdefault("attention", "eager" if name == "talking" else "sdpa")
    return make_model(kha, **(sizes | settings))


def greedy(model, ids, **settings):
    """Generate ``NEW`` tokens without an end token."""
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **settings
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_model
def test_greedy_with_and_without_cache_agree(name, cache):
    model, ids = model_of(name, initializer_range=0.5), tokens()
    without = greedy(model, ids, use_cache=False)
    assert without[:, ids.shape[1] :].unique().numel() > 3, "a constant output proves nothing"
    assert torch.equal(greedy(model, ids, cache_implementation=cache), without)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_model
def test_logits_of_pieces_with_a_cache_equal_those_of_the_whole(name, static):
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
    if name != "talking":  # whose weights are mixed over heads
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
    "name",
    [pytest.param(name, marks=() if name == "moe" else pytest.mark.whole) for name in MODELS],
)
def test_a_decoding_step_compiles_to_one_graph(name):
    model = model_of(name)
    if name == "moe":
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
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        output_loading_info=True,
        trust_remote_code=False,
        attn_implementation=model.config._attn_implementation,
    )
    assert not any(info.values())
    kha, sizes = MODELS[name]
    settings = {k[4:]: v for k, v in sizes.items() if k.startswith("kha_")}
    assert read_kha(loaded.config) == KHAConfig.from_dict(kha | settings)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())
    ids = tokens()
    with torch.no_grad():  # a copy, because loaded tensors are not aligned
        assert torch.equal(deepcopy(loaded)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("talking",)])
def test_a_server_can_replace_the_attention_function(name):
    _, calls_of_layers = check_packed(lambda **settings: model_of(name, **settings))
    assert [len(calls) for calls in calls_of_layers.values()] == [1, 1, 1]
