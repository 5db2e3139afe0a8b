"""Recipes of the papers' tables: head mechanisms, sizes and training arguments."""

import pytest

from kha_megatron.heads import Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.run import parse
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import _MORE_GATES, GATED, INTERACTIVE
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
        ("ablation/random-mlp", HeadsConfig(Knock(value="mlp", init="random"))),
        (
            "ablation/random-linear",
            HeadsConfig(Knock(query="linear", key="linear", value="linear", init="random")),
        ),
        ("gated/15b-output-shared", HeadsConfig(Gate(output="shared"))),
        ("gated/15b-output-silu", HeadsConfig(Gate(output="element", activation="silu"))),
        ("gated/15b-output-add", HeadsConfig(Gate(output="element", form="add"))),
        (
            "gated/15b-output-add-silu",
            HeadsConfig(Gate(output="element", form="add", activation="silu")),
        ),
        (
            "gated/15b-output-input-independent",
            HeadsConfig(Gate(output="element", reads_input=False)),
        ),
        (
            "gated/15b-output-non-sparse",
            HeadsConfig(Gate(output="element", activation="half_sigmoid")),
        ),
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
        (  # Table C: 200B tokens
            "moh/table4-b-200b-75",
            "--num-layers 24 --lr 0.0005 --min-lr 5e-05 --lr-warmup-iters 500 --seq-length 2048 "
            "--global-batch-size 2048 --train-iters 47684",
        ),
        (
            "moh/llama3-8b-stage1",
            "--lr 6e-05 --min-lr 6e-06 --lr-warmup-iters 50 --seq-length 8192 "
            "--global-batch-size 2048 --train-iters 17882 --tensor-model-parallel-size 2 "
            "--kha-preset baseline",
        ),
        (
            "gated/1.7b-28-output-element-128k",
            "--seq-length 131072 --position-embedding-type yarn --rotary-scaling-factor 4 "
            "--yarn-original-max-position-embeddings 32768 --skip-train",
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


@pytest.mark.parametrize(
    ("name", "forms"),
    [("1.7b-28", ()), ("1.7b-48", ()), ("15b", tuple(_MORE_GATES))],
)
def test_gated_models_differ_only_in_their_gate(name, forms):
    plain = arguments(f"gated/{name}-baseline")
    prefix = f"gated/{name}-"
    gates = {}
    for recipe in GATED:
        if not recipe.name.startswith(prefix):
            continue
        flags = recipe.run.flags | {"--kha-preset": ("baseline",)}
        flags.pop("--heads", None)
        assert flags == plain, recipe.name
        gates[recipe.name.removeprefix(prefix)] = str(recipe.run.kha)
    del gates["baseline"]
    assert len(set(gates.values())) == len(gates) == 7 + len(forms)
    for form in forms:
        assert gates.pop(form).startswith("gate(output=")
    positions = (gate if "-" in gate else f"{gate}-element" for gate in gates)
    assert list(gates.values()) == [f"gate({p.replace('-', '=')})" for p in positions]


def test_table_6_is_table_3_with_other_heads():
    for recipe in INTERACTIVE:
        base = arguments(f"table3/{recipe.name.rpartition('-')[2]}-baseline")
        own = recipe.run.flags | {"--kha-preset": ("baseline",)}
        recompute = own.pop("--recompute-granularity", None)  # changes no results
        assert (recompute is not None) == ("/talking-" in recipe.name)
        if recompute is not None:
            assert own.pop("--micro-batch-size") == ("2",)
            own["--micro-batch-size"] = base["--micro-batch-size"]
        assert own == base, recipe.name
    assert {str(recipe.run.kha) for recipe in INTERACTIVE} == {
        *("talking", "collaborative", "moh(share=0.75)"),
        *("value=mlp", "query=linear key=linear value=linear"),
    }
