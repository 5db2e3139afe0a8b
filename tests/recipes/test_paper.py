"""The paper's models: their parameter counts, by formula and as built, and their arguments."""

import os
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kha_megatron.config import KHAConfig
from kha_megatron.model.layout import Layout
from kha_megatron.plan.counts import active_parameters, as_printed, count, flops, parameters
from kha_megatron.plan.search import setup_of
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import GATED, INTERACTIVE, MOH
from kha_megatron.recipes.paper import PAPER, PRINTED
from kha_megatron.recipes.tables import TABLES

NAMES = [recipe.name for recipe in PAPER]


def _different():
    """Of all recipes of tables, one for each model that Megatron builds differently."""
    seen = {}
    for recipe in (*TABLES, *INTERACTIVE, *MOH, *GATED):
        sizes = [recipe.run.flags.get(flag) for flag in MODEL_FLAGS]
        seen.setdefault((*sizes, recipe.run.kha), recipe.name)
    return [*NAMES, *seen.values()]


MODEL_FLAGS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--num-query-groups")
MODEL_FLAGS += ("--multi-latent-attention",)
QUICK = {"table3/mla-linear"}
DIFFERENT = _different()


def by_hand(layers, hidden, ffn, experts=0, active=0):
    """Total and active parameters without KHA: 32 query heads and 4 KV heads of 128, tied."""
    attention = (32 + 2 * 4) * 128 * hidden + 32 * 128 * hidden + 2 * 128
    layer = attention + 2 * hidden
    ends = 157184 * hidden + hidden
    if not experts:
        total = ends + layers * (layer + 3 * hidden * ffn)
        return total, total
    router = experts * hidden
    return tuple(ends + layers * (layer + router + n * 3 * hidden * ffn) for n in (experts, active))


SHAPES = {
    "moe-a0.44b-2.3b": (12, 1152, 768, 64, 4),
    "moe-a0.8b-6.6b": (18, 1536, 1152, 64, 4),
    "moe-a1.6b-14.6b": (23, 2048, 1536, 64, 4),
    "dense-0.6b": (24, 1024, 3072),
    "dense-1.7b": (24, 2048, 6144),
    "dense-3.9b": (36, 2560, 9728),
    "moe-a1b-6.1b": (18, 2048, 384, 128, 8),
}


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_the_papers(name):
    setup = setup_of(get_recipe(name).run)
    total = parameters(setup.model, KHAConfig(), Layout()).total
    active = active_parameters(setup.model, KHAConfig())
    assert (total, active) == by_hand(*SHAPES[name])
    for number, printed in zip((total, active), PRINTED[name].values(), strict=True):
        assert as_printed(number, printed)[0] == printed
    knocked = parameters(setup.model, setup.kha, Layout()).total
    assert knocked - total == setup.model.num_layers * 3 * 128**2


class OnMeta(TorchFunctionMode):
    """Nothing is allocated, whatever device is asked for: these models do not fit here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def built_count(words, vocab_size):
    """Parameters of the model that Megatron builds on no device from the recipe's arguments."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from kha_megatron.mcore.specs import kha_layer_spec
    from kha_megatron.training.arguments import add_kha_arguments, kha_from_args
    from tests.distributed import models

    before = sys.argv, os.environ["WORLD_SIZE"]
    cpu = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion"]
    cpu += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--mock-data"]
    sys.argv = ["training", *words, *cpu, "--vocab-size", str(vocab_size)]
    os.environ["WORLD_SIZE"] = "8"
    try:
        args = parse_args(add_kha_arguments)
        validate_args(args)
    finally:
        sys.argv, os.environ["WORLD_SIZE"] = before
    config = core_transformer_config_from_args(args)
    config.init_model_with_meta_device = True
    # the whole model on one rank
    config.expert_model_parallel_size = config.pipeline_model_parallel_size = 1
    models.initialize()
    kha = kha_from_args(args)
    with torch.device("meta"), OnMeta():
        model = GPTModel(
            config,
            kha_layer_spec(config, kha),
            vocab_size=vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
    assert {p.device.type for p in model.parameters()} == {"meta"}
    return sum(p.numel() for p in model.parameters()), str(kha)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.whole) for n in DIFFERENT]
)
def test_megatron_takes_the_arguments_and_builds_as_many(name, ranks):
    """Its own parser and validation, as rank 0 of 8."""
    recipe = get_recipe(name)
    words = recipe.run_for(["--device", "cpu"]).words()
    built, kha = ranks(built_count, 1, words, recipe.run.vocab_size, timeout=500)[0]
    assert built == count(recipe.run.model, recipe.run.kha).total
    assert kha == str(recipe.run.kha)


def counted(name):
    run = get_recipe(name).run
    return count(run.model, run.kha)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gated/1.7b-28-baseline", "1.720B", "1.720B"),
        ("gated/1.7b-48-baseline", "1.706B", "1.706B"),
        ("gated/15b-baseline", "15.577B", "1.99B"),
        ("moh/table4-s-baseline", "185.617M", "185.617M"),
        ("moh/table4-s-75", "185.746M", "185.746M"),
        ("moh/table4-b-baseline", "880.879M", "880.879M"),
        ("moh/table4-b-75", "881.543M", "881.543M"),
    ],
)
def test_counts_of_other_papers(name, total, active):
    counts = counted(name)
    assert as_printed(counts.total, total)[0] == total
    assert as_printed(counts.active, active)[0] == active


def test_moh_counts_are_the_papers_digits():
    """Table A rounds the routers' 0.66M up to the next million."""
    for recipe in MOH:
        counts = counted(recipe.name)
        for name in {"total", "active"} & recipe.paper.keys():
            assert as_printed(getattr(counts, name), recipe.paper[name])[1] == "rounded"
    assert counted("moh/llama3-8b-stage2").kha == 0  # a router by norms has no parameters


def test_flops_that_skipped_heads_would_save():
    """LLM-B skips 4 of 16 heads: a quarter of the scores, and of W_Q and W_O, half the weights."""
    run = get_recipe("moh/table4-b-75").run
    work = flops(run.model, run.kha, 2048)
    assert work.spared_scores == work.scores / 4
    assert work.spared_projections == work.projections / 8


@pytest.mark.parametrize(
    ("gate", "millions", "filled"),
    [
        ("output-element", "201.3", 0),
        ("query", "201.3", 0),
        ("output-head", "1.57", 8),
        ("value-element", "25.2", 0),
        ("key", "25.2", 0),
        ("value-head", "0.2", 15),
        ("dense", "100.7", 0),
    ],
)
def test_gate_counts_of_the_15b_model(gate, millions, filled):
    """24 layers of 2048 with 32 query and 4 KV heads of 128; ``filled`` rows to 16 a KV head."""
    own = counted(f"gated/15b-{gate}").mechanisms
    assert as_printed(own["gate"], f"{millions}M")[0] == f"{millions}M"
    assert own.get("filling", 0) == 24 * 4 * filled * 2048
