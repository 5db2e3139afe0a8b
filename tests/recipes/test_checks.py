"""Bad input is refused before anything starts, by name, and good input is not."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kha_megatron.errors import CheckpointError, ConfigError, DataError, KHAError, OutputError
from kha_megatron.recipes import get_recipe, prepare
from tests.checkpoint.saved import save

QUICKSTART = get_recipe("quickstart").updated(num_attention_heads=8, num_query_groups=4)


def refused(error: type[KHAError], match: str, words: str = "", **options) -> None:
    with pytest.raises(error, match=match) as caught:
        prepare(QUICKSTART, overrides=words.split(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "ranks", "match"),
    [
        ("--tensor-model-parallel-size 3", 3, "8 query heads cannot be divided over 3"),
        ("--num-query-groups 3", 2, "8 query heads are not a multiple of 3"),
        ("--num-attention-heads 9 --num-query-groups 3", 2, "9 query heads"),
        ("--tensor-model-parallel-size two", 2, "--tensor-model-parallel-size two"),
        ("--kha-preset kha_mpl", 2, "unknown KHA preset 'kha_mpl'"),
        ("--kha-value linaer", 2, "unknown KHA variant 'linaer'"),
        ("--kha-init zero", 2, "unknown KHA init 'zero'"),
        ("--multi-latent-attention", 2, "value=mlp on multi-latent attention.* use linear"),
        ("--device tpu", 2, "unknown device 'tpu'"),
        ("", 0, "0 ranks"),
        ("", 1, "1 ranks cannot be divided by tensor 2"),
        ("", 3, "3 ranks cannot be divided by tensor 2"),
        ("--context-parallel-size 2", 6, "tensor 2 x pipeline 1 x context 2 = 4"),
        ("--pipeline-model-parallel-size 2", 2, "tensor 2 x pipeline 2 x context 1 = 4"),
        ("--num-experts 7", 2, "--num-experts 7 cannot be divided over 2"),
        ("--expert-model-parallel-size 8", 2, "expert-tensor 1 x expert 8"),
        ("--expert-tensor-parallel-size 2", 2, "expert-tensor 2 x expert 2"),
        ("", 4, "--global-batch-size 16 .* 2 data-parallel ranks = 32: use 32"),
        ("--seq-length 255", 2, "255 tokens .* 2 tensor-parallel ranks.*: use 254 or 256"),
        ("--pipeline-model-parallel-size 3", 6, "4 layers .* 3 pipeline ranks: use .* 2 or 4"),
        ("--moe-layer-freq [0]*3+[1]*2", 2, "5 layers, the model has 4"),
        ("--moe-layer-freq __import__('os')", 2, "give a whole number"),
        ("--odd 1 2 -x", 2, None),  # Megatron's own parser answers for its own flags
    ],
)
def test_layout(words, ranks, match, data):
    if match is None:
        job = prepare(QUICKSTART, data=data, ranks=ranks, overrides=words.split())
        assert set(words.split()) <= set(job.command)
    else:
        refused(ConfigError, match, words, data=data, ranks=ranks)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 2),
        ("--global-batch-size 32", 4),
        ("--tensor-model-parallel-size 1 --expert-model-parallel-size 1", 1),
        ("--num-query-groups 1 --tensor-model-parallel-size 4", 4),  # KV heads < TP
        ("--context-parallel-size 2", 4),
        ("--kha-value none --kha-query gate --kha-init random", 2),
    ],
)
def test_layouts_that_megatron_can_make_pass(words, ranks, data):
    assert prepare(QUICKSTART, data=data, ranks=ranks, overrides=words.split()).ranks == ranks


def test_no_data():
    refused(DataError, "no training data: give --data")


def sizes_of(*words: str) -> list[str]:
    """What the ranks hear of the vocabulary, when the user says so much of the data."""
    command = prepare(QUICKSTART, overrides=["--mock-data", *words]).command
    return [command[i + 1] for i, word in enumerate(command) if word == "--vocab-size"]


def test_mock_data_has_as_many_tokens_as_the_recipes_own():
    assert sizes_of() == ["512"]
    assert sizes_of("--tokenizer-type", "NullTokenizer") == ["512"]
    assert sizes_of("--vocab-size", "77") == ["77"]
    assert sizes_of("--use-checkpoint-args") == []  # the checkpoint knows


def test_mock_data_of_an_unknown_vocabulary_is_refused():
    unknown = replace(QUICKSTART, run=replace(QUICKSTART.run, vocab_size=None))
    with pytest.raises(DataError, match=r"no tokenizer that says how many tokens .*--vocab-size N"):
        prepare(unknown, overrides=["--mock-data"])
    assert "77" in prepare(unknown, overrides=["--mock-data", "--vocab-size", "77"]).command


@pytest.mark.parametrize("missing", ["corpus.bin", "corpus.idx"])
def test_missing_dataset_file(missing, data):
    (data / missing).unlink()
    refused(DataError, rf"corpus: .*{missing} does not exist", data=data)


def test_missing_tokenizer(data):
    for file in (data / "tokenizer").iterdir():
        file.unlink()
    (data / "tokenizer").rmdir()
    refused(DataError, "no tokenizer at .*tokenizer", data=data)
    with pytest.raises(DataError, match="no tokenizer: give"):
        prepare(QUICKSTART, overrides=["--data-path", str(data / "corpus")])


def test_every_dataset_of_a_blend_is_looked_up(data, tmp_path):
    good = str(data / "corpus")
    blend = ["--data-path", "0.3", good, "0.7", str(tmp_path / "other")]
    with pytest.raises(DataError, match=r"other\.bin"):
        prepare(QUICKSTART, data=data, overrides=blend)
    prepare(QUICKSTART, data=data, overrides=[*blend[:-1], good])
    prepare(QUICKSTART, data=data, overrides=["--data-path", good, good])


class TestFolders:
    @pytest.fixture
    def output(self, tmp_path: Path) -> Path:
        return tmp_path / "out"

    @pytest.fixture
    def trained(self, output: Path) -> Path:
        """An output folder with a finished checkpoint of iteration 7, of the recipe's heads."""
        matrices = {"decoder.layers.self_attention.knock_value.weight": torch.zeros(4, 3, 16, 16)}
        save(output / "checkpoints", 7, matrices, kha_value="mlp")
        return output

    def test_new_and_empty_folders_are_taken_and_not_made(self, output, data):
        prepare(QUICKSTART, data=data, output=output)
        assert not output.exists()
        output.mkdir()
        prepare(QUICKSTART, data=data, output=output)
        assert list(output.iterdir()) == []

    def test_a_folder_in_use_is_refused_unless_resumed(self, trained, data):
        refused(OutputError, "is not empty.*--resume", data=data, output=trained)
        command = prepare(QUICKSTART, data=data, output=trained, resume=True).command
        assert command[command.index("--load") + 1] == command[command.index("--save") + 1]

    def test_the_users_own_load_of_the_same_folder_continues_it(self, trained, data, monkeypatch):
        monkeypatch.chdir(trained)
        words = ["--load", "checkpoints", f"--save={trained / 'checkpoints'}"]
        command = prepare(QUICKSTART, data=data, overrides=words).command
        assert command[command.index("--load") + 1] == "checkpoints"

    def test_the_users_own_save_folder_is_protected_too(self, trained, data, tmp_path):
        refused(
            OutputError, "is not empty", f"--save {trained}", data=data, output=tmp_path / "new"
        )

    def test_a_killed_save_is_no_checkpoint(self, trained, data):
        for last in ("metadata.json", "integrity.json"):
            (trained / "checkpoints/iter_0000007" / last).unlink()
        refused(CheckpointError, "no complete checkpoint", data=data, output=trained, resume=True)

    @pytest.mark.parametrize(
        ("words", "match"),
        [
            ("--kha-preset kha_linear", "KHA on value=mlp, and .* value=linear .*same --kha-"),
            ("--kha-preset baseline", "1 tensor decoder.layers.* unexpected"),
            ("--kha-preset kha_mlp --heads gate.output=element", "on value=mlp, and .*gate"),
        ],
    )
    def test_other_heads_than_the_checkpoints_are_refused(self, trained, data, words, match):
        options = {"data": data, "output": trained, "resume": True}
        refused(CheckpointError, match, words, **options)
        prepare(QUICKSTART, overrides=[*words.split(), "--use-checkpoint-args"], **options)

    def test_resume_of_nothing(self, output, data):
        refused(CheckpointError, "no complete checkpoint", data=data, output=output, resume=True)
        refused(ConfigError, "nothing to resume", data=data, resume=True)

    def test_a_file_in_the_way(self, output, data):
        output.touch()
        refused(OutputError, "is a file", data=data, output=output)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_without_permission(self, tmp_path, data):
        (tmp_path / "locked").mkdir(mode=0o500)
        refused(OutputError, "cannot be written", data=data, output=tmp_path / "locked" / "out")
