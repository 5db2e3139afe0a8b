"""Command lines that Megatron takes, and then hangs over, misreads or dies of."""

import pytest

from kha_megatron.data.prepare import prepare
from tests.faults.jobs import WORDS, arguments, resumed, until


def without(*flags):
    """The job's words without these flags and the value of each."""
    kept = iter(WORDS)
    return [word for word in kept if word not in flags or next(kept) is None]


@pytest.mark.whole
def test_a_run_needs_no_eval_interval(entry):
    run = entry([*without("--eval-interval", "--train-iters"), "--train-iters", "1"], 2)
    assert run.codes == [0, 0], run.output[-3000:]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rampup-batch-size 2 2 8", "use --step-batch-size-schedule"),
        ("--init-model-with-meta-device", "their first values: remove it"),
        ("--init-model-with-meta-device --use-torch-fsdp2", "their first values: remove it"),
        ("--save somewhere", "Megatron refuses these arguments: assert args.save_interval is"),
        (
            "--num-experts 4 --moe-router-group-topk 2",
            "arguments: When using group limited",
        ),
    ],
)
def test_what_would_not_be_honoured_is_refused(entry, words, message):
    run = entry([*without("--save-interval"), *words.split()], 2)
    assert run.codes == [2, 2], run.output[-3000:]
    (line,) = run.errors
    assert message in line


@pytest.mark.whole
def test_mock_data_without_the_size_of_a_vocabulary_is_refused(entry):
    run = entry(without("--vocab-size"), 2)
    assert run.codes == [2, 2], run.output[-3000:]
    (line,) = run.errors
    assert "give --vocab-size N" in line


@pytest.mark.whole
def test_a_split_without_documents_is_refused_with_one_that_works(entry, tmp_path):
    source, data = tmp_path / "text", tmp_path / "data"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"Document {number} has a few words in it. " * 20)
    prepare([source], data, vocab_size=270, workers=1)
    words = [word for word in without("--vocab-size", "--train-iters") if word != "--mock-data"]
    words += ["--data-path", str(data / "corpus"), "--tokenizer-type", "HuggingFaceTokenizer"]
    words += ["--tokenizer-model", str(data / "tokenizer"), "--train-iters", "1"]
    run = entry([*words, "--split", "99,1,0"], 2, timeout=180)
    assert run.codes == [2, 2], run.output[-3000:]
    (line,) = run.errors
    assert f"no document for validation of the 40 in {data / 'corpus'}" in line
    works = line.rpartition("use --split ")[2]
    assert entry([*words, "--split", works], 2, timeout=180).codes == [0, 0]


@pytest.mark.whole
def test_optimizer_state_that_does_not_move_is_refused_and_what_moves_is_named(entry, tmp_path):
    fixed, moving = tmp_path / "fixed", tmp_path / "moving"
    assert entry(arguments(fixed, *until(1)), 2).codes == [0, 0]
    other = ["--tensor-model-parallel-size", "2"]
    run = entry(arguments(fixed, *until(2), *other), 2)
    assert run.codes == [2, 2], run.output[-3000:]
    (line,) = run.errors
    assert "holds optimizer state for TP 1 and PP 1 only, and this run has TP 2 and PP 1" in line
    remedies = ["--dist-ckpt-optim-fully-reshardable", "--no-load-optim"]
    assert [word in line for word in remedies] == [True, True]

    anew = entry(arguments(fixed, *until(2), *other, remedies[1]), 2)
    saved = entry(arguments(moving, *until(1), remedies[0]), 2)
    moved = entry(arguments(moving, *until(2), *other, remedies[0]), 2)
    for run in (anew, saved, moved):
        assert run.codes == [0, 0], run.output[-3000:]
    assert resumed(anew.output) == resumed(moved.output) == 1
