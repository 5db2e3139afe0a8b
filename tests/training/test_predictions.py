"""Test saving and resuming with multi-token prediction and two pipeline stages.

The last stage then has a copy of the embedding, which Megatron does not handle in all cases.
"""

import shlex

import pytest

from tests.training.conftest import MODEL, TRAINING, losses, start
from tests.training.test_resume import assert_same_bytes

RUN = shlex.split("""
--device cpu --kha-preset kha_mlp --mtp-num-layers 1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 51 --train-iters 4 --save-interval 2
""")
STAGES = ["--pipeline-model-parallel-size", "2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
UNTIED = ["--untie-embeddings-and-output-weights"]
GPT_MODEL = ["--gpt-model", "--kha-preset", "baseline"]
VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]


def train(words, folder, ranks, load=()):
    words = [*MODEL, *TRAINING, *RUN, *words, *load, "--save", str(folder)]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    run = start(words, ranks)
    assert set(run.codes) == {0}, run.output[-4000:]
    return losses(folder / "tensorboard")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(DISTRIBUTED, id="tied, distributed optimizer"),
        pytest.param([*DISTRIBUTED, *UNTIED], marks=pytest.mark.whole, id="distributed optimizer"),
        pytest.param([*DISTRIBUTED, *VIRTUAL], marks=pytest.mark.whole, id="virtual stages"),
        pytest.param([*DISTRIBUTED, *GPT_MODEL], marks=pytest.mark.whole, id="GPTModel"),
    ],
)
def test_two_stages_resume_bit_for_bit(words, tmp_path):
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    train([*STAGES, *words], uninterrupted, 2)
    load = ["--load", str(uninterrupted), "--ckpt-step", "2"]
    train([*STAGES, *words], resumed, 2, load)
    assert_same_bytes(uninterrupted / "iter_0000004", resumed / "iter_0000004")


def test_one_stage_continues_a_run_of_two_with_the_same_losses(tmp_path):
    """The first step is the same only if the model is. The second one also needs its gradients.

    ``--kha-perturb-embedding`` must change both copies of the embedding alike.
    """
    words = ["--kha-perturb-embedding", "1e-2"]
    expected = train([*STAGES, *words], tmp_path / "two", 2)
    load = ["--load", str(tmp_path / "two"), "--ckpt-step", "2"]
    continued = train(words, tmp_path / "one", 1, load)
    assert continued == {n: pytest.approx(expected[n], rel=1e-6) for n in (3, 4)}
