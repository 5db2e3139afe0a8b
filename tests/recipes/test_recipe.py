"""Recipes are data that Megatron's own parser accepts, and that callers can override."""

import json
import os
import subprocess
import sys

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.model.words import parse
from kha_megatron.recipes import get_recipe, prepare

QUICKSTART = get_recipe("quickstart")

_PARSE = """
import json, sys
from kha_megatron.training.arguments import add_kha_arguments, choose_device
choose_device(sys.argv)
from megatron.training.arguments import parse_and_validate_args
args = parse_and_validate_args(add_kha_arguments)
names = {"sequence_parallel", "num_query_groups", "add_bias_linear", "kha_preset", "world_size",
         "untie_embeddings_and_output_weights", "params_dtype", "moe_router_load_balancing_type",
         "data_parallel_size", "lr", "data_path", "load"}
print("ARGS", json.dumps({name: getattr(args, name) for name in names}, default=str))
"""


def test_megatron_accepts_the_recipe(data):
    """Its own parser and its own validation, in a process that claims to be rank 0 of a run.

    The paper's recipes are validated in ``test_paper.py``, where their models are built.
    """
    recipe = QUICKSTART
    # Megatron's validation loads a tokenizer; this one needs no files
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "4095", "--lr=-1", "--lr", "9e-4"]
    job = prepare(recipe, data=data, overrides=words)
    words = job.command[job.command.index(recipe.entry) + 1 :]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(job.ranks)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PARSE, *words],
        env={**os.environ, **environment, **job.environment, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    args = json.loads(done.stdout.partition("ARGS ")[2].splitlines()[0])
    assert args["kha_preset"] == "kha_mlp"
    assert args["world_size"] == recipe.ranks
    assert args["lr"] == 9e-4
    assert args["data_path"] == [str(data / "corpus")]
    assert args["load"] is None
    assert args["sequence_parallel"]
    assert args["num_query_groups"] == QUICKSTART.run.model.num_query_groups
    assert not args["add_bias_linear"]
    assert not args["untie_embeddings_and_output_weights"]
    assert args["params_dtype"] == "torch.float32"
    assert args["moe_router_load_balancing_type"] == "none"
    assert args["data_parallel_size"] == 1


def test_a_recipes_own_sequence_parallelism_goes_with_its_tensor_parallelism():
    one = ["--tensor-model-parallel-size", "1"]
    assert "--sequence-parallel" in QUICKSTART.run.flags
    assert "--sequence-parallel" not in QUICKSTART.run_for(one).flags
    asked = QUICKSTART.run_for([*one, "--sequence-parallel"]).flags
    assert "--sequence-parallel" in asked  # the caller's own is refused by name later


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
    with pytest.raises(ConfigError, match="unknown KHA preset"):
        assert QUICKSTART.run.updated(kha_preset="kha").kha


def test_unknown_recipe():
    with pytest.raises(ConfigError, match="unknown recipe 'quikstart': did you mean quickstart"):
        get_recipe("quikstart")
