"""Test the table of arguments against Megatron's parser and TransformerConfig."""

import argparse
import dataclasses

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.model.config import ModelConfig, parse_layer_frequency
from kha_megatron.model.fields import declared_fields
from kha_megatron.model.layout import Batch, Layout
from kha_megatron.model.megatron import model_from_arguments
from kha_megatron.model.run import TABLE, Run, parse, parse_arguments, render
from kha_megatron.recipes import RECIPES, get_recipe

REQUIRED = {"num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"}
REQUIRED |= {"ffn_hidden_size", "seq_length", "micro_batch_size"}
"""Fields without a default in the table."""


def _parser():
    from megatron.training.arguments import add_megatron_arguments

    from kha_megatron.training.arguments import add_kha_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_kha_arguments(add_megatron_arguments(parser))


def _actions():
    """Return argument, default, whether it takes no value, and constant of each flag."""
    return {
        flag: (action.dest, action.default, action.nargs == 0, action.const)
        for action in _parser()._actions
        for flag in action.option_strings
    }


def _parsed(commands):
    parser = _parser()
    return [vars(parser.parse_args(words)) for words in commands]


@pytest.mark.fast
def test_table_agrees_with_megatrons_parser(ranks):
    actions = ranks(_actions, 1)[0]
    assert len({field.argument for field in TABLE}) == len(TABLE)
    assert len({field.flag for field in TABLE}) == len(TABLE)
    for field in {*TABLE, *declared_fields(ModelConfig)}:
        argument, default, alone, const = actions[field.flag]
        assert field.argument == argument, field.flag
        if field.name not in REQUIRED:
            assert field.default in (field.convert(default), (default,)), field.flag
        assert alone == (field.value_type is bool), field.flag
        assert not alone or const == (not field.default), field.flag


def test_every_attribute_is_one_of_transformer_config():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert {field.attribute for field in TABLE} - names == {None}


def test_megatron_parses_every_recipe_to_its_own_values(ranks):
    runs = [recipe.run for recipe in RECIPES.values()]
    commands = [run.words() for run in runs]
    (parsed_commands,) = ranks(_parsed, 1, commands)
    for run, parsed in zip(runs, parsed_commands, strict=True):
        for name, value in run.arguments.items():
            if name.startswith("--"):  # a flag that only Megatron knows
                argument = name.removeprefix("--").replace("-", "_")
                expected = type(parsed[argument])(*value) if value else True
                assert parsed[argument] == expected, name
                continue
            parsed_value = parsed[name]
            if isinstance(parsed_value, list):
                parsed_value = tuple(parsed_value)
            assert parsed_value == value, name
        arguments = parse_arguments(run.words())
        values = {name: argument.value for name, argument in arguments.items()}
        assert values == run.arguments
        if run.training.device == "cuda":  # the CPU's entry point adds its own flags
            assert model_from_arguments(run.arguments) == model_from_arguments(parsed)
        assert run.layout(8) == Layout.from_arguments(parsed, 8)
        assert run.batch == Batch.from_arguments(parsed)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--num-layers two", "--num-layers must be an integer, got two"),
        ("--num-layers 0", "an integer between 1 and 4096"),
        (f"--num-layers {9**20}", "an integer between 1 and 4096"),
        (f"--num-layers {'9' * 5000}", "--num-layers must be an integer"),
        ("--moe-layer-freq [1]*99999999999", "lists of 0 and 1"),
        ("--moe-layer-freq [0]*3+[2]", "lists of 0 and 1"),
        ("--moe-layer-freq __import__('os')", "a positive integer or lists"),
        ("--pipeline-model-parallel-layout Et*99999999999L", "at most 4096 repetitions"),
        ("--pipeline-model-parallel-layout Etx", "E .embedding., .* got Etx"),
        ("--lr fast", "--lr must be a number, got fast"),
        ("--lr 1 2", "--lr takes 1 value, got '1 2'"),
        ("--swiglu yes", "--swiglu takes no value, got 'yes'"),
        *((words, "Unexpected argument") for words in ("7", "-x", "lr 3", "--lr=1 2")),
    ],
)
def test_malformed_arguments_are_refused(words, error):
    with pytest.raises(ConfigError, match=error):
        parse_arguments(words.split())


@pytest.mark.parametrize("text", ["1", "3", "[0]*1+[1]*3", "([1]*3+[0]*2)*2", "[0,1,1]"])
def test_layer_patterns_are_parsed_as_by_megatron(text, ranks):
    field = next(field for field in TABLE if field.name == "moe_layer_freq")
    value = parse_layer_frequency(text)
    assert parse_layer_frequency(field.formatter(value)) == value
    theirs = ranks(_parsed, 1, [["--moe-layer-freq", text]])[0][0]["moe_layer_freq"]
    assert (theirs if isinstance(theirs, int) else tuple(theirs)) == value


def test_minimum_rate_and_warm_up_keep_their_ratio():
    run = get_recipe("quickstart").run
    assert run.updated(["--lr", "4e-4"]).training.min_lr == pytest.approx(4e-5)
    assert run.updated(["--lr", "4e-4"]).words().count("--min-lr") == 1
    assert run.updated(["--lr", "4e-4", "--min-lr", "1e-6"]).training.min_lr == 1e-6
    assert run.updated(lr=1e-2).training.min_lr == pytest.approx(1e-3)
    assert Run.from_values(lr=1e-3).updated(["--lr", "1"]).words() == ["--lr", "1"]
    run = Run.from_values(train_iters=20000, lr_warmup_iters=2000)
    assert run.updated(["--train-iters", "35"]).training.lr_warmup_iters == 3
    given = ["--train-iters", "35", "--lr-warmup-iters", "9"]
    assert run.updated(given).words() == given


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("--multi-latent-attention", {"--group-query-attention", "--num-query-groups"}),
        ("--fp16", {"--bf16", "--cross-entropy-loss-fusion"}),
        ("--use-torch-fsdp2", {"--use-distributed-optimizer", "--overlap-param-gather"}),
        ("--train-samples 9", {"--train-iters"}),
        ("--train-samples 9 --train-iters 3", set()),
        ("--tensor-model-parallel-size 2", set()),
    ],
)
def test_excluded_arguments_of_a_recipe_are_dropped(words, gone):
    run = get_recipe("dense-0.6b").run
    new = run.updated(words.split())
    assert run.flags.keys() - new.flags.keys() == gone
    assert {text.partition(":")[0] for text in new.dropped} == gone


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--lr 1e-3", {"--lr": ("1e-3",)}),
        ("--lr=1e-3", {"--lr": ("1e-3",)}),
        ("--lr 1 --seed 7 --lr 2", {"--lr": ("2",), "--seed": ("7",)}),
        ("--data-path 0.5 a 0.5 b --bf16", {"--data-path": ("0.5", "a", "0.5", "b"), "--bf16": ()}),
        ("--x -1 -0.5 -1e-3", {"--x": ("-1", "-0.5", "-1e-3")}),
        ("--x=", {"--x": ("",)}),
        ("--x=--y=z", {"--x": ("--y=z",)}),
        ("--x a=b", {"--x": ("a=b",)}),
        ("--x - --1", {"--x": ("-", "--1")}),
        ("--heads a=1 --lr 1 --heads=b=2", {"--heads": ("a=1", "b=2"), "--lr": ("1",)}),
    ],
)
def test_parse(words, expected):
    assert parse(words.split()) == parse(render(expected)) == expected
