"""Test counts against the paper's equations and tables, and against Megatron's modules."""

from dataclasses import replace

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.megatron import model_from_config
from kha_megatron.plan.counts import (
    compute_flops,
    count_attention,
    count_latent_attention,
    count_model,
    format_like_paper,
    get_countable_model,
    get_sequence_length,
)
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import MOH
from kha_megatron.recipes.paper import PAPER
from kha_megatron.recipes.tables import TABLES
from tests.plan.built import EXPERTS, GATES, MIXED, OTHERS

LATENT = {"multi_latent_attention": True}
LINEAR = HeadsConfig.from_preset("kha_linear")
BIASES_AND_GATE = EXPERTS | {"add_qkv_bias": True, "moe_shared_expert_gate": True}


@pytest.mark.fast
def test_the_papers_worked_example():
    """Section 3.4: eq. 10 to 12 at L = 2048, d = 1024, n = 32, for both variants."""
    length = 2048
    d = 1024
    n = 32
    recipe = get_recipe("equation12")
    for preset in ("kha_mlp", "kha_linear"):
        model = replace(recipe.run.model, kha=HeadsConfig.from_preset(preset))
        result = compute_flops(model, length)
        assert result.attention == 8 * length * d**2 + 4 * length**2 * d
        assert result.layers == 26 * length * d**2 + 4 * length**2 * d
        assert result.kha == 6 * length * d**2 // n


def counted(recipe):
    return count_model(recipe.run.model)


CACHE = {
    "gqa8": 2048,
    "gqa4": 1024,
    "mha": 4096,
    "mqa": 256,
    "gta": 576,
    "mla": 576,
}


@pytest.mark.parametrize("name", CACHE)
def test_caches_of_table_3(name):
    counts = counted(get_recipe(f"table3/{name}-baseline"))
    assert counts.kha == 0
    assert counts.cache_per_layer == CACHE[name]
    variant = "linear" if name == "mla" else "mlp"
    knocked = counted(get_recipe(f"table3/{name}-{variant}"))
    assert knocked.active - counts.active == knocked.kha == 18 * 3 * 128**2
    assert knocked.cache_bytes == counts.cache_bytes


@pytest.mark.fast
def test_every_printed_count_is_ours():
    checked = 0
    for recipe in (*TABLES, *PAPER, *MOH):
        counts = counted(recipe)
        kha = 0 if recipe in MOH else counts.kha  # that paper counts its routers
        for name, count in (("total", counts.total), ("active", counts.active)):
            printed = recipe.paper.get(name)
            if printed is None:
                continue
            digits, how = format_like_paper(count - kha, printed)
            expected = "972M" if recipe.name.startswith("table3/mla") else printed
            assert digits == expected, (recipe.name, how)
            checked += 1
    # Tables 2, 3 (active only), 4 and 5, the seven models, and nine of MoH
    assert checked == 2 * 13 + 12 + 2 * 2 + 2 * 18 + 2 * 7 + 2 * 9


def ran(kha, settings, predictions):
    """Return torch's FLOPs of forward and of both passes, and the parameters of a real model."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from torch.utils.flop_counter import FlopCounterMode

    from tests.distributed import models

    models.initialize()
    MTPLossLoggingHelper.tracker.clear()  # its size depends on the number of predictions
    options = {"share_embeddings_and_output_weights": True}
    if predictions:
        config = models.transformer_config(
            **settings,
            mtp_num_layers=predictions,
            is_hybrid_model=True,
        )
        attention = "+" if config.multi_latent_attention else "*"
        mlp = "E" if config.num_moe_experts else "-"
        pattern = 2 * f"{attention}{mlp}" + predictions * f"/{attention}{mlp}"
        model = models.hybrid_model(config, kha, pattern=pattern, **options)
    else:
        config = models.transformer_config(**settings)
        model = models.gpt_model(config, kha, **options)
    tokens, positions, mask = models.batch()

    def counted(backward):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, positions, mask, labels=tokens).sum()
            if backward:
                loss.backward()
        return counter.get_total_flops()

    model_config = replace(
        model_from_config(config, kha),
        num_layers=config.num_layers,
        ffn_hidden_size=config.ffn_hidden_size,
        padded_vocab_size=models.VOCAB,
        mtp_num_layers=predictions,
    )
    assert torch.is_grad_enabled()
    flops = counted(False), counted(True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return flops, parameters, model_config, models.SEQUENCE, models.BATCH


@pytest.mark.parametrize(
    ("kha", "settings", "predictions"),
    [
        *((kha, EXPERTS, 0) for kha in (MIXED, *OTHERS)),
        *(pytest.param(kha, {}, 0, marks=pytest.mark.whole) for kha in (MIXED, *OTHERS)),
        (MIXED, EXPERTS, 1),
        (LINEAR, LATENT, 2),
        (HeadsConfig(), LATENT | {"q_lora_rank": None, "qk_layernorm": False}, 0),
        (HeadsConfig(), LATENT | {"add_qkv_bias": True}, 0),
        (MIXED, BIASES_AND_GATE, 1),
        (GATES, BIASES_AND_GATE, 0),
    ],
)
def test_flops_and_parameters_of_real_models(kha, settings, predictions, ranks):
    """Head size 6 of 40 / 8, 4 of 8 heads, and a share for backward of twice forward."""
    flops, parameters, model, length, batch = ranks(ran, 1, kha, settings, predictions)[0]
    forward, training = flops
    ours = compute_flops(model, length)
    assert count_model(model).total == parameters
    assert forward == batch * ours.forward
    assert training == 3 * batch * ours.forward


SIZES = {"num_layers": 1, "hidden_size": 40, "num_attention_heads": 6}
MODEL = ModelConfig(**SIZES, num_query_groups=3, kv_channels=8, ffn_hidden_size=24)
WIDTHS = {
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
LATENT_MODEL = replace(MODEL, multi_latent_attention=True, **WIDTHS)


def test_tied_and_grouped_latent_by_their_definition():
    tied = count_attention(replace(MODEL, kha=HeadsConfig(attention="gta")))
    query = 40 * 48
    state = 40 * 3 * 8
    rotary = 40 * 4
    output = 48 * 40
    assert tied.weights == query + state + rotary + output
    assert tied.cache == 3 * 8 + 4
    groups = count_latent_attention(replace(LATENT_MODEL, kha=HeadsConfig(attention="gla")))
    whole = count_latent_attention(LATENT_MODEL)
    # each half of the latent is widened for half of the heads only
    assert whole.weights - groups.weights == 5 * 6 * (8 + 6)
    assert groups.cache == whole.cache == 14
    assert groups.pair_multiply_adds == whole.pair_multiply_adds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--softmax-type learnable", "with --softmax-type learnable. Remove --softmax-type."),
        ("--softmax-type off-by-one", None),
        ("--moe-latent-size 32", "with --moe-latent-size 32. Remove --moe-latent-size."),
        (
            "--mtp-num-layers 2 --mtp-use-repeated-layer",
            "with --mtp-use-repeated-layer. Remove --mtp-use-repeated-layer.",
        ),
        (
            "--position-embedding-type learned_absolute",
            "with --position-embedding-type learned_absolute. Add",
        ),
        ("--experimental-attention-variant dsa", "with --experimental-attention-variant dsa."),
        ("--heterogeneous-layers-config-path x", "with --heterogeneous-layers-config-path."),
    ],
)
def test_models_with_other_parameters_are_refused(words, message):
    run = get_recipe("laptop/dense").run.updated(words.split())
    if message is None:
        assert get_countable_model(run.model, run.arguments) == run.model
        return
    with pytest.raises(ConfigError, match=f"^Cannot count a model {message}"):
        get_countable_model(run.model, run.arguments)


def test_a_run_without_sizes_is_refused():
    run = replace(get_recipe("dense-0.6b").run, vocab_size=None)
    with pytest.raises(ConfigError, match=r"without a vocabulary size\. Add --vocab-size"):
        get_countable_model(run.model, run.arguments)
    run = run.updated(["--vocab-size", "1000"])
    assert get_countable_model(run.model, run.arguments).vocab_size == 1000
    with pytest.raises(ConfigError, match="of a run without --seq-length"):
        get_sequence_length(run.updated(seq_length=None).arguments)
