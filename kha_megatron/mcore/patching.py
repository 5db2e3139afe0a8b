"""Put the diffs of ``patches/`` into a Megatron tree, and take them out again.

``git apply`` decides whether a hunk fits and makes the new file, one hunk at a time, in a scratch
folder: byte for byte, without fuzz, but lines added above it do not matter. What it takes at the
nearest of several places, or both ways, is refused here. Files are then staged, flushed and
renamed, one rename each. A kill between two renames leaves a patch ``partial``, which applying and
reverting both complete.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import PatchError
from kha_megatron.mcore.compat import megatron_version

State = Literal["absent", "applied", "partial", "mismatch"]


@dataclass(frozen=True)
class Patch:
    """One diff: its file name without the suffix, its first line, and the hunks of each file."""

    name: str
    title: str
    files: dict[str, tuple[bytes, ...]]
    """By path below the ``megatron`` folder; a hunk is the lines from its ``@@`` on."""


@dataclass(frozen=True)
class Tree:
    """A ``megatron`` folder and the version that it says it is."""

    megatron: Path
    version: str


@dataclass(frozen=True)
class PatchState:
    """How a patch stands in a tree."""

    name: str
    title: str
    state: State
    files: dict[str, State]
    notes: tuple[str, ...]
    """For a mismatch what is wrong, else hunks that are at another line than in the release."""


def find_tree(path: Path) -> Tree:
    """The Megatron that ``path`` means.

    Args:
        path: a folder that holds ``megatron/`` (a source tree, ``site-packages``), the ``megatron``
            folder itself, or a virtual environment.

    Raises:
        PatchError: there is none, or more than one.
    """
    inside = [path / "megatron", path, *path.glob("lib/python3*/site-packages/megatron")]
    found = {folder.resolve(): v for folder in inside if (v := megatron_version(folder / "core"))}
    if len(found) != 1:
        what = f"several ({', '.join(map(str, found))})" if found else "no megatron/core"
        raise PatchError(
            f"{path} holds {what}: name one Megatron-LM source tree, a site-packages folder or a "
            "megatron folder"
        )
    return Tree(*found.popitem())


def patch_folder() -> Path:
    """Where the diffs are: in the installed package, or beside it in a source tree."""
    here = Path(__file__).resolve().parents[1]
    return here / "patches" if (here / "patches").is_dir() else here.parent / "patches"


def load_patches(version: str, only: Sequence[str] = ()) -> list[Patch]:
    """The patches for a version of Megatron-Core, by name.

    Args:
        version: such as ``0.19.2``; a folder serves all releases of one minor version.
        only: names to choose; empty for all.

    Raises:
        PatchError: there are none for this version, or a name is unknown.
    """
    line = ".".join(version.split(".")[:2])
    lines = sorted(folder.name for folder in patch_folder().glob("megatron-core-*"))
    files = sorted((patch_folder() / f"megatron-core-{line}").glob("*.patch"))
    if not files:
        raise PatchError(f"no patches for Megatron-Core {version}: there are {', '.join(lines)}")
    if unknown := sorted(set(only) - {file.stem for file in files}):
        known = ", ".join(file.stem for file in files)
        raise PatchError(f"unknown patch {', '.join(unknown)} for {line}: choose from {known}")
    return [parse(f.stem, f.read_bytes()) for f in files if not only or f.stem in only]


def parse(name: str, text: bytes) -> Patch:
    """Read a unified diff with a header. Only changes of existing files are known.

    Raises:
        PatchError: it is no such diff.
    """
    header, *parts = re.split(rb"(?m)^--- ", text)
    files: dict[str, tuple[bytes, ...]] = {}
    for part in parts:
        head, *hunks = re.split(rb"(?m)^(?=@@ )", part)
        paths = re.fullmatch(rb"a/megatron/(\S+).*\n\+\+\+ b/megatron/\1\s.*\n?", head)
        if not paths or not hunks or b".." in head:
            raise PatchError(f"{name}.patch: not a change of a file in a/megatron/: {head!r}")
        files[paths[1].decode()] = tuple(hunks)
    if not files:
        raise PatchError(f"{name}.patch: no hunk")
    return Patch(name, header.decode().partition("\n")[0].strip(), files)


def examine(tree: Tree, patches: Sequence[Patch]) -> list[PatchState]:
    """How each patch stands in the tree. Reads only."""
    return [_examine(tree, patch) for patch in patches]


def _examine(tree: Tree, patch: Patch) -> PatchState:
    files: dict[str, State] = {}
    notes = []
    for name, hunks in patch.files.items():
        try:
            content = _file(tree, name).read_bytes()
            found = [_fit(content, hunk, name) for hunk in hunks]
        except PatchError as error:
            files[name] = "mismatch"
            notes.append(str(error))
            continue
        files[name] = _together({fit.state for fit in found})
        for hunk, fit in zip(hunks, found, strict=True):
            if fit.state == "absent" and fit.line != _line(hunk):
                notes.append(f"{name}: fits at line {fit.line}, in the release at {_line(hunk)}")
        notes += [f"{left.name}: left by an interrupted run" for left in _left(tree, name)]
    return PatchState(patch.name, patch.title, _together(set(files.values())), files, tuple(notes))


def _together(states: set[State]) -> State:
    if len(states) == 1:
        return states.pop()
    return "mismatch" if "mismatch" in states else "partial"


def _file(tree: Tree, name: str) -> Path:
    file = tree.megatron / name
    real = file.resolve()
    if not real.is_file():
        raise PatchError(f"{name}: no such file in {tree.megatron}")
    if not real.is_relative_to(tree.megatron):
        raise PatchError(f"{name}: a link to {real}, outside of {tree.megatron}")
    return real


def _left(tree: Tree, name: str) -> list[Path]:
    """What ``staged_file`` leaves beside a file when it is killed."""
    file = tree.megatron / name
    return sorted(file.parent.glob(f".{file.name}.partial-*"))


class _Fit(NamedTuple):
    """Which side of a hunk a file holds, where, and what the file is with the other side."""

    state: State
    line: int
    changed: bytes


def _fit(content: bytes, hunk: bytes, name: str) -> _Fit:
    """How a hunk stands in a file.

    Raises:
        PatchError: neither of its sides is there, or both, or one of them more than once.
    """
    states: tuple[State, State] = ("absent", "applied")
    found = [fit for state in states if (fit := _tried(content, hunk, state))]
    if len(found) == 1 and not _tried(found[0].changed, hunk, found[0].state):
        return found[0]
    reason = "is there more than once" if found else "is not there"
    ends = ": the file has CRLF line ends" if b"\r\n" in content else ""
    raise PatchError(f"{name}: the block at line {_line(hunk)} of the release {reason}{ends}")


def _line(hunk: bytes) -> int:
    """Where it starts in the release that the diff was made from, from 1."""
    return int(hunk.removeprefix(b"@@ -").partition(b",")[0])


def _tried(content: bytes, hunk: bytes, state: State) -> _Fit | None:
    """What ``git apply`` makes of a hunk, forwards where it is absent; None where it refuses.

    Git works with nobody's settings and in nobody's repository, whatever lies around the tree.
    """
    words = ["git", "apply", "-p0", "--verbose", "--whitespace=nowarn"]
    words += ["--reverse"] if state == "applied" else []
    alone = {"GIT_DIR": os.devnull, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    # both sides at one line, or git would tell of every hunk after the first that it moved
    diff = b"--- file\n+++ file\n" + re.sub(rb"\+\d+", b"+%d" % _line(hunk), hunk, count=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        file.write_bytes(content)
        try:
            done = subprocess.run(
                words,
                input=diff,
                capture_output=True,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"} | alone,
            )
        except FileNotFoundError:
            raise PatchError(
                "patches are applied by `git`, which is not on PATH: install it"
            ) from None
        if done.returncode > 1:
            raise PatchError(f"{done.stderr.decode(errors='replace').strip()}: {hunk[:40]!r}")
        moved = re.search(rb"succeeded at (\d+)", done.stderr)
        line = int(moved[1]) if moved else _line(hunk)
        return None if done.returncode else _Fit(state, line, file.read_bytes())


def change(tree: Tree, patches: Sequence[Patch], *, revert: bool = False) -> list[PatchState]:
    """Apply or revert patches, all or none, and complete what an interrupted run left.

    Returns:
        How each patch stood before: what is already as wanted was not touched.

    Raises:
        PatchError: one of them does not fit, or a file may not be written; nothing was touched.
        OutputError: the disk refuses; :func:`examine` says how far it came.
    """
    findings = examine(tree, patches)
    if wrong := [finding for finding in findings if finding.state == "mismatch"]:
        raise PatchError(
            f"{wrong[0].name} does not fit Megatron-Core {tree.version} in {tree.megatron}, and "
            f"nothing was changed: {'; '.join(wrong[0].notes)}: see `kha-megatron patch check`, or "
            "name the others with --only"
        )
    changed: dict[Path, bytes] = {}
    for patch in patches:
        for name, hunks in patch.files.items():
            file = _file(tree, name)
            original = changed.get(file) or file.read_bytes()
            if (content := _changed(original, hunks, name, revert)) != original:
                changed[file] = content
    for file in changed:
        if not file.stat().st_mode & 0o222 or not os.access(file.parent, os.W_OK):
            raise PatchError(f"{file} is read-only, and nothing was changed: make it writable")
    for name in {name for patch in patches for name in patch.files}:
        for left in _left(tree, name):
            left.unlink(missing_ok=True)
    _write(changed)
    return findings


def _changed(content: bytes, hunks: Sequence[bytes], name: str, revert: bool) -> bytes:
    for hunk in hunks:
        fit = _fit(content, hunk, name)
        if fit.state == ("applied" if revert else "absent"):
            content = fit.changed
    return content


def _write(changed: dict[Path, bytes]) -> None:
    """Stage and flush all files, then rename one after another.

    A renamed file is a new one: what shares its old inode, such as a package cache that installs
    by hard links, keeps the old content.
    """
    with ExitStack() as renames:
        for file, content in changed.items():
            staged = renames.enter_context(staged_file(file))
            staged.write_bytes(content)
            shutil.copymode(file, staged)
            flush(staged)
