"""Put the diffs of ``patches/`` into a Megatron tree, and take them out again.

A hunk is a block of lines before and a block of lines after. It fits where exactly one of the two
occurs, exactly once, byte for byte: there is no fuzz, but lines added above it do not matter.
Everything is decided in memory; files are then staged, flushed and renamed, one rename each. A kill
between two renames leaves a patch ``partial``, which applying and reverting both complete.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import W_OK, access
from pathlib import Path
from typing import Literal

from kha_megatron.checkpoint.staging import flush, staged_file
from kha_megatron.errors import PatchError

State = Literal["absent", "applied", "partial", "mismatch"]

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One block of a diff: ``before`` and ``after``, with the context, in whole lines."""

    line: int
    """Where ``before`` starts in the release that the diff was made from, from 1."""
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Patch:
    """One diff: its file name without the suffix, its first line, and the hunks of each file."""

    name: str
    title: str
    files: dict[str, tuple[Hunk, ...]]
    """By path below the ``megatron`` folder."""


@dataclass(frozen=True)
class Tree:
    """A ``megatron`` folder and the version that it says it is."""

    megatron: Path
    version: str


@dataclass(frozen=True)
class Finding:
    """How a patch stands in a tree."""

    name: str
    title: str
    state: State
    files: dict[str, State]
    notes: tuple[str, ...]
    """For a mismatch what is wrong, else hunks that are at another line than in the release."""


def megatron_version(core: Path) -> str | None:
    """The version in the ``package_info.py`` of a ``megatron/core`` folder, read as text."""
    try:
        text = (core / "package_info.py").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(numbers.values()) if len(numbers) == 3 else None


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
    here = Path(__file__).resolve().parent
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
        PatchError: it is no such diff; the message names the line.
    """
    lines = text.splitlines(keepends=True)
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"--- "):
            old, new = (part.split()[1].decode() for part in lines[at : at + 2])
            if not old.startswith("a/megatron/") or new != f"b/{old[2:]}" or ".." in old:
                raise PatchError(f"{name}.patch:{at + 1}: not a change of a file in a/megatron/")
            hunks = files.setdefault(old.removeprefix("a/megatron/"), [])
            at += 2
        elif (head := _HUNK.match(line)) and hunks is not None:
            start, *sizes = (int(number or 1) for number in head.groups())
            before, after, at = _body(lines, at + 1, sizes, name)
            hunks.append(Hunk(start, before, after))
        elif hunks is None:  # the header
            at += 1
        else:
            raise PatchError(f"{name}.patch:{at + 1}: neither a hunk nor a file")
    if not lines or not files or not all(files.values()):
        raise PatchError(f"{name}.patch: no hunk")
    return Patch(name, lines[0].decode().strip(), {k: tuple(v) for k, v in files.items()})


def _body(lines: list[bytes], at: int, sizes: list[int], name: str) -> tuple[bytes, bytes, int]:
    """The two sides of the hunk whose lines start at ``at``, and where it ends."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    while at < len(lines) and [len(side) for side in sides] != sizes:
        line = lines[at]
        if line[:1] not in b" -+" or not line.endswith(b"\n"):
            break
        for side, other in zip(sides, b"+-", strict=True):
            if line[0] != other:
                side.append(line[1:])
        at += 1
    if [len(side) for side in sides] != sizes:
        raise PatchError(f"{name}.patch:{at + 1}: the hunk is not as long as it says")
    return b"".join(sides[0]), b"".join(sides[1]), at


def examine(tree: Tree, patches: Sequence[Patch]) -> list[Finding]:
    """How each patch stands in the tree. Reads only."""
    return [_examine(tree, patch) for patch in patches]


def _examine(tree: Tree, patch: Patch) -> Finding:
    files: dict[str, State] = {}
    notes = []
    for name, hunks in patch.files.items():
        try:
            content = _file(tree, name).read_bytes()
            found = [_locate(content, hunk, name) for hunk in hunks]
        except PatchError as error:
            files[name] = "mismatch"
            notes.append(str(error))
            continue
        files[name] = _together({state for state, _ in found})
        for hunk, (state, start) in zip(hunks, found, strict=True):
            line = content.count(b"\n", 0, start) + 1
            if state == "absent" and line != hunk.line:
                notes.append(f"{name}: fits at line {line}, in the release at {hunk.line}")
        notes += [f"{left.name}: left by an interrupted run" for left in _left(tree, name)]
    return Finding(patch.name, patch.title, _together(set(files.values())), files, tuple(notes))


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


def _locate(content: bytes, hunk: Hunk, name: str) -> tuple[Literal["absent", "applied"], int]:
    """Which side of the hunk the file holds, and where it starts.

    Raises:
        PatchError: neither or both, or one of them more than once.
    """
    before, after = _starts(content, hunk.before), _starts(content, hunk.after)
    if len(before) + len(after) != 1:
        reason = "is there more than once" if before or after else "is not there"
        ends = ": the file has CRLF line ends" if b"\r\n" in content else ""
        raise PatchError(f"{name}: the block at line {hunk.line} of the release {reason}{ends}")
    return ("absent", before[0]) if before else ("applied", after[0])


def _starts(content: bytes, block: bytes) -> list[int]:
    """Offsets at which a block of whole lines starts."""
    found, start = [], content.find(block)
    while start >= 0:
        if start == 0 or content[start - 1 : start] == b"\n":
            found.append(start)
        start = content.find(block, start + 1)
    return found


def change(tree: Tree, patches: Sequence[Patch], *, revert: bool = False) -> list[Finding]:
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
        if not file.stat().st_mode & 0o222 or not access(file.parent, W_OK):
            raise PatchError(f"{file} is read-only, and nothing was changed: make it writable")
    for name in {name for patch in patches for name in patch.files}:
        for left in _left(tree, name):
            left.unlink(missing_ok=True)
    _write(changed)
    return findings


def _changed(content: bytes, hunks: Sequence[Hunk], name: str, revert: bool) -> bytes:
    for hunk in hunks:
        state, start = _locate(content, hunk, name)
        if state == ("applied" if revert else "absent"):
            old, new = (hunk.after, hunk.before) if revert else (hunk.before, hunk.after)
            content = content[:start] + new + content[start + len(old) :]
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
