"""Recipes of the papers' tables: head mechanisms, sizes and training arguments."""

import re

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.words import parse
from kha_megatron.plan.search import setup_of
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import GATED, INTERACTIVE
from kha_megatron.recipes.tables import TABLES

TOKENS = {"table1": 75e9, "table2": 75e9, "table3": 100e9, "table4": 1e12, "table5": 100e9}


def arguments(name):
    return get_recipe(name).run.flags


def test_every_row_of_each_table_is_there():
    rows = {name: sum(recipe.name.startswith(name) for recipe in TABLES) for name in TOKENS}
    assert rows == {"table1": 18, "table2": 13, "table3": 12, "table4": 2, "table5": 18}


@pytest.mark.parametrize("recipe", TABLES, ids=lambda recipe: recipe.name)
def test_training_is_that_of_section_4_1(recipe):
    given = recipe.run.flags
    tokens = TOKENS.get(recipe.name.partition("/")[0], 100e9)
    long = recipe.name.startswith("table4")
    assert given["--seq-length"] == (("8192",) if long else ("4096",))
    step = int(given["--global-batch-size"][0]) * int(given["--seq-length"][0])
    assert f"{step / 1e6:.1f}" == ("4.2" if long else "2.1")
    iterations = int(given["--train-iters"][0])
    assert (iterations - 1) * step < tokens <= iterations * step
    assert float(given["--lr"][0]) == (4.78e-4 if long else 7.5e-4)
    assert float(given["--min-lr"][0]) == pytest.approx(float(given["--lr"][0]) / 10)
    optimizer = "--adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0"
    schedule = "--lr-decay-style cosine --lr-warmup-fraction 0.05 --kv-channels 128"
    assert given.items() >= parse(f"{optimizer} {schedule}".split()).items()
    assert ("--num-experts" in given) == ("dense" not in recipe.name)
    if "--num-experts" in given:
        assert given["--moe-router-score-function"] == ("sigmoid",)
        assert given["--moe-router-load-balancing-type"] == ("none",)


@pytest.mark.parametrize(
    ("name", "kha"),
    [
        ("table1/mlp-kv8", KHAConfig(value="mlp")),
        ("table2/baseline", KHAConfig()),
        ("table2/gate-v", KHAConfig(value="gate")),
        ("table2/mlp-k", KHAConfig(key="mlp")),
        ("table2/mlp-qkv", KHAConfig.from_preset("kha_mlp_qkv")),
        ("table3/gta-mlp", KHAConfig(attention="gta", value="mlp")),
        ("table5/dense-3.9b-linear", KHAConfig.from_preset("kha_linear")),
    ],
)
def test_heads_of_a_row(name, kha):
    assert get_recipe(name).run.kha == kha


def test_key_value_heads_of_a_row():
    assert arguments("table1/linear-kv1")["--num-query-groups"] == ("1",)
    mha = arguments("table3/mha-mlp")
    assert mha["--num-query-groups"] == mha["--num-attention-heads"] == ("16",)
    assert get_recipe("attention/gla-linear").run.kha.latent_heads == 2


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("1.7b-28", ("28", "16", "8", "2048", "6144")),
        ("1.7b-48", ("48", "16", "8", "1536", "4608")),
        ("15b", ("24", "32", "4", "2048", "768", "128", "8")),
    ],
)
def test_gated_models_differ_only_in_their_gate(name, sizes):
    flags = ("--num-layers", "--num-attention-heads", "--num-query-groups", "--hidden-size")
    flags += ("--ffn-hidden-size", "--num-experts", "--moe-router-topk")
    plain = arguments(f"gated/{name}-baseline")
    assert tuple(plain[flag][0] for flag in flags if flag in plain) == sizes
    assert ("--untie-embeddings-and-output-weights" in plain) == (name == "15b")
    own = [recipe for recipe in GATED if recipe.name.startswith(f"gated/{name}-")]
    assert [recipe.run.flags | {"--kha-preset": ("baseline",)} for recipe in own] == [plain] * 8
    gates = {recipe.name.rpartition(f"{name}-")[2]: str(recipe.run.kha) for recipe in own}
    del gates["baseline"]
    positions = (gate if "-" in gate else f"{gate}-element" for gate in gates)
    assert list(gates.values()) == [f"gate({p.replace('-', '=')})" for p in positions]


def test_table_6_is_table_3_with_other_heads():
    for recipe in INTERACTIVE:
        _, attention = recipe.name.rsplit("-", 1)
        base = arguments(f"table3/{attention}-baseline")
        own = dict(recipe.run.flags) | {"--kha-preset": ("baseline",)}
        own.pop("--heads", None)
        assert own == base, recipe.name
    assert {str(recipe.run.kha) for recipe in INTERACTIVE} == {
        *("talking(max_tokens=4096)", "collaborative", "moh(share=0.75)"),
        *("value=mlp", "query=linear key=linear value=linear"),
    }


@pytest.mark.parametrize(
    ("name", "shape", "training"),
    [
        ("s", ("12", "768", "2048", "12", "64"), (23842, "0.0003", "3e-05", "2000")),
        ("b", ("24", "1536", "4096", "16", "96"), (23842, "0.0005", "5e-05", "500")),
    ],
)
def test_table_4_of_mixture_of_heads(name, shape, training):
    """Sizes of Table A and training of Table C: 100B tokens in steps of 2,048 x 2,048."""
    flags = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads")
    plain = arguments(f"moh/table4-{name}-baseline")
    assert tuple(plain[flag][0] for flag in (*flags, "--kv-channels")) == shape
    iterations, *rates = training
    assert int(plain["--train-iters"][0]) == iterations == -(-100 * 10**9 // 2048**2)
    for flag, word in zip(("--lr", "--min-lr", "--lr-warmup-iters"), rates, strict=True):
        assert plain[flag] == (word,)
    assert plain["--lr-warmup-init"] == ("1e-07",)
    assert "--qk-layernorm" not in plain
    for active in ("75", "50"):
        recipe = get_recipe(f"moh/table4-{name}-{active}")
        assert recipe.run.flags | {"--kha-preset": ("baseline",)} == plain
        moh, heads = recipe.run.kha.moh, int(shape[3])
        shared = moh.shared_heads(heads)
        assert shared + moh.active_heads(heads) == heads * int(active) // 100
        assert shared == heads * int(active) // 200


def test_second_stage_of_llama3():
    """Section 4.4 and Table D."""
    recipe = get_recipe("moh/llama3-8b-stage2")
    moh = recipe.run.kha.moh
    assert (moh.shared, moh.active, moh.router, moh.quantized) == (16, 8, "query_norm", True)
    training = "--lr 2e-05 --min-lr 1e-06 --lr-warmup-iters 50 --seq-length 8192"
    batch = "--global-batch-size 2048 --pipeline-model-parallel-size 8"
    assert recipe.run.flags.items() >= parse(f"{training} {batch}".split()).items()
    assert recipe.run.vocab_size == 160896


def test_printed_losses():
    loss = {recipe.name: recipe.paper.get("loss") for recipe in TABLES}
    assert loss["table2/mlp-v"] - loss["table2/baseline"] == pytest.approx(-0.024, abs=1e-9)
    assert loss["table3/mqa-mlp"] - loss["table3/mqa-baseline"] == pytest.approx(-0.013)
    assert loss["table5/moe-a1.6b-14.6b-mlp"] == 1.737
    without = [name for name, value in loss.items() if value is None]
    assert all(re.match("table2/gate-(q|k|qkv)$|table4|attention/gla", name) for name in without)


@pytest.mark.parametrize("name", ["table3/gta-mlp", "attention/gla-linear", "table3/mla-linear"])
def test_planner_refuses_other_attention(name):
    with pytest.raises(ConfigError, match="which plan does not count"):
        setup_of(get_recipe(name).run)
