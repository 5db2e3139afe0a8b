"""Train pretrained models with a learning rate of zero, and convert them back."""

import re
import shlex
from copy import deepcopy

import pytest

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.sources import open_source
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, assert_same_tensors, make_bfloat16
from tests.training.conftest import MODEL, TRAINING, start

ROWS = 320
TOKENS = 300
RUN = shlex.split("""
--device cpu --micro-batch-size 2 --global-batch-size 4 --lr 0 --min-lr 0 --seq-length 24
--mock-data --split 99,1,0 --eval-iters 0 --eval-interval 100 --num-workers 0 --log-interval 1
--expert-tensor-parallel-size 1 --moe-router-bias-update-rate 0 --save-interval 100
""")
TP2 = ["--sequence-parallel", "--tensor-model-parallel-size", "2"]
TP3 = ["--tensor-model-parallel-size", "3"]
DIVISIBLE_BY_3 = {"intermediate_size": 48, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("name", "imported_for", "layout"),
    [
        ("qwen3_next, sparse", 2, TP2),
        ("qwen3_moe", 2, []),
        pytest.param("llama", 1, TP3, marks=pytest.mark.whole),
        pytest.param("glm4_moe", 2, TP2, marks=pytest.mark.whole),
    ],
)
def test_the_base_comes_back_bit_for_bit(tmp_path, name, imported_for, layout):
    """In bfloat16, with rows in the embedding that the tokenizer does not have."""
    config = deepcopy(CONFIGS[name])
    config.update({"vocab_size": ROWS})
    if layout is TP3:
        config.update(DIVISIBLE_BY_3)
    base = make_bfloat16(config)
    base.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base", TOKENS)
    planned = to_megatron.plan_import(tmp_path / "base", tensor_parallel=imported_for)
    arguments = planned.write(tmp_path / "start").arguments
    folder = tmp_path / "run"
    folder.mkdir()
    words = [*RUN, *arguments, *layout, "--tokenizer-type", "HuggingFaceTokenizer"]
    words += ["--tokenizer-model", str(tmp_path / "start" / "tokenizer")]
    words += ["--kha-preset", "baseline", "--load", str(folder), "--save", str(folder)]
    without_vocabulary = re.sub(r" --vocab-size \d+", "", " ".join(words))
    resume = [*without_vocabulary.split(), "--override-opt-param-scheduler"]
    ranks = int(layout[-1]) if layout else 1
    for command, iterations in ((words, "2"), (resume, "3")):
        run = start([*command, "--train-iters", iterations], ranks)
        assert run.codes == [0] * ranks, run.output[-4000:]
    for trained in (folder / "iter_0000002", folder / "iter_0000003"):
        target = tmp_path / trained.name
        plan = to_hf.plan_export(trained, architecture=config.model_type)
        written = plan.write(target)
        assert written.dtype == "bfloat16"
        assert_same_tensors(tmp_path / "base", target)


def test_padding_is_removed_after_a_change_of_layout(corpus, tmp_path):
    """512 rows are the padding of 300 tokens on two ranks, but not on one."""
    folder = tmp_path / "run"
    words = ["--device", "cpu", *MODEL, *TRAINING, *corpus, "--kha-preset", "kha_linear"]
    words += ["--load", str(folder), "--save", str(folder)]
    first = start([*words, *TP2, "--exit-interval", "1"], 2)
    second = start([*words, "--use-checkpoint-args", "--exit-interval", "2"])
    assert first.codes + second.codes == [0, 0, 0], first.output[-2000:] + second.output[-4000:]
    for trained in ("iter_0000001", "iter_0000002"):
        source = open_source(folder / trained)
        assert source.model.padded_vocab_size == 512
        assert to_hf.plan_export(folder / trained).config.vocab_size == TOKENS


def test_norms_must_be_stored_alike(corpus, tmp_path):
    make_bfloat16(CONFIGS["qwen3_next"]).save_pretrained(tmp_path / "base")
    planned = to_megatron.plan_import(tmp_path / "base")
    arguments = planned.write(tmp_path / "start").arguments
    assert "--apply-layernorm-1p" in arguments
    arguments.remove("--apply-layernorm-1p")
    words = [*RUN, *corpus, *arguments, "--kha-preset", "baseline", "--train-iters", "1"]
    run = start(words)
    assert run.codes == [2], run.output[-4000:]
    error = run.errors[0]
    assert "was trained with --apply-layernorm-1p" in error
    assert "Add this flag" in error
