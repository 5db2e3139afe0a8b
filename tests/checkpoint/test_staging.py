"""Folders and files are replaced whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kha_megatron.checkpoint import staging as files
from kha_megatron.checkpoint.staging import check_output_folder, staged_file, staged_folder
from kha_megatron.errors import OutputError


def _tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def _write_folder(target, error=None):
    with staged_folder(target) as staged:
        (staged / "new").write_text("new")
        if error:
            raise error


def _write_file(target, text, error=None):
    with staged_file(target) as staged:
        staged.write_text(text)
        if error:
            raise error


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "room" / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "weights").write_bytes(bytes(range(7)))
    return folder


def test_a_finished_folder_takes_the_place_of_the_old_one(old):
    with staged_folder(old) as staged:
        assert staged.parent == old.parent  # else the rename would be a copy
        (staged / "sub").mkdir()
        (staged / "sub" / "new").write_text("new")
        assert "config.json" in _tree(old)
    assert _tree(old.parent) == {"model": None, "model/sub": None, "model/sub/new": b"new"}


def test_everything_is_flushed_before_it_is_renamed(old, monkeypatch):
    events = []
    flush, rename = files.flush, Path.rename
    monkeypatch.setattr(files, "flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (events.append(f"-> {to.name}"), rename(path, to))
    )
    with staged_folder(old) as staged:
        (staged / "sub").mkdir()
        (staged / "sub" / "new").write_text("new")
    assert set(events[:3]) == {"sub", "new", staged.name}
    assert events[-2:] == ["-> model", "room"]


def test_parents_are_made_and_a_relative_target_is_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with staged_folder(Path("a/b")) as staged:
        (staged / "x").write_text("x")
        monkeypatch.chdir("/")
    assert _tree(tmp_path) == {"a": None, "a/b": None, "a/b/x": b"x"}


def test_a_link_stays_a_link(old, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(old)
    _write_folder(link)
    assert link.is_symlink()
    assert _tree(old) == {"new": b"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "room"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_the_old_folder(old, error):
    before = _tree(old.parent)
    with pytest.raises(error):
        _write_folder(old, error)
    assert _tree(old.parent) == before


def _refuse(monkeypatch, owner, name, at):
    """Make the call number ``at`` of a function fail as a full disk does."""
    original, calls = getattr(owner, name), []

    def refusing(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, refusing)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(Path, "mkdir", 2), (os, "fsync", 1), (Path, "rename", 1), (Path, "rename", 2)],
)
def test_a_full_disk_is_one_line_and_leaves_the_old_folder(old, monkeypatch, owner, name, at):
    before = _tree(old.parent)
    calls = _refuse(monkeypatch, owner, name, at)
    with pytest.raises(OutputError, match=r"cannot write .*model: No space left on device$"):
        _write_folder(old)
    monkeypatch.undo()
    assert len(calls) >= at
    assert _tree(old.parent) == before


def test_a_file_in_the_way_of_the_parent_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file" / "model", tmp_path / "file" / "deeper" / "model"):
        with pytest.raises(OutputError, match=r"cannot write .*model"), staged_folder(target):
            pytest.fail("the block must not run")
    with pytest.raises(OutputError, match=r"cannot write .*report.json: Not a directory"):
        _write_file(tmp_path / "file" / "report.json", "{}")
    assert _tree(tmp_path) == {"file": b"mine"}


_KILLED = """
import sys, time
from pathlib import Path
from kha_megatron.checkpoint.staging import staged_file, staged_folder
manager = {"folder": staged_folder, "file": staged_file}[sys.argv[1]]
with manager(Path(sys.argv[2])) as staged:
    half = staged / "config.json" if sys.argv[1] == "folder" else staged
    half.write_text('{"half":')
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_kill_in_the_middle_leaves_the_old_one(old, kind):
    target = old if kind == "folder" else old / "config.json"
    before = _tree(old)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, kind, str(target)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = {name: data for name, data in _tree(old).items() if ".partial-" not in name}
    assert left == before
    _write_folder(old)  # what it left behind is in nobody's way
    assert _tree(old.parent) == {"model": None, "model/new": b"new"}


def test_a_second_writer_is_refused_and_names_the_first(old):
    before = _tree(old.parent)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, "folder", str(old)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        words = rf"model is being written by process {process.pid}: wait for its end"
        with pytest.raises(OutputError, match=words), staged_folder(old):
            pytest.fail("the block must not run")
        process.send_signal(signal.SIGKILL)  # the lock dies with it
        process.wait()
    assert before.items() <= _tree(old.parent).items()
    _write_folder(old)
    assert _tree(old.parent) == {"model": None, "model/new": b"new"}


def test_the_lock_holds_within_a_process(old):
    with (
        staged_folder(old),
        pytest.raises(OutputError, match=rf"written by process {os.getpid()}:"),
        staged_folder(old),
    ):
        pytest.fail("the block must not run")
    (old.parent / ".model.lock").write_text("")  # made, not held
    _write_folder(old)
    assert _tree(old.parent) == {"model": None, "model/new": b"new"}


def test_a_lock_that_its_holder_removes_meanwhile_is_no_lock(old, monkeypatch):
    lock, flock, taken = old.parent / ".model.lock", files.fcntl.flock, []

    def slow(descriptor, operation):
        if not taken:  # the holder ends between our open() and our flock()
            taken.append(descriptor)
            lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", slow)
    with staged_folder(old):
        assert lock.read_text() == f"{os.getpid()}\n"
        monkeypatch.undo()
        with pytest.raises(OutputError, match="being written"), staged_folder(old):
            pytest.fail("the block must not run")
    assert not lock.exists()


def test_a_link_in_place_of_the_lock_is_not_followed(old, tmp_path):
    (tmp_path / "mine").write_text("precious")
    (old.parent / ".model.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match=r"cannot write .*model"):
        _write_folder(old)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_disk_without_locks_is_told_of(old, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.warns(RuntimeWarning, match=r"model has no locks \(No locks available\)"):
        _write_folder(old)
    assert _tree(old.parent) == {"model": None, "model/new": b"new"}


_KILLED_BETWEEN = """
import os, signal, sys
from pathlib import Path
from kha_megatron.checkpoint.staging import staged_folder
rename = Path.rename
def killed(path, to):
    if ".partial-" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, to)
Path.rename = killed
with staged_folder(Path(sys.argv[1])) as staged:
    (staged / "new").write_text("new")
"""


@pytest.mark.parametrize("by", ["the check", "the next writer"])
def test_a_kill_between_the_two_renames_loses_nothing(old, by):
    before = _tree(old)
    ended = subprocess.run([sys.executable, "-c", _KILLED_BETWEEN, str(old)])
    assert ended.returncode == -signal.SIGKILL
    assert not old.exists(), "it was killed at the worst moment"
    if by == "the check":  # or a second conversion would replace it without --overwrite
        with pytest.raises(OutputError, match="is not empty"):
            check_output_folder(old, overwrite=False)
    else:
        with pytest.raises(ValueError, match="boom"):
            _write_folder(old, ValueError("boom"))
    assert _tree(old) == before
    assert _tree(old.parent).keys() == {"model"} | {f"model/{name}" for name in before}


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    for text in ("first", "second"):
        _write_file(target, text)
        assert _tree(tmp_path) == {"report.json": text.encode()}
    with pytest.raises(ValueError, match="boom"):
        _write_file(target, "half", ValueError("boom"))
    _refuse(monkeypatch, Path, "replace", 1)
    with pytest.raises(OutputError, match=r"cannot write .*report.json: No space left"):
        _write_file(target, "third")
    monkeypatch.undo()
    assert _tree(tmp_path) == {"report.json": b"second"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_new_and_empty_folders_may_be_written(tmp_path, overwrite):
    check_output_folder(tmp_path / "new", overwrite=overwrite, mark="config.json", only=("*.json",))
    (tmp_path / "empty").mkdir()
    check_output_folder(
        tmp_path / "empty", overwrite=overwrite, mark="config.json", only=("*.json",)
    )
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]  # looked at, and nothing made


def test_a_mount_point_is_refused_before_the_work(tmp_path):
    """``/proc`` is one everywhere: no folder can be renamed to it."""
    (tmp_path / "link").symlink_to("/proc")
    for folder in (Path("/proc"), tmp_path / "link"):
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=r"is a mount point: name a folder inside it"):
                check_output_folder(folder, overwrite=overwrite)
    check_output_folder(Path("/proc"), overwrite=True, mark="version", inside=True)


def test_what_would_be_lost_is_refused(old, tmp_path):
    with pytest.raises(OutputError, match=r"model is not empty \(2 entries\).*--overwrite"):
        check_output_folder(old, overwrite=False)
    check_output_folder(old, overwrite=True, mark="config.json")
    with pytest.raises(OutputError, match=r"holds no other.json, so it is not one of ours"):
        check_output_folder(old, overwrite=True, mark="other.json")
    with pytest.raises(OutputError, match=r"holds deep, which this command never writes"):
        check_output_folder(old, overwrite=True, mark="config.json", only=("*.json",))
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"config.json is a file: name a folder"):
            check_output_folder(old / "config.json", overwrite=overwrite)
    assert set(_tree(old)) == {"config.json", "deep", "deep/weights"}
