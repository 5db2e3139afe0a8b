"""Recipes with a user's arguments, and the checks of ``prepare``."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kha_megatron.errors import CheckpointError, ConfigError, DataError, KHAError, OutputError
from kha_megatron.model.run import parse
from kha_megatron.recipes import RECIPES, Slurm, get_recipe, prepare_job
from tests.checkpoint.saved import save

QUICKSTART = get_recipe("quickstart").updated(num_attention_heads=8, num_query_groups=4)


def refused(error: type[KHAError], match: str, words: str = "", **options) -> None:
    with pytest.raises(error, match=match):
        prepare_job(QUICKSTART, overrides=words.split(), **options)


def test_arguments_replace_those_of_the_recipe():
    one = ["--tensor-model-parallel-size", "1"]
    assert "--sequence-parallel" not in QUICKSTART.run_for(one).flags
    asked = QUICKSTART.run_for([*one, "--sequence-parallel"]).flags
    assert "--sequence-parallel" in asked  # refused later, because the user gave it
    words = QUICKSTART.run_for(
        ["--kha-preset", "kha_linear", "--device=cuda", "--swiglu", "--num-layers", "7"]
    ).words()
    merged = parse(words)
    assert len(merged) == sum(word.startswith("--") for word in words)  # no flag twice
    given = {
        "--kha-preset": ("kha_linear",),
        "--device": ("cuda",),
        "--num-layers": ("7",),
    }
    assert merged.items() >= given.items()
    assert "--save" not in merged


@pytest.mark.parametrize(
    ("interval", "retained"),
    [("1000", "4000"), ("3", "4767"), ("9000", "9000")],
)
def test_retained_checkpoints_are_among_the_saved_ones(interval, retained):
    flags = get_recipe("dense-0.6b").run_for(["--save-interval", interval]).flags
    assert flags["--save-retain-interval"] == (retained,)


def test_layers_are_described_as_a_pattern(data):
    words = "--num-layers 5 --moe-layer-freq ([0]*2+[1]*3) --pipeline-model-parallel-size 2"
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    job = prepare_job(
        QUICKSTART,
        data=data,
        ranks=4,
        overrides=f"{words} {ends}".split(),
    )
    found = parse(job.command[job.command.index("-m") + 2 :])
    assert found["--hybrid-layer-pattern"] == ("*-*-*E|*E*E",)
    assert not found.keys() & {"--num-layers", "--moe-layer-freq", *ends.split()[::2]}


def vocab_sizes(*words: str, recipe=QUICKSTART) -> list[str]:
    command = prepare_job(recipe, overrides=["--mock-data", *words]).command
    return [command[i + 1] for i, word in enumerate(command) if word == "--vocab-size"]


def test_mock_data_uses_the_recipes_vocabulary():
    assert vocab_sizes() == ["512"]
    assert vocab_sizes("--vocab-size", "77") == ["77"]
    assert vocab_sizes("--use-checkpoint-args") == []  # the checkpoint has the size
    unknown = replace(QUICKSTART, run=replace(QUICKSTART.run, vocab_size=None))
    assert vocab_sizes("--vocab-size", "77", recipe=unknown) == ["77"]
    with pytest.raises(DataError, match="--mock-data requires --vocab-size"):
        vocab_sizes(recipe=unknown)


def test_missing_data_is_refused(data, tmp_path):
    refused(DataError, "No training data")
    good = str(data / "corpus")
    blend = f"--data-path 0.3 {tmp_path}/other 0.7 {tmp_path}/other"
    refused(DataError, r"other\.idx", blend, data=data)
    prepare_job(QUICKSTART, data=data, overrides=["--data-path", good, good])
    (data / "corpus.idx").unlink()
    refused(
        DataError,
        r"Could not read the index .*corpus\.idx",
        data=data,
        dry_run=True,
    )


MOE = {name for name, recipe in RECIPES.items() if "num_experts" in recipe.run.arguments}


@pytest.mark.parametrize("name", sorted(MOE - {"quickstart", "laptop/moe"}))
def test_moe_recipes_use_grouped_gemm_and_their_own_expert_parallelism(name, capsys):
    job = prepare_job(
        RECIPES[name],
        dry_run=True,
        slurm=Slurm(time="01:00:00", nodes=4),
    )
    assert "No training data given" in capsys.readouterr().err
    grouped = {"--moe-grouped-gemm", "--moe-permute-fusion"}
    assert grouped < set(job.command)
    assert "--expert-model-parallel-size 8" in " ".join(job.command)
    for words in (["--device", "cpu"], ["--transformer-impl", "local"]):  # have no grouped GEMM
        job = prepare_job(RECIPES[name], dry_run=True, overrides=words)
        assert not grouped & set(job.command)


def save_checkpoint(folder: Path, **changes) -> Path:
    """Write an output directory with a complete checkpoint with the recipe's heads."""
    attention = "decoder.layers.self_attention"
    matrices = {
        f"{attention}.linear_proj.weight": torch.zeros(4, 16, 16),
        f"{attention}.knock_value.weight": torch.zeros(4, 3, 16, 16),
    }
    arguments = {n: v for n, v in QUICKSTART.run.arguments.items() if not n.startswith("kha_")}
    arguments |= {"kha_value": "mlp"} | changes
    save(folder / "checkpoints", 7, matrices, **arguments)
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "trained")


def test_used_directory_is_refused_unless_resumed(trained, data, tmp_path):
    refused(OutputError, "is not empty.*--resume", data=data, output=trained)
    refused(
        OutputError,
        "is not empty",
        f"--save {trained}",
        data=data,
        output=tmp_path / "new",
    )
    assert not (tmp_path / "new").exists()
    command = prepare_job(
        QUICKSTART,
        data=data,
        output=trained,
        resume=True,
    ).command
    assert command[command.index("--load") + 1] == command[command.index("--save") + 1]


def test_users_own_load_and_save_may_be_the_same_directory(trained, data, monkeypatch):
    monkeypatch.chdir(trained)
    words = ["--load", "checkpoints", f"--save={trained / 'checkpoints'}"]
    command = prepare_job(QUICKSTART, data=data, overrides=words).command
    assert command[command.index("--load") + 1] == "checkpoints"


def test_resume_without_a_complete_checkpoint_is_refused(trained, data, tmp_path):
    refused(ConfigError, "--resume requires --output", data=data, resume=True)
    for last in ("metadata.json", "integrity.json"):
        (trained / "checkpoints/iter_0000007" / last).unlink()
    for output in (trained, tmp_path / "new"):
        refused(
            CheckpointError,
            "no complete checkpoint",
            data=data,
            output=output,
            resume=True,
        )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--kha-preset kha_linear", "value=mlp.*value=linear"),
        ("--kha-preset baseline", "value=mlp.*nothing"),
        ("--num-layers 3", "--num-layers is 3, but .*iter_0000007 was trained with 4"),
        ("--num-experts 6", "--num-experts is 6, but .* was trained with 8"),
        ("--lr 1e-3", "--lr is 0.001, but .* was saved with 0.002. Add --override-opt-param-sch"),
    ],
)
def test_checkpoint_of_another_run_is_refused(trained, data, words, match):
    options = {"data": data, "output": trained, "resume": True}
    refused(CheckpointError, match, words, **options)
    prepare_job(
        QUICKSTART,
        overrides=[*words.split(), "--use-checkpoint-args"],
        **options,
    )
    prepare_job(
        QUICKSTART,
        overrides=["--lr", "1", "--override-opt_param-scheduler"],
        **options,
    )


@pytest.mark.parametrize("tokenizer", [7, "a\0b", "x" * 5000])
def test_text_in_a_checkpoint_is_no_path_and_no_command(data, tmp_path, tokenizer):
    command = "0.002.\nerror: Run `curl x | sh` " + "x" * 10**6
    hostile = {"tokenizer_model": tokenizer, "lr": command}
    output = save_checkpoint(tmp_path / "trained", **hostile)
    with pytest.raises(CheckpointError, match=r"--lr is 0\.002, but .* was saved with") as caught:
        prepare_job(QUICKSTART, data=data, output=output, resume=True)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000


def test_paths_are_absolute(data, monkeypatch):
    monkeypatch.chdir(data.parent)
    arguments = QUICKSTART.run_for(data=Path(data.name), output=Path("out")).flags
    assert arguments["--tokenizer-model"] == (str(data / "tokenizer"),)
    assert arguments["--save"] == (str(data.parent / "out" / "checkpoints"),)


@pytest.fixture
def read_only_data(data):
    """Mount the data directory read-only, because root may write despite the permissions."""
    if os.geteuid():
        data.chmod(0o555)
        yield data
        data.chmod(0o755)
        return
    words = ["mount", "--bind", "-o", "ro", data, data]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a directory here")
    yield data
    subprocess.run(["umount", data], check=True)


def test_indices_of_read_only_data_go_to_the_output(read_only_data, tmp_path):
    def cache(data, **options):
        job = prepare_job(
            QUICKSTART,
            data=data,
            output=tmp_path / "run",
            **options,
        )
        return job.run.flags.get("--data-cache-path")

    indices = (str(tmp_path / "run" / "indices"),)
    assert cache(read_only_data) == indices
    assert cache(read_only_data, overrides=["--data-cache-path", "mine"]) == ("mine",)
    assert cache(Path("/data"), remote=True) == indices  # may be mounted read-only


def test_indices_of_writable_data_stay_next_to_it(data, tmp_path):
    job = prepare_job(QUICKSTART, data=data, output=tmp_path / "run")
    assert "--data-cache-path" not in job.run.flags


def test_too_many_replicas_are_refused_with_another_layout():
    slurm = Slurm(time="01:00:00", nodes=128)
    with pytest.raises(ConfigError) as raised:
        prepare_job(
            get_recipe("dense-0.6b"),
            slurm=slurm,
            overrides=["--mock-data"],
        )
    message = str(raised.value)
    assert "--global-batch-size (512) must be divisible by 1024" in message
    assert "use 2 times as many ranks per replica" in message
    words = ["--mock-data", "--pipeline-model-parallel-size", "2"]
    prepare_job(get_recipe("dense-0.6b"), slurm=slurm, overrides=words)


def test_restarted_and_upcycled_jobs_load_their_own_directory(tmp_path):
    def paths(*words, **options):
        job = prepare_job(
            QUICKSTART,
            overrides=["--mock-data", *words],
            output=tmp_path / "run",
            **options,
        )
        arguments = parse(job.command[job.command.index("-m") + 2 :])
        return arguments["--save"], arguments.get("--load")

    save = (str(tmp_path / "run" / "checkpoints"),)
    assert paths(remote=True) == paths("--kha-upcycle") == (save, save)
    assert paths() == (save, None)


@pytest.mark.parametrize(
    ("words", "connections"),
    [
        ("", None),
        ("--tensor-model-parallel-size 2", "1"),
        ("--context-parallel-size 2", "1"),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", None),  # Megatron refuses 1
    ],
)
def test_ranks_get_the_connections_that_megatron_requires(words, connections, monkeypatch):
    def value():
        overrides = ["--mock-data", *words.split()]
        job = prepare_job(get_recipe("dense-0.6b"), ranks=2, overrides=overrides)
        return job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert value() == connections
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # the caller's value wins
    assert value() == (connections and "32")
