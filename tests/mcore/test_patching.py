"""Applying and reverting diffs: exact, all or none, and complete after a kill."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from kha_megatron.errors import OutputError, PatchError
from kha_megatron.mcore import patching
from kha_megatron.mcore.patching import change, examine, find_tree, load_patches, parse

REPOSITORY = Path(__file__).parents[2]
VERSIONS = sorted(
    p.name.removeprefix("megatron-core-") for p in (REPOSITORY / "patches").glob("m*")
)


def release(version):
    """The ``megatron`` folder of a release: the installed one, or one named in the environment."""
    name = f"KHA_MEGATRON_{version.replace('.', '_')}"
    if folder := os.environ.get(name):
        return find_tree(Path(folder)).megatron
    installed = find_tree(Path(find_spec("megatron").submodule_search_locations[0]))
    if not installed.version.startswith(f"{version}."):
        pytest.skip(f"Megatron-Core {version} is not at hand: name its folder in {name}")
    return installed.megatron


@pytest.fixture
def megatron(request, tmp_path):
    """A copy of what a release holds, without Python's caches."""
    version = getattr(request, "param", VERSIONS[-1])
    copy = tmp_path / "tree" / "megatron"
    shutil.copytree(release(version), copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


def contents(folder):
    """Digest and mode of every file, and where links point."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def states(tree, patches):
    return Counter(finding.state for finding in examine(tree, patches))


@pytest.mark.parametrize("megatron", VERSIONS, indirect=True)
def test_every_patch_applies_and_reverts_byte_for_byte(megatron, tmp_path):
    before = contents(megatron)
    shutil.copytree(megatron, tmp_path / "original")
    tree = find_tree(megatron.parent)
    patches = load_patches(tree.version)
    assert states(tree, patches) == {"absent": len(patches)}
    assert all(not finding.notes for finding in examine(tree, patches))

    change(tree, patches)
    assert states(tree, patches) == {"applied": len(patches)}
    named = {name for patch in patches for name in patch.files}
    after = contents(megatron)
    assert {name for name in after if after[name] != before.get(name)} == named
    change(tree, patches)  # again: nothing to do
    assert contents(megatron) == after
    for name in named:
        compile((megatron / name).read_bytes(), name, "exec")

    change(tree, patches, revert=True)
    change(tree, patches, revert=True)
    assert contents(megatron) == before
    assert subprocess.run(["diff", "-r", megatron, tmp_path / "original"]).returncode == 0


@pytest.mark.parametrize("megatron", VERSIONS, indirect=True)
def test_the_patch_tool_agrees(megatron, tmp_path):
    """``git apply``, hunk by hunk, and ``patch -p1 --fuzz=0`` make the same tree."""
    if shutil.which("patch") is None:
        pytest.skip("no `patch` on this machine")
    theirs = tmp_path / "theirs"
    shutil.copytree(megatron, theirs / "megatron")
    tree = find_tree(megatron)
    change(tree, load_patches(tree.version))
    line = ".".join(tree.version.split(".")[:2])
    for file in sorted((REPOSITORY / "patches" / f"megatron-core-{line}").iterdir()):
        command = ["patch", "-p1", "--fuzz=0", "--silent", "-d", theirs, "-i", file]
        assert subprocess.run(command).returncode == 0
    assert contents(theirs / "megatron") == contents(megatron)


@pytest.mark.parametrize("version", VERSIONS)
def test_headers_say_why_and_files_belong_to_one_patch(version):
    patches = load_patches(f"{version}.0")
    owners = Counter(name for patch in patches for name in patch.files)
    assert set(owners.values()) == {1}, "patches could not be taken alone"
    for patch in patches:
        text = (REPOSITORY / f"patches/megatron-core-{version}/{patch.name}.patch").read_text()
        header = text.partition("\n--- a/")[0]
        assert header.startswith(f"{patch.title}\n\n")
        for field in ("Why: ", "Without it: ", "Upstream: ", "Drop it: "):
            assert f"\n{field}" in header, f"{patch.name}.patch says no {field}"


SMALL = b"""Say two and six in words

--- a/megatron/core/numbers.py
+++ b/megatron/core/numbers.py
@@ -2,3 +2,3 @@
 one
-2
+two
 three
@@ -6,3 +6,4 @@
 five
-6
+six
+and a half
 seven
--- a/megatron/letters.py
+++ b/megatron/letters.py
@@ -1,2 +1,3 @@
 a
+b
 c
"""
NUMBERS = b"zero\none\n2\nthree\nfour\nfive\n6\nseven\n"


@pytest.fixture
def small(tmp_path):
    """A tree of two files, and a patch that changes both."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 7\nPRE_RELEASE = ''\n")
    (core / "numbers.py").write_bytes(NUMBERS)
    (core.parent / "letters.py").write_bytes(b"a\nc\n")
    return find_tree(tmp_path), [parse("small", SMALL)]


def test_reads_a_diff():
    patch = parse("small", SMALL)
    assert (patch.name, patch.title) == ("small", "Say two and six in words")
    assert patch.files["letters.py"] == (b"@@ -1,2 +1,3 @@\n a\n+b\n c\n",)
    assert [hunk[:15] for hunk in patch.files["core/numbers.py"]] == [
        b"@@ -2,3 +2,3 @@",
        b"@@ -6,3 +6,4 @@",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL.replace(b"a/megatron/letters.py", b"/dev/null"), "not a change of a file"),
        (SMALL.replace(b"megatron/letters.py", b"megatron/../../x.py"), "not a change of a file"),
        (SMALL.replace(b"b/megatron/letters.py", b"b/megatron/words.py"), "not a change of a file"),
        (SMALL.partition(b"@@")[0], "not a change of a file"),
        (b"only a header\n", "no hunk"),
        (b"", "no hunk"),
    ],
)
def test_refuses_what_is_no_such_diff(text, words):
    with pytest.raises(PatchError, match=words):
        parse("small", text)


@pytest.mark.parametrize("line", [b"-2\n", b"+two\n"])
def test_a_hunk_that_is_not_as_long_as_it_says_fits_nowhere(small, line):
    tree, _ = small
    before = contents(tree.megatron)
    with pytest.raises(PatchError, match=r"nothing was changed: .*corrupt patch"):
        change(tree, [parse("small", SMALL.replace(line, b""))])
    assert contents(tree.megatron) == before


def test_git_is_named_where_it_is_missing(small, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PatchError, match="`git`, which is not on PATH"):
        change(*small)


def test_settings_and_repositories_around_the_tree_do_not_matter(small, monkeypatch):
    tree, patches = small
    for words in (["init"], ["config", "apply.whitespace", "error"], ["config", "core.bare", "1"]):
        subprocess.run(["git", *words], cwd=tree.megatron, check=True, capture_output=True)
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere")
    monkeypatch.chdir(tree.megatron / "core")
    change(tree, patches)
    assert (tree.megatron / "letters.py").read_bytes() == b"a\nb\nc\n"


def _rewrite(tree, name, change):
    file = tree.megatron / name
    file.write_bytes(change(file.read_bytes()))


def _crlf(tree):
    _rewrite(tree, "core/numbers.py", lambda text: text.replace(b"\n", b"\r\n"))
    return "core/numbers.py: .* CRLF"


def _other_context(tree):
    _rewrite(tree, "core/numbers.py", lambda text: text.replace(b"seven", b"7"))
    return "the block at line 6 of the release is not there"


def _twice(tree):
    _rewrite(tree, "core/numbers.py", lambda text: text + b"one\n2\nthree\n")
    return "the block at line 2 of the release is there more than once"


def _both_sides(tree):
    other = b"one\n2\nthree\n", b"one\ntwo\nthree\n"
    _rewrite(tree, "core/numbers.py", lambda text: text + other[other[0] in text])
    return "numbers.py: the block at line 2 of the release is there more than once"


def _missing(tree):
    (tree.megatron / "letters.py").unlink()
    return "letters.py: no such file"


def _folder(tree):
    (tree.megatron / "letters.py").unlink()
    (tree.megatron / "letters.py").mkdir()
    return "letters.py: no such file"


def _link_out_of_the_tree(tree):
    file = tree.megatron / "letters.py"
    file.rename(tree.megatron.parent / "elsewhere.py")
    file.symlink_to(tree.megatron.parent / "elsewhere.py")
    return "letters.py: a link to .*elsewhere.py, outside of"


def _read_only(tree):
    (tree.megatron / "letters.py").chmod(0o444)
    return "letters.py is read-only"


DAMAGES = [
    _crlf,
    _other_context,
    _twice,
    _both_sides,
    _missing,
    _folder,
    _link_out_of_the_tree,
    _read_only,
]


@pytest.mark.parametrize("revert", [False, True], ids=["apply", "revert"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_tree_that_does_not_fit_is_left_alone(small, damage, revert):
    tree, patches = small
    if revert:
        change(tree, patches)
    words = damage(tree)
    before = contents(tree.megatron.parent)
    with pytest.raises(PatchError, match=words) as caught:
        change(tree, patches, revert=revert)
    assert "nothing was changed" in str(caught.value)
    assert contents(tree.megatron.parent) == before


def test_lines_above_a_block_do_not_matter_and_are_told(small):
    tree, patches = small
    file = tree.megatron / "core/numbers.py"
    file.write_bytes(b"and\nmid one\n" + NUMBERS)  # "mid one" ends like the block's first line
    (finding,) = examine(tree, patches)
    assert finding.state == "absent"
    assert "core/numbers.py: fits at line 4, in the release at 2" in finding.notes
    before = contents(tree.megatron)
    change(tree, patches)
    assert file.read_bytes().startswith(b"and\nmid one\nzero\none\ntwo\nthree\n")
    change(tree, patches, revert=True)
    assert contents(tree.megatron) == before


def test_a_block_starts_at_the_start_of_a_line(small):
    """``someone`` ends like the block's first line: only whole lines are the block."""
    tree, patches = small
    file = tree.megatron / "core/numbers.py"
    file.write_bytes(b"someone\n2\nthree\n" + NUMBERS)
    change(tree, patches)
    assert file.read_bytes().startswith(b"someone\n2\nthree\nzero\none\ntwo\nthree\n")


def test_modes_stay_and_hard_links_keep_the_old_content(small, tmp_path):
    """A package manager may install by hard links from a cache, which must stay what it is."""
    tree, patches = small
    file = tree.megatron / "letters.py"
    file.chmod(0o751)
    os.link(file, tmp_path / "cached.py")
    change(tree, patches)
    assert file.read_bytes() == b"a\nb\nc\n"
    assert file.stat().st_mode & 0o777 == 0o751
    assert (tmp_path / "cached.py").read_bytes() == b"a\nc\n"


def test_a_link_inside_the_tree_stays_one(small):
    tree, patches = small
    file = tree.megatron / "letters.py"
    file.rename(tree.megatron / "real.py")
    file.symlink_to("real.py")
    change(tree, patches)
    assert file.is_symlink()
    assert (tree.megatron / "real.py").read_bytes() == b"a\nb\nc\n"


KILLED = """
import os, pathlib, signal, sys
from kha_megatron.mcore.patching import change, find_tree, parse
tree = find_tree(pathlib.Path(sys.argv[1]))
replace, calls = pathlib.Path.replace, []
def counted(self, target):
    calls.append(self)
    if len(calls) > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
pathlib.Path.replace = counted
patch = parse("small", pathlib.Path(sys.argv[4]).read_bytes())
change(tree, [patch], revert=sys.argv[2] == "revert")
"""


@pytest.mark.parametrize("finish", ["apply", "revert"])
@pytest.mark.parametrize(("begin", "renames"), [("apply", 0), ("apply", 1), ("revert", 1)])
def test_a_kill_leaves_what_both_ways_complete(small, tmp_path, begin, renames, finish):
    tree, patches = small
    unpatched = contents(tree.megatron)
    change(tree, patches)
    patched = contents(tree.megatron)
    if begin == "apply":
        change(tree, patches, revert=True)
    (tmp_path / "small.patch").write_bytes(SMALL)
    words = [str(tmp_path), begin, str(renames), str(tmp_path / "small.patch")]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words])
    assert killed.returncode == -signal.SIGKILL

    (finding,) = examine(tree, patches)
    assert finding.state == ("partial" if renames else "absent")
    assert any("left by an interrupted run" in note for note in finding.notes)
    change(tree, patches, revert=finish == "revert")
    assert contents(tree.megatron) == (unpatched if finish == "revert" else patched)


def test_a_full_disk_leaves_the_tree_as_it_was(small, monkeypatch):
    tree, patches = small
    before = contents(tree.megatron)
    calls = []

    def full(path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(patching, "flush", full)
    with pytest.raises(OutputError, match="No space left on device"):
        change(tree, patches)
    assert contents(tree.megatron) == before


def test_says_which_folder_is_meant(small, tmp_path):
    tree, _ = small
    assert tree.version == "0.19.7"
    assert find_tree(tree.megatron) == tree
    environment = tmp_path / "environment"
    site = environment / "lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (site / "megatron").symlink_to(tree.megatron)
    assert find_tree(environment) == tree
    with pytest.raises(PatchError, match="no megatron/core"):
        find_tree(tmp_path / "nothing")
    second = environment / "lib/python3.13/site-packages/megatron"
    shutil.copytree(tree.megatron, second)
    with pytest.raises(PatchError, match="several"):
        find_tree(environment)


def test_the_version_is_read_as_text(small):
    """Megatron's own ``package_info.py`` runs git when it is imported; this one would do worse."""
    tree, _ = small
    info = tree.megatron / "core" / "package_info.py"
    info.write_text(info.read_text() + "raise SystemExit('imported')\n")
    assert find_tree(tree.megatron).version == "0.19.7"
    info.write_text("VERSION = (0, 19, 7)\n")
    with pytest.raises(PatchError, match="no megatron/core"):
        find_tree(tree.megatron)


def test_other_versions_and_names_are_refused():
    with pytest.raises(PatchError, match=r"no patches for Megatron-Core 0\.20\.0: .*core-0\.19"):
        load_patches("0.20.0")
    with pytest.raises(PatchError, match=r"unknown patch rms.*expert-bias-rms"):
        load_patches("0.19.2", ["rms"])
    (patch,) = load_patches("0.19.2", ["expert-bias-rms"])
    assert patch.name == "expert-bias-rms"


def test_a_wheel_holds_the_patches(tmp_path):
    """They are beside the package in a source tree, and inside of it once installed."""
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    import zipfile

    (wheel,) = hatchling.WheelBuilder(str(REPOSITORY)).build(
        directory=str(tmp_path), versions=["standard"]
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert (tmp_path / "site/kha_megatron/py.typed").is_file()
    shipped = contents(tmp_path / "site/kha_megatron/patches")
    assert shipped.keys() == contents(REPOSITORY / "patches").keys()
    code = "from kha_megatron.mcore import patching\n"
    code += "print(patching.patch_folder(), len(patching.load_patches('0.19.0')))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path / "site",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
    )
    folder, count = result.stdout.split()
    assert Path(folder) == tmp_path / "site/kha_megatron/patches"
    assert int(count) == len(load_patches("0.19.0"))
