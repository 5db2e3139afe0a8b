"""Train the whole command line of recipes, at a small width, on two tensor-parallel ranks."""

import re

import pytest

from kha_megatron.recipes import get_recipe
from tests.recipes.test_paper import DIFFERENT
from tests.training.conftest import start

SMALL = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "48",
    "--kv-channels": "8",
    "--seq-length": "28",
    "--max-position-embeddings": "28",
    "--global-batch-size": "4",
    "--train-iters": "3",
    "--log-interval": "1",
    "--vocab-size": "90",
    "--device": "cpu",
    "--tensor-model-parallel-size": "2",
}
EXPERTS = {
    "--num-experts": "8",
    "--moe-ffn-hidden-size": "24",
    "--expert-model-parallel-size": "1",
    "--expert-tensor-parallel-size": "1",
}
LATENT = {
    "--q-lora-rank": "24",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "4",
    "--v-head-dim": "6",
}
WHOLE = {"--pipeline-model-parallel-size": "1"}
QUICK = ("table3/gta-mlp",)
EVERY = [name for name in DIFFERENT if "1.7b-48" not in name]  # small, those of 28 layers


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.whole) for n in EVERY if n not in QUICK)],
)
def test_three_steps(name):
    recipe = get_recipe(name)
    small = SMALL | (EXPERTS if "--num-experts" in recipe.run.flags else {})
    small |= LATENT if "--multi-latent-attention" in recipe.run.flags else {}
    small |= WHOLE if "--pipeline-model-parallel-size" in recipe.run.flags else {}
    words = [word for item in small.items() for word in item]
    run = start(recipe.run_for([*words, "--sequence-parallel", "--mock-data"]).words(), ranks=2)
    assert run.codes == [0, 0], run.output[-3000:]
    losses = [float(x) for x in re.findall(r"lm loss: (\S+) \|", run.output)]
    assert len(losses) == 3
    assert 5.4 < losses[0] < 5.7  # 90 entries are padded to 256: log 256 = 5.55 at first
    assert re.search(r"iteration +3/ +3 ", run.output)
    assert ("in 2 of 2 layers" in run.knocks) == bool(recipe.run.kha.mechanisms)
