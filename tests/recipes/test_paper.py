"""Parameter counts of the papers' models, by formula and as built by Megatron."""

import os
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kha_megatron.plan.counts import count_model, format_like_paper
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import GATED, INTERACTIVE, LONG_CONTEXT, MOH
from kha_megatron.recipes.paper import PAPER
from kha_megatron.recipes.tables import ABLATION, TABLES

NAMES = [recipe.name for recipe in PAPER]


MODEL_FLAGS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--num-query-groups")
MODEL_FLAGS += ("--multi-latent-attention",)


def _different():
    """Return the names of one recipe for each model that Megatron builds differently."""
    seen = {}
    for recipe in (*TABLES, *ABLATION, *INTERACTIVE, *MOH, *GATED):
        sizes = [recipe.run.flags.get(flag) for flag in MODEL_FLAGS]
        seen.setdefault((*sizes, recipe.run.kha), recipe.name)
    return [*NAMES, *seen.values()]


DIFFERENT = _different()
QUICK = {"table3/mla-linear"}


class OnMeta(TorchFunctionMode):
    """Create all tensors on the meta device: these models do not fit in memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "meta"} if "device" in kwargs else {}))


def built_count(words, vocab_size):
    """Return the parameters of the model that Megatron builds from a recipe's arguments."""
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
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.whole) for n in DIFFERENT],
)
def test_megatron_parses_the_arguments_and_builds_the_counted_model(name, ranks):
    recipe = get_recipe(name)
    words = recipe.run_for(["--device", "cpu", "--tensor-model-parallel-size", "1"]).words()
    built, kha = ranks(built_count, 1, words, recipe.run.vocab_size, timeout=500)[0]
    assert built == count_model(recipe.run.model).total
    assert kha == str(recipe.run.kha)


def counted(name):
    run = get_recipe(name).run
    return count_model(run.model)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gated/1.7b-28-baseline", "1.720B", "1.720B"),
        ("gated/1.7b-48-baseline", "1.706B", "1.706B"),
        ("gated/15b-baseline", "15.577B", "1.99B"),
        ("moh/table4-b-75", "881.543M", "881.543M"),
        ("moh/table4-b-200b-baseline", "881M", "881M"),
        ("moh/table4-b-200b-50", "882M", "882M"),
        ("ablation/random-mlp", "6.6B", "881M"),
    ],
)
def test_counts_of_other_papers(name, total, active):
    counts = counted(name)
    assert format_like_paper(counts.total, total)[0] == total
    assert format_like_paper(counts.active, active)[0] == active


def test_a_router_by_norms_has_no_parameters():
    assert counted("moh/llama3-8b-stage2").kha == 0


@pytest.mark.parametrize(
    ("gate", "millions", "filled"),
    [
        ("output-element", "201.3", 0),
        ("query", "201.3", 0),
        ("output-head", "1.57", 8),
        ("output-shared", "6.3", 0),
        ("output-silu", "201.3", 0),
        ("output-add", "201.3", 0),
        ("value-element", "25.2", 0),
        ("key", "25.2", 0),
        ("value-head", "0.2", 15),
        ("dense", "100.7", 0),
    ],
)
def test_gate_counts_of_the_15b_model(gate, millions, filled):
    """``filled`` rows pad each of 4 KV heads to 16 rows, in 24 layers of width 2048."""
    own = counted(f"gated/15b-{gate}").mechanisms
    assert format_like_paper(own["gate"], f"{millions}M")[0] == f"{millions}M"
    assert own.get("filling", 0) == 24 * 4 * filled * 2048


@pytest.mark.parametrize("recipe", LONG_CONTEXT, ids=lambda recipe: recipe.name)
def test_longer_sequences_do_not_change_the_model(recipe):
    name = recipe.name.rpartition("-")[0]
    assert counted(recipe.name) == counted(name)
    long = recipe.run.arguments
    short = get_recipe(name).run.arguments
    steps = long["global_batch_size"] * long["seq_length"]
    assert steps == short["global_batch_size"] * short["seq_length"]
    assert (long["train_iters"] - 1) * steps < 80e9 <= long["train_iters"] * steps
    assert long["lr"] == long["min_lr"] == short["min_lr"]
    assert long["max_position_embeddings"] == long["seq_length"]
