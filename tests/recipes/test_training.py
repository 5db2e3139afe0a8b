"""Train the whole command line of recipes, at a small width, on two tensor-parallel ranks."""

import re

import pytest

from kha_megatron.recipes import get_recipe
from tests.recipes.test_paper import DIFFERENT
from tests.training.conftest import start

SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 48 --kv-channels 8 --seq-length 28 "
    "--max-position-embeddings 28 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--log-interval 1 --vocab-size 90 --device cpu --mock-data --num-workers 0 --eval-iters 0 "
    "--tensor-model-parallel-size 2 --sequence-parallel "
)
MORE = {
    "--num-experts": "--num-experts 8 --moe-ffn-hidden-size 24 --expert-model-parallel-size 1 "
    "--expert-tensor-parallel-size 1 ",
    "--multi-latent-attention": "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 ",
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 1 ",
}
"""Arguments for recipes with a flag."""

# 1.7b-48 equals 1.7b-28 when small
NAMES = ["laptop/mla", *(name for name in DIFFERENT if "1.7b-48" not in name)]


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_three_steps(name):
    recipe = get_recipe(name)
    words = SMALL + "".join(more for flag, more in MORE.items() if flag in recipe.run.flags)
    run = start(recipe.run_for(words.split()).words(), ranks=2)
    assert run.codes == [0, 0], run.output[-3000:]
    losses = [float(x) for x in re.findall(r"lm loss: (\S+) \|", run.output)]
    assert len(losses) == 3
    assert 5.4 < losses[0] < 5.7  # 90 entries are padded to 256, and log 256 = 5.55
    assert re.search(r"iteration +3/ +3 ", run.output)
    assert ("in 2 of 2 layers" in run.knocks) == bool(recipe.run.kha.mechanisms)


@pytest.mark.whole
def test_longer_context_is_evaluated_without_training():
    recipe = get_recipe("gated/1.7b-28-output-element-128k")
    words = f"{SMALL} --context-parallel-size 1 --eval-iters 3 --split 90,5,5"
    run = start(recipe.run_for(words.split()).words(), ranks=2)
    assert run.codes == [0, 0], run.output[-3000:]
    assert not re.search(r"iteration +\d+/", run.output)
    losses = [float(x) for x in re.findall(r"lm loss value: (\S+) \|", run.output)]
    assert len(losses) == 2  # validation and test
    assert all(5.4 < loss < 5.7 for loss in losses)
