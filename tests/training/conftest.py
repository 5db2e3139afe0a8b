"""Runs of the training entry point, and their data."""

import shlex
from pathlib import Path

import pytest

from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from tests.conversion.checkpoints import save_gpt
from tests.entry import run as start  # noqa: F401

LAYERS = 4
HEAD_DIM = 6

MODEL = shlex.split(f"""
--num-layers {LAYERS} --hidden-size 40 --ffn-hidden-size 48 --num-attention-heads 8
--group-query-attention --num-query-groups 2 --kv-channels {HEAD_DIM} --qk-layernorm
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --seq-length 28 --max-position-embeddings 28
""")

TRAINING = shlex.split("""
--micro-batch-size 3 --global-batch-size 6 --train-iters 8 --lr 1e-2 --lr-decay-style cosine
--clip-grad 1 --seed 7 --split 99,1,0 --num-workers 0 --eval-interval 1000 --eval-iters 0
--log-interval 1 --tensorboard-log-interval 1 --ckpt-format torch_dist --save-interval 1000
""")

EXPERTS = shlex.split("""
--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-load-balancing-type none
--expert-model-parallel-size 2 --expert-tensor-parallel-size 1
""")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return TensorBoard's scalars: tag to iteration to value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each iteration, exactly as it was written."""
    return scalars(folder)["lm loss"]


@pytest.fixture(scope="session")
def saved(ranks, tmp_path_factory) -> Path:
    """Return a directory with checkpoints of plain Megatron, the baseline preset and KHA-MLP.

    The last one also records ``kha_fold``, as checkpoints of earlier versions do.
    """
    folder = tmp_path_factory.mktemp("saved")
    earlier = {"kha_fold": "always"}
    for name, kha, recorded in (
        ("plain", None, {}),
        ("baseline", HeadsConfig(), {}),
        ("kha", HeadsConfig(Knock(value="mlp")), earlier),
    ):
        ranks(save_gpt, 1, str(folder / name), kha, {}, {"num_layers": 2}, recorded)
    return folder


def _prepare(out: str) -> None:
    from torch import nn  # as pinned: with our own source, each edit gave other losses

    from kha_megatron.data import prepare

    source = Path(nn.__file__).parent
    prepare([source], Path(out), vocab_size=300, globs=["*.py"], workers=1)


@pytest.fixture(scope="session")
def corpus(ranks, tmp_path_factory) -> list[str]:
    """Return the arguments of a prepared corpus."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    ranks(_prepare, 1, str(folder))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer"]
    model = ["--tokenizer-model", str(folder / "tokenizer")]
    return ["--data-path", str(folder / "corpus"), *tokenizer, *model]
