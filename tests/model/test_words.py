"""Megatron's command line as data: nothing lost, nothing twice, argparse reads back the same."""

import argparse

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.model.words import parse, render


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--lr 1e-3", {"--lr": ("1e-3",)}),
        ("--lr=1e-3", {"--lr": ("1e-3",)}),
        ("--swiglu --swiglu", {"--swiglu": ()}),
        ("--lr 1 --seed 7 --lr 2", {"--lr": ("2",), "--seed": ("7",)}),
        ("--lr 1 --lr=2", {"--lr": ("2",)}),
        ("--data-path 0.5 a 0.5 b --bf16", {"--data-path": ("0.5", "a", "0.5", "b"), "--bf16": ()}),
        ("--x -1 -0.5 -1e-3", {"--x": ("-1", "-0.5", "-1e-3")}),
        ("--x=", {"--x": ("",)}),
        ("--x=--y=z", {"--x": ("--y=z",)}),
        ("--x a=b", {"--x": ("a=b",)}),
        ("--x - --1", {"--x": ("-", "--1")}),
    ],
)
def test_parse(words, expected):
    assert parse(words.split()) == expected


@pytest.mark.parametrize("words", ["7", "-x", "lr 3", "--lr=1 2", "-1 --lr 3"])
def test_a_word_without_a_flag_is_refused(words):
    with pytest.raises(ConfigError, match="unexpected argument"):
        parse(words.split())


@pytest.mark.parametrize(
    ("own", "extra", "merged"),
    [
        ("--lr 1 --seed 7", "--lr 2", "--lr 2 --seed 7"),
        ("--lr 1", "--lr=-1e-3", "--lr=-1e-3"),
        ("--swiglu --lr 1", "--swiglu", "--swiglu --lr 1"),
        ("--data-path a --lr 1", "--data-path 0.5 x 0.5 y", "--data-path 0.5 x 0.5 y --lr 1"),
        ("--data-path 0.5 x 0.5 y", "--data-path a", "--data-path a"),
        ("--lr 1", "--min-lr 0", "--lr 1 --min-lr 0"),
        ("--split 99,1,0", "--split=", "--split="),
    ],
)
def test_the_later_flag_replaces_the_earlier_in_its_place(own, extra, merged):
    assert render(parse(own.split()) | parse(extra.split())) == merged.split()


@pytest.mark.parametrize("value", ["-1e-3", "-3", "", "--seed", "a b", "=", "-", "([0]*1+[1]*3)"])
def test_argparse_reads_every_value_back(value):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--x")
    parser.add_argument("--seed")
    assert parser.parse_args(render({"--x": (value,), "--seed": ("7",)})).x == value


def test_heads_may_be_said_as_often_as_there_are_settings():
    words = ["--heads", "knock.value=mlp", "--lr", "1", "--heads=knock.key=gate"]
    assert parse(words)["--heads"] == ("knock.value=mlp", "knock.key=gate")
    assert parse(render(parse(words))) == parse(words)
