"""Test that a run of a GPTModel continues as a HybridModel."""

import shlex

import pytest

from tests.training.conftest import MODEL, TRAINING, losses, start

RUN = shlex.split("""
--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 51 --train-iters 4
--kha-preset kha_linear --multi-latent-attention --rope-type rope --q-lora-rank 20
--kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 10
""")
NOT_LATENT = ("--group-query-attention", "--num-query-groups", "2")
LAYERS = ("--num-layers", "4")
STAGES = ["--pipeline-model-parallel-size", "2"]
EXPERTS = shlex.split("""
--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type none
--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
""")


def train(folder, words, ranks=1, without=()):
    model = [word for word in MODEL if word not in (*NOT_LATENT, *without)]
    saved = ["--save", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
    run = start([*model, *TRAINING, *RUN, *words, *saved], ranks)
    assert set(run.codes) == {0}, run.output[-4000:]
    return losses(folder / "tensorboard")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--kha-attention", "gla"], id="gla"),
        pytest.param(EXPERTS, marks=pytest.mark.whole, id="mla, experts, distributed optimizer"),
    ],
)
def test_latent_attention_continues_in_two_stages_and_then_in_one(words, tmp_path):
    """The last run reads the layers from a checkpoint whose pattern is split into two stages."""
    gpt = tmp_path / "gpt"
    stages = tmp_path / "stages"
    one = tmp_path / "one"
    expected = train(gpt, [*words, "--gpt-model", "--save-interval", "2"])
    load = ["--load", str(gpt), "--ckpt-step", "2", "--exit-interval", "3"]
    found = train(stages, [*words, *STAGES, *load], 2)
    found |= train(one, [*words, "--load", str(stages), "--use-checkpoint-args"], without=LAYERS)
    assert found == {n: pytest.approx(expected[n], rel=1e-6) for n in (3, 4)}
