"""Test that conversions of damaged files, and onto full disks, fail and leave the old output."""

import multiprocessing
import shutil

import pytest

from kha_megatron.checkpoint import hf_writer
from kha_megatron.conversion import to_megatron
from kha_megatron.errors import CheckpointError, KHAError, OutputError
from tests.conversion.models import CONFIGS, make
from tests.faults import fuzz
from tests.faults.conversions import convert, kill_at_every_step, tree
from tests.faults.jobs import small_disk

KINDS = ["to-hf", "to-megatron"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A model of each side: the inputs of ``to-hf`` and ``to-megatron``."""
    folder = tmp_path_factory.mktemp("sources")
    make(CONFIGS["kha"]).save_pretrained(folder / "plain")
    convert("to-megatron", folder / "plain", folder / "megatron")
    convert("to-hf", folder / "megatron", folder / "hf")
    return {"to-hf": folder / "megatron", "to-megatron": folder / "hf"}


@pytest.fixture
def source(sources, tmp_path):
    """Return a copy of the source of a kind, to be damaged."""
    return lambda kind: shutil.copytree(sources[kind], tmp_path / "source")


@pytest.fixture
def old(tmp_path):
    """An output of an earlier conversion."""
    target = tmp_path / "room" / "model"
    (target / "release").mkdir(parents=True)
    (target / "config.json").write_text('{"old": true}')
    (target / "release" / "weights").write_bytes(bytes(range(99)))
    return target


def refused(kind, source, target, match, error=KHAError):
    """Check that the conversion fails with one line and that only the old output is left."""
    before = tree(target.parent)
    with pytest.raises(error, match=match) as caught:
        convert(kind, source, target)
    assert "\n" not in str(caught.value)
    assert tree(target.parent) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(sources, tmp_path, monkeypatch, kind):
    with small_disk(tmp_path, "200k") as disk:
        old = disk / "model"
        old.mkdir()
        (old / "config.json").write_text("{}")
        (disk / "ballast").write_bytes(bytes(120_000))
        message = r"Not enough disk space for .*bytes are required"
        refused(kind, sources[kind], old, message, OutputError)
        for module in (hf_writer, to_megatron):
            monkeypatch.setattr(module, "check_room", lambda folder, needed: None)
        refused(kind, sources[kind], old, "Could not write .*: No space left", OutputError)


@pytest.mark.parametrize("kind", ["to-hf", pytest.param("to-megatron", marks=pytest.mark.whole)])
def test_a_kill_at_any_step_loses_nothing(sources, old, kind, whole):
    most = 32 if whole else 4
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        case = pool.apply_async(kill_at_every_step, (kind, sources[kind], old, most))
        killed, wrong = case.get(timeout=580)
    assert wrong == []
    assert killed >= most


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_detected(source, old, kind):
    folder = source(kind)
    for file in sorted(folder.rglob("*.distcp" if kind == "to-hf" else "*.safetensors")):
        fuzz.flip(file, 0.99)
        refused(kind, folder, old, "Checksum mismatch for", CheckpointError)
        fuzz.flip(file, 0.99)
    convert(kind, folder, old)
