"""Recipes of the papers' tables: head mechanisms, sizes and training arguments."""

import pytest

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.run import parse
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import GATED, INTERACTIVE
from kha_megatron.recipes.tables import TABLES

TOKENS = {
    "table1": 75e9,
    "table2": 75e9,
    "table3": 100e9,
    "table4": 1e12,
    "table5": 100e9,
}


def arguments(name):
    return get_recipe(name).run.flags


@pytest.mark.fast
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
        ("table1/mlp-kv8", HeadsConfig(Knock(value="mlp"))),
        ("table2/baseline", HeadsConfig()),
        ("table2/gate-v", HeadsConfig(Knock(value="gate"))),
        ("table2/mlp-k", HeadsConfig(Knock(key="mlp"))),
        ("table2/mlp-qkv", HeadsConfig.from_preset("kha_mlp_qkv")),
        ("table3/gta-mlp", HeadsConfig(Knock(value="mlp"), attention="gta")),
        ("table5/dense-3.9b-linear", HeadsConfig.from_preset("kha_linear")),
    ],
)
def test_heads_of_a_row(name, kha):
    assert get_recipe(name).run.kha == kha


MOH = "--train-iters 23842 --lr-warmup-init 1e-07 --seq-length 2048 --global-batch-size 2048"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("table1/linear-kv1", "--num-query-groups 1"),
        ("table3/mha-mlp", "--num-query-groups 16 --num-attention-heads 16"),
        (  # Tables A and C: 100B tokens
            "moh/table4-s-baseline",
            "--num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 "
            f"--kv-channels 64 --lr 0.0003 --min-lr 3e-05 --lr-warmup-iters 2000 {MOH}",
        ),
        (
            "moh/table4-b-baseline",
            "--num-layers 24 --hidden-size 1536 --ffn-hidden-size 4096 --num-attention-heads 16 "
            f"--kv-channels 96 --lr 0.0005 --min-lr 5e-05 --lr-warmup-iters 500 {MOH}",
        ),
        (  # section 4.4 and Table D
            "moh/llama3-8b-stage2",
            "--lr 2e-05 --min-lr 1e-06 --lr-warmup-iters 50 --seq-length 8192 "
            "--global-batch-size 2048 --pipeline-model-parallel-size 8 --heads moh.shared=16 "
            "--heads moh.active=8 --heads moh.router=query_norm --heads moh.quantized=true",
        ),
    ],
)
def test_arguments_of_a_row(name, words):
    assert arguments(name).items() >= parse(words.split()).items()


@pytest.mark.parametrize("name", ["1.7b-28", "1.7b-48", "15b"])
def test_gated_models_differ_only_in_their_gate(name):
    plain = arguments(f"gated/{name}-baseline")
    own = [recipe for recipe in GATED if recipe.name.startswith(f"gated/{name}-")]
    assert [recipe.run.flags | {"--kha-preset": ("baseline",)} for recipe in own] == [plain] * 8
    gates = {recipe.name.rpartition(f"{name}-")[2]: str(recipe.run.kha) for recipe in own}
    del gates["baseline"]
    positions = (gate if "-" in gate else f"{gate}-element" for gate in gates)
    assert list(gates.values()) == [f"gate({p.replace('-', '=')})" for p in positions]


def test_table_6_is_table_3_with_other_heads():
    for recipe in INTERACTIVE:
        base = arguments(f"table3/{recipe.name.rpartition('-')[2]}-baseline")
        own = recipe.run.flags | {"--kha-preset": ("baseline",)}
        recompute = own.pop("--recompute-granularity", None)  # changes no results
        assert (recompute is not None) == ("/talking-" in recipe.name)
        assert own == base, recipe.name
    assert {str(recipe.run.kha) for recipe in INTERACTIVE} == {
        *("talking", "collaborative", "moh(share=0.75)"),
        *("value=mlp", "query=linear key=linear value=linear"),
    }
