"""Recipes are data, and a user's arguments replace theirs."""

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.run import parse
from kha_megatron.recipes import get_recipe

QUICKSTART = get_recipe("quickstart")


def test_sequence_parallelism_goes_with_tensor_parallelism():
    one = ["--tensor-model-parallel-size", "1"]
    assert "--sequence-parallel" in QUICKSTART.run.flags
    assert "--sequence-parallel" not in QUICKSTART.run_for(one).flags
    asked = QUICKSTART.run_for([*one, "--sequence-parallel"]).flags
    assert "--sequence-parallel" in asked  # refused later, since the user asked for it


def test_overrides_replace_what_the_recipe_says():
    words = QUICKSTART.run_for(
        ["--kha-preset", "kha_linear", "--device=cuda", "--swiglu", "--num-layers", "7"]
    ).words()
    merged = parse(words)
    assert len(merged) == sum(word.startswith("--") for word in words)  # no flag twice
    assert merged["--kha-preset"] == ("kha_linear",)
    assert merged["--device"] == ("cuda",)
    assert merged["--num-layers"] == ("7",)
    assert "--save" not in merged


def test_kha_of_a_recipe():
    assert QUICKSTART.run.kha == KHAConfig(value="mlp")
    changed = QUICKSTART.run.updated(kha_value="none", kha_key="gate", kha_init="random")
    assert changed.kha == KHAConfig(key="gate", init="random")
    assert "--kha-key" in changed.words()


def test_unknown_recipe_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="unknown recipe 'quikstart': did you mean quickstart"):
        get_recipe("quikstart")
