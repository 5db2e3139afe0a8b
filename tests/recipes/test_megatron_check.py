"""Megatron's own parser refuses wrong arguments of a job before it is submitted."""

import json
from pathlib import Path

import pytest

from kha_megatron.recipes import Slurm, get_recipe, prepare_job
from kha_megatron.recipes.gpu import CONNECTIONS, GPU_ENVIRONMENT
from kha_megatron.recipes.other_heads import LONG_CONTEXT
from tests import entry
from tests.recipes.test_paper import DIFFERENT

ACCEPTED = [*DIFFERENT, *(recipe.name for recipe in LONG_CONTEXT)]
WRONG = {
    "--trian-iters 5": "unrecognized arguments: --trian-iters 5",
    "--untied": "unrecognized arguments: --untied",
    "--optimizer nosuch": "argument --optimizer: invalid choice: 'nosuch'",
    "--ckpt-format torch": "--ckpt-format torch is not supported",
    "--hybrid-layer-pattern *Q*-": "'Q' is not a valid layer symbol",
    "--lr-decay-style no": "argument --lr-decay-style: invalid choice",
    "--normalization Foo": "argument --normalization: invalid choice",
    "--tokenizer-type Nope": "argument --tokenizer-type: invalid choice",
    "--recompute-granularity foo": "argument --recompute-granularity: invalid choice",
    "--attention-backend no": "KeyError('no')",
    "--transformer-impl foo": "argument --transformer-impl: invalid choice",
    "--lr-warmup-iters 5": "can only specify one of lr-warmup-fraction and lr-warmup-iters",
    "--min-lr 1": "Megatron requires: ",
    "--save-retain-interval 7": "Megatron requires: args.save_retain_interval % args.save_interval",
    "--spec a b": "--spec is not supported by this entry point",
    "--init-model-with-meta-device": "requires --use-megatron-fsdp",
    "--iterations-to-skip 5 --pipeline-model-parallel-size 4": "supports at most 2 pipeline stages",
    "--squared-relu": "Megatron requires: ",
    "--recompute-granularity full": "recompute_granularity: full so recompute_method must be",
}
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-modules"
OPTIONS = (
    f"{GRAPHS} attn moe_router moe_preprocess",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
)
"""Options of a recipe in the docs that have not been run on a GPU."""
SCRIPT = """
import json, os, sys
from kha_megatron.training.check import find_mistake
os.environ |= {"WORLD_SIZE": "16"} | json.loads(sys.argv[2])
mistakes = [find_mistake(words) for words in json.loads(sys.argv[1])]
print("mistakes:", json.dumps(mistakes), flush=True)
"""


def arguments(recipe: str, *words: str) -> list[str]:
    options = {"output": Path("/runs/one"), "slurm": Slurm(time="01:00:00", nodes=2)}
    job = prepare_job(
        get_recipe(recipe),
        overrides=["--mock-data", *words],
        **options,
    )
    return list(job.command[job.command.index("kha_megatron.training") + 1 :])


@pytest.fixture(scope="module")
def mistakes():
    """Return the errors in the arguments of recipes and in each of WRONG."""
    cases = [arguments(name) for name in ACCEPTED]
    cases += [arguments("dense-0.6b", *words.split()) for words in WRONG]
    cases += [arguments("table2/mlp-v", *words.split()) for words in OPTIONS]
    environment = json.dumps({**GPU_ENVIRONMENT, CONNECTIONS: "1"})
    run = entry.run([json.dumps(cases), environment], program=SCRIPT)
    assert run.codes == [0], run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("mistakes: ")]
    answers = json.loads(line.removeprefix("mistakes: "))
    return dict(zip([*ACCEPTED, *WRONG, *OPTIONS], answers, strict=True))


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(words, mistakes):
    assert WRONG[words] in mistakes[words]


def test_recipes_are_accepted(mistakes):
    assert {mistakes[name] for name in ACCEPTED} == {None}


@pytest.mark.parametrize("words", OPTIONS)
def test_documented_options_are_accepted(words, mistakes):
    assert mistakes[words] is None
    docs = Path(__file__).parents[2] / "docs"
    pages = [docs / "launch.md", docs / "bridge_recipes.md"]
    text = " ".join(" ".join(page.read_text().split()) for page in pages)
    assert words in text.replace("\\ ", "")
