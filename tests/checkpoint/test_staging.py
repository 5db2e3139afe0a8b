"""Test that directories and files are replaced as a whole or not at all."""

import ast
import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kha_megatron.checkpoint import staging
from kha_megatron.checkpoint.staging import check_output_folder, staged_file, staged_folder
from kha_megatron.errors import OutputError


def _tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def _write_folder(target, error=None):
    with staged_folder(target) as staged:
        (staged / "sub").mkdir()
        (staged / "sub" / "new").write_text("new")
        if error:
            raise error


def _write_file(target, text, error=None):
    with staged_file(target) as staged:
        staged.write_text(text)
        if error:
            raise error


NEW = {"model": None, "model/sub": None, "model/sub/new": b"new"}


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "room" / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "weights").write_bytes(bytes(range(7)))
    return folder


def test_a_new_directory_is_flushed_before_it_replaces_the_old_one(old, monkeypatch):
    events = []
    flush = staging.flush
    rename = Path.rename
    monkeypatch.setattr(staging.secrets, "token_hex", lambda length: "0" * 2 * length)
    monkeypatch.setattr(staging, "flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (events.append(f"-> {to.name}"), rename(path, to))
    )
    _write_folder(old)
    assert set(events[:3]) == {"sub", "new", ".model.partial-00000000"}
    assert events[3:] == ["-> .model.replaced-00000000", "-> model", "room"]
    assert _tree(old.parent) == NEW


def test_parents_are_created_and_links_stay_links(old, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write_folder(Path("a/model"))
    assert _tree(tmp_path / "a") == NEW
    link = tmp_path / "link"
    link.symlink_to(old)
    _write_folder(link)
    assert link.is_symlink()
    assert _tree(old.parent) == NEW


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_directory(old, error):
    before = _tree(old.parent)
    with pytest.raises(error):
        _write_folder(old, error)
    assert _tree(old.parent) == before


def _refuse(monkeypatch, owner, name, at):
    """Make the call number ``at`` of a function fail as on a full disk."""
    original = getattr(owner, name)
    calls = []

    def refusing(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, refusing)
    return calls


@pytest.mark.fast
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(Path, "mkdir", 2), (os, "fsync", 1), (Path, "rename", 1), (Path, "rename", 2)],
)
def test_a_full_disk_leaves_the_old_directory(old, monkeypatch, owner, name, at):
    before = _tree(old.parent)
    calls = _refuse(monkeypatch, owner, name, at)
    with pytest.raises(OutputError, match=r"Could not write .*model: No space left on device$"):
        _write_folder(old)
    monkeypatch.undo()
    assert len(calls) >= at
    assert _tree(old.parent) == before


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    for text in ("first", "second"):
        _write_file(target, text)
        assert _tree(tmp_path) == {"report.json": text.encode()}
    with pytest.raises(ValueError, match="boom"):
        _write_file(target, "half", ValueError("boom"))
    _refuse(monkeypatch, Path, "replace", 1)
    with pytest.raises(OutputError, match=r"Could not write .*report.json: No space left"):
        _write_file(target, "third")
    monkeypatch.undo()
    with pytest.raises(OutputError, match=r"Could not write .*deeper: Not a directory"):
        _write_file(target / "deeper", "{}")
    assert _tree(tmp_path) == {"report.json": b"second"}


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from kha_megatron.checkpoint.staging import staged_folder
rename, calls = Path.rename, []
def killed(path, to):
    calls.append(rename(path, to))
    if sys.argv[1] == "between":
        os.kill(os.getpid(), signal.SIGKILL)
Path.rename = killed
with staged_folder(Path(sys.argv[2])) as staged:
    (staged / "config.json").write_text('{"half":')
    if sys.argv[1] == "writing":
        print("writing", flush=True)
        time.sleep(60)
"""


@pytest.mark.fast
def test_a_second_writer_is_refused_until_the_first_is_killed(old):
    before = _tree(old)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, "writing", str(old)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "writing\n"
        message = "model is being written by another process"
        with pytest.raises(OutputError, match=message), staged_folder(old):
            pytest.fail("the block must not run")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert _tree(old) == before
    _write_folder(old)
    assert _tree(old.parent) == NEW


_RACE = """
import fcntl, sys, time
from collections import Counter
from pathlib import Path
from kha_megatron.checkpoint.staging import staged_folder
from kha_megatron.errors import OutputError
target, deadline = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
results = Counter()
while time.monotonic() < deadline:
    try:
        with staged_folder(target) as staged, open(target.parent / "marker", "a") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                results["two writers"] += 1
            (staged / "name").write_text("")
        results["written"] += 1
    except OutputError as error:
        results["refused" if "another process" in str(error) else str(error)] += 1
print(dict(results))
"""


def test_writers_that_race_for_the_lock_never_write_at_once(tmp_path):
    command = [sys.executable, "-c", _RACE, str(tmp_path / "model"), "2"]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    results = [ast.literal_eval(writer.communicate()[0]) for writer in writers]
    assert {outcome for result in results for outcome in result} == {"written", "refused"}


def test_without_locks_two_writers_do_not_share_a_directory(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    target = tmp_path / "model"
    with staged_folder(target) as first:
        (first / "a").write_text("first")
        with staged_folder(target) as second:
            (second / "b").write_text("second")
        assert _tree(target) == {"b": b"second"}
        assert _tree(first) == {"a": b"first"}
    assert _tree(target) == {"a": b"first"}


@pytest.mark.fast
@pytest.mark.parametrize("by", ["the check", "the next writer"])
def test_a_kill_between_the_two_renames_loses_nothing(old, by):
    before = _tree(old)
    ended = subprocess.run([sys.executable, "-c", _KILLED, "between", str(old)])
    assert ended.returncode == -signal.SIGKILL
    assert not old.exists()
    if by == "the check":  # or a second conversion would replace it without --overwrite
        with pytest.raises(OutputError, match="is not empty"):
            check_output_folder(old, overwrite=False)
    else:
        with pytest.raises(ValueError, match="boom"):
            _write_folder(old, ValueError("boom"))
    assert _tree(old.parent).keys() == {"model"} | {f"model/{name}" for name in before}
    assert _tree(old) == before


def test_check_output_folder_accepts_new_empty_and_marked_directories(old, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty", old):
        check_output_folder(folder, overwrite=True, mark="config.json")
    check_output_folder(Path("/proc"), overwrite=True, mark="version", inside=True)


def test_a_mount_point_is_not_replaced():
    with pytest.raises(OutputError, match="/proc is a mount point"):
        check_output_folder(Path("/proc"), overwrite=True)


def test_a_file_or_a_loop_of_links_is_no_place_for_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(OutputError, match=f"Could not write .*{name} is not a directory"):
            check_output_folder(tmp_path / name / "model", overwrite=False)
    (tmp_path / "link").symlink_to("later")
    check_output_folder(tmp_path / "link", overwrite=False)
