"""Illegal layouts on the command line: refused before Megatron validates, and by real processes.

The rules themselves are in ``tests/model/test_rules.py``; here, that each of Megatron's arguments
is read the way Megatron reads it.
"""

import os
import sys

import pytest

from kha_megatron.errors import ConfigError
from tests.training.conftest import EXPERTS, MODEL, TRAINING, start

pytestmark = pytest.mark.usefixtures("training_package")

MOCK = ["--mock-data", "--vocab-size", "90", "--kha-preset", "kha_mlp"]


def _checked(lines):
    """For each world size and command line, None or the text that refuses it."""
    from megatron.training.arguments import parse_args

    from kha_megatron.training.arguments import add_kha_arguments, check_args

    def one(world, words):
        sys.argv = ["training", *MODEL, *TRAINING, *MOCK, *words.split()]
        os.environ["WORLD_SIZE"] = str(world)
        try:
            check_args(parse_args(add_kha_arguments))
        except ConfigError as error:
            return str(error)

    before = sys.argv, os.environ["WORLD_SIZE"]
    try:
        return [one(world, words) for world, words in lines]
    finally:
        sys.argv, os.environ["WORLD_SIZE"] = before


EXPERT_WORDS = " ".join(EXPERTS)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CUSTOM = "--pipeline-model-parallel-layout"

CASES = [
    (2, f"{TENSOR} 3", "8 query heads cannot be divided over 3"),
    (4, f"{TENSOR} 4 --ffn-hidden-size 50", "--ffn-hidden-size 50 cannot be divided over 4"),
    (4, f"{PIPELINE} 3", "4 layers cannot be divided over 3 pipeline ranks"),
    (2, f"{PIPELINE} 2 --num-layers-per-virtual-pipeline-stage 3", "from [1, 2]"),
    (2, f"{PIPELINE} 2 --num-virtual-stages-per-pipeline-rank 3", "cannot be divided into 3"),
    (
        2,
        f"{PIPELINE} 2 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
        "2 virtual stages on 2 pipeline ranks",
    ),
    (2, f"{PIPELINE} 2 --decoder-first-pipeline-num-layers 4", "0 layers that are left of 4"),
    (2, f"{PIPELINE} 2 {CUSTOM} Ettt|ttL", "has 5 layers, the model 4: write 4 t"),
    (2, f"{PIPELINE} 2 {CUSTOM} Ett|tt|L", "has 3 stages"),
    (2, f"{PIPELINE} 2 {CUSTOM} Exx|L", "Invalid layer character: x"),
    (2, "--sequence-parallel", "remove it, or use --tensor-model-parallel-size 2"),
    (2, f"{EXPERT_WORDS} {TENSOR} 2", "4 experts with --tensor-model-parallel-size 2"),
    (
        3,
        f"{EXPERT_WORDS} --expert-model-parallel-size 3",
        "--num-experts 4 cannot be divided over 3",
    ),
    (2, "--expert-model-parallel-size 2", "on a model without experts"),
    (4, f"{TENSOR} 4 --context-parallel-size 2", "4 ranks cannot be divided by tensor 4"),
    (3, "--context-parallel-size 3", "--seq-length 28 is no multiple of 2 x"),
    (8, f"{TENSOR} 8 --sequence-parallel", "28 tokens"),
    (4, "", "--global-batch-size 6 is no multiple of --micro-batch-size 3 x 4"),
    (1, "--fp8-format hybrid --bf16", "--kv-channels 6 is no multiple of 16"),
    (1, "--flash-decode", "remove --flash-decode"),
]
LEGAL = [
    (1, ""),
    (2, f"{PIPELINE} 2 --num-layers-per-virtual-pipeline-stage 1"),
    (4, f"{PIPELINE} 4 --num-virtual-stages-per-pipeline-rank 1 --micro-batch-size 1"),
    (2, f"{PIPELINE} 2 {CUSTOM} Ettt|tL"),
    (2, f"{PIPELINE} 2 {CUSTOM} Ett|(t|)*2L"),
    (2, f"{PIPELINE} 2 --decoder-last-pipeline-num-layers 1"),
    (2, f"{PIPELINE} 2 --num-layers 3 --account-for-loss-in-pipeline-split"),
    (8, f"{TENSOR} 8"),
    (2, "--context-parallel-size 2"),
    (4, f"{EXPERT_WORDS} {TENSOR} 2 --sequence-parallel"),
    (2, f"{EXPERT_WORDS} --moe-layer-freq ([0]*1+[1]*3)"),
    (4, "--decrease-batch-size-if-needed"),
    (2, "--use-checkpoint-args --ffn-hidden-size 3"),
]


def test_each_argument_is_read(ranks):
    answers = ranks(_checked, 1, [(world, words) for world, words, _ in CASES])[0]
    for (_, words, expected), answer in zip(CASES, answers, strict=True):
        assert answer is not None, words
        assert expected in answer, words
        assert "\n" not in answer


def test_what_megatron_runs_is_let_through(ranks):
    answers = ranks(_checked, 1, LEGAL)[0]
    assert not [(line, a) for line, a in zip(LEGAL, answers, strict=True) if a is not None]


def test_real_processes_refuse_an_illegal_layout_with_code_2_and_one_line():
    words = ["--pipeline-model-parallel-size", "3"]
    run = start(["--device", "cpu", *MODEL, *TRAINING, *MOCK, *words], 1)
    assert run.codes == [2]
    assert run.errors == [
        "error: 4 layers cannot be divided over 3 pipeline ranks: use "
        "--pipeline-model-parallel-size 2 or 4, or --num-layers 3 or 6"
    ]
    assert "Traceback" not in run.output
