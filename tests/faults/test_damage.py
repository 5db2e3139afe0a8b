"""Test that every rank refuses damaged and hostile checkpoints and executes none of them."""

import shutil

import pytest

from kha_megatron.checkpoint.integrity import INTEGRITY, read_hashes, verify_hashes, write_hashes
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.errors import CheckpointError
from tests.faults import fuzz
from tests.faults.jobs import arguments, iteration_folder, resumed


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "save")


@pytest.mark.fast
@pytest.mark.parametrize("place", [0.1, 0.98])
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp", "__1_0.distcp"])
def test_a_flipped_bit_is_detected_before_the_file_is_read(copy, name, place):
    folder = iteration_folder(copy, 2)
    key = None
    for tensor_key, tensor in MegatronCheckpoint.open(folder)._folder.tensors.items():
        if any(chunk.file == name for chunk in tensor.chunks):
            key = tensor_key
    verify_hashes(folder)
    fuzz.flip(folder / name, place)
    message = rf"{name}: integrity.json lists SHA-256"
    with pytest.raises(CheckpointError, match=message) as caught:
        MegatronCheckpoint.open(folder)._folder.read(key)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=message):
        verify_hashes(folder)


def test_damaged_and_missing_lists_of_hashes(copy):
    folder = iteration_folder(copy, 2)
    digests = read_hashes(folder)
    assert set(digests) == {file.name for file in folder.iterdir()} - {INTEGRITY}
    for damaged in (
        "",
        "{}",
        '{"files": 3}',
        '{"files": {"../x": "0"}, "algorithm": "sha256"}',
        r'{"files": {"\u0000": "0"}, "algorithm": "sha256"}',
    ):
        (folder / INTEGRITY).write_text(damaged)
        with pytest.raises(CheckpointError, match=f"{INTEGRITY} is corrupted"):
            MegatronCheckpoint.open(folder)
    (folder / INTEGRITY).unlink()
    MegatronCheckpoint.open(folder).tensor("embedding.word_embeddings.weight")  # older versions
    write_hashes(folder)
    assert read_hashes(folder) == digests
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"Could not read .*__1_0\.distcp"):
        verify_hashes(folder)


def test_training_refuses_damage_on_every_rank(entry, copy):
    fuzz.flip(iteration_folder(copy, 2) / "__1_0.distcp", 0.4)
    before = sorted(path.name for path in copy.iterdir())
    run = entry(arguments(copy), 2)
    assert run.codes == [2, 2], run.output[-3000:]
    assert not run.overdue
    assert "Traceback" not in run.output
    (error,) = run.errors
    assert "iter_0000002/__1_0.distcp: integrity.json lists SHA-256" in error
    assert sorted(path.name for path in copy.iterdir()) == before


HOSTILE = {
    "index": "corrupted or malicious",
    "common_state": "malicious",
    "rng_state": "Could not read",
}


@pytest.mark.parametrize(
    "where",
    ["index", pytest.param("common_state", marks=pytest.mark.whole), "rng_state"],
)
def test_training_does_not_run_a_hostile_pickle(entry, copy, tmp_path, where):
    file = tmp_path / "created"
    folder = iteration_folder(copy, 2)
    if where == "index":
        fuzz.edit_index(folder, lambda index: setattr(index, "planner_data", fuzz.Bomb(file)))
    else:
        fuzz.replace_value(folder, where, [fuzz.Bomb(file)])
    write_hashes(folder)  # whoever can write the checkpoint can write its hashes
    run = entry(arguments(copy), 2)
    assert not file.exists()
    assert run.codes == [2, 2], run.output[-3000:]
    assert not run.overdue
    assert "Traceback" not in run.output
    (error,) = run.errors
    assert HOSTILE[where] in error
    assert "posix.system" in error
    assert resumed(run.output) == (2 if where == "rng_state" else 0)
