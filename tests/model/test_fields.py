"""The table of names against those who own them: Megatron's parser and its TransformerConfig."""

import dataclasses

import pytest

from kha_megatron.conversion.architecture import Architecture
from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import rows
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.model import Model, pattern_of
from kha_megatron.model.rules import check_arguments
from kha_megatron.model.run import TABLE, Run, parse_arguments
from kha_megatron.recipes import RECIPES, get_recipe

WITHOUT = {"num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"}
WITHOUT |= {"ffn_hidden_size", "seq_length", "micro_batch_size"}
"""What a model or a batch cannot do without: the table has no default for them."""


def check_layout(run, ranks):
    check_arguments(run.arguments, ranks, run.kha)


def _actions():
    """What Megatron's own parser, with our arguments, makes of each flag."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from kha_megatron.training.arguments import add_kha_arguments

    parser = add_kha_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    return {
        flag: (action.dest, action.default, action.nargs == 0, action.const)
        for action in parser._actions
        for flag in action.option_strings
    }


def _parsed(commands):
    """The arguments of whole command lines, by name, as plain values."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from kha_megatron.training.arguments import add_kha_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_kha_arguments(add_megatron_arguments(parser))
    return [vars(parser.parse_args(words)) for words in commands]


def test_table_agrees_with_megatrons_parser(ranks):
    """Flag, argument, default and whether it stands alone, as the parser itself has them."""
    actions = ranks(_actions, 1)[0]
    assert len({row.argument for row in TABLE}) == len({row.flag for row in TABLE}) == len(TABLE)
    for row in {*TABLE, *rows(Architecture)}:
        argument, default, alone, const = actions[row.flag]
        assert row.argument == argument, row.flag
        if row.field not in WITHOUT:
            assert row.default in (row.typed(default), (default,)), row.flag
        assert alone == (row.kind is bool), row.flag
        assert not alone or const == (not row.default), row.flag


def test_every_attribute_is_transformer_configs(ranks):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert {row.attribute for row in TABLE} - names == {None}


def test_every_recipe_is_parsed_to_the_values_it_holds(ranks):
    """Its command line through Megatron's parser, and through the table, are the same values."""
    runs = [recipe.run for recipe in RECIPES.values()]
    for run, parsed in zip(runs, ranks(_parsed, 1, [r.words() for r in runs])[0], strict=True):
        for name, value in run.arguments.items():
            found = parsed[name]
            assert (tuple(found) if isinstance(found, list) else found) == value, name
        assert {n: one.value for n, one in parse_arguments(run.words()).items()} == run.arguments
        ours, theirs = (Model.of(values) for values in (run.arguments, parsed))
        if run.training.device == "cuda":  # the CPU's entry point adds its own flags
            assert ours == theirs
        assert run.layout(8) == Layout.of(parsed, 8)
        assert run.batch == Batch.of(parsed)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--num-layers two", "--num-layers two: give a whole number from 1 up"),
        ("--num-layers 0", "--num-layers 0: give a whole number from 1 up"),
        (f"--num-layers {9**20}", "give a whole number from 1 up to 4096"),
        ("--moe-layer-freq [1]*99999999999", "lists of 0 and 1"),
        ("--pipeline-model-parallel-layout Et*99999999999L", "repeat t at most 4096 times"),
        ("--lr fast", "--lr fast: give a number"),
        ("--lr 1 2", "--lr takes one value, not 2"),
        ("--swiglu yes", "--swiglu stands alone: remove yes"),
        ("--moe-layer-freq [0]*3+[2]", "--moe-layer-freq .* lists of 0 and 1"),
        ("--pipeline-model-parallel-layout Etx", "--pipeline-model-parallel-layout Etx: .* x"),
    ],
)
def test_words_are_typed_or_refused_by_name(words, error):
    with pytest.raises(ConfigError, match=error):
        parse_arguments(words.split())


@pytest.mark.parametrize("text", ["1", "3", "[0]*1+[1]*3", "([1]*3+[0]*2)*2", "[0,1,1]"])
def test_patterns_are_megatrons_and_come_back(text, ranks):
    row = next(row for row in TABLE if row.field == "moe_layer_freq")
    value = pattern_of(text)
    assert pattern_of(row.writes(value)) == value
    theirs = ranks(_parsed, 1, [["--moe-layer-freq", text]])[0][0]["moe_layer_freq"]
    assert (theirs if isinstance(theirs, int) else tuple(theirs)) == value


def test_a_smallest_rate_keeps_its_share():
    run = get_recipe("quickstart").run
    assert run.updated(["--lr", "4e-4"]).training.min_lr == pytest.approx(4e-5)
    assert run.updated(["--lr", "4e-4"]).words().count("--min-lr") == 1
    assert run.updated(["--lr", "4e-4", "--min-lr", "1e-6"]).training.min_lr == 1e-6
    assert run.updated(lr=1e-2).training.min_lr == pytest.approx(1e-3)
    assert Run.of(lr=1e-3).updated(["--lr", "1"]).words() == ["--lr", "1"]


def test_a_warm_up_keeps_its_share():
    run = Run.of(train_iters=20000, lr_warmup_iters=2000)
    assert run.updated(["--train-iters", "35"]).training.lr_warmup_iters == 3
    assert run.updated(["--train-iters", "35", "--lr-warmup-iters", "9"]).flags == {
        "--train-iters": ("35",),
        "--lr-warmup-iters": ("9",),
    }


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("--multi-latent-attention", {"--group-query-attention", "--num-query-groups"}),
        ("--fp16", {"--bf16"}),
        ("--use-torch-fsdp2", {"--use-distributed-optimizer", "--overlap-param-gather"}),
        ("--train-samples 9", {"--train-iters"}),
        ("--train-samples 9 --train-iters 3", set()),
        ("--tensor-model-parallel-size 2", set()),
    ],
)
def test_what_a_users_words_exclude_of_a_recipe_is_left_out(words, gone):
    run = get_recipe("dense-0.6b").run
    new = run.updated(words.split())
    assert run.flags.keys() - new.flags.keys() == gone
    assert {text.partition(":")[0] for text in new.dropped} == gone
