"""``kha-megatron patch`` as a user meets it: words in, streams, exit code and files out."""

import json
import sys
from importlib.machinery import ModuleSpec

import pytest

from kha_megatron import cli
from kha_megatron.cli import patch as command
from kha_megatron.mcore import patching

DIFF = b"""Say two in words

Why: words are clearer.

--- a/megatron/core/numbers.py
+++ b/megatron/core/numbers.py
@@ -1,3 +1,3 @@
 one
-2
+two
 three
--- a/megatron/letters.py
+++ b/megatron/letters.py
@@ -1,2 +1,3 @@
 a
+b
 c
"""
OTHER = b"""Name the end

--- a/megatron/end.py
+++ b/megatron/end.py
@@ -1,2 +1,3 @@
 y
+# the end
 z
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A Megatron tree of three files, and two patches for its version."""
    patches = tmp_path / "patches" / "megatron-core-0.19"
    patches.mkdir(parents=True)
    (patches / "words.patch").write_bytes(DIFF)
    (patches / "end.patch").write_bytes(OTHER)
    monkeypatch.setattr(patching, "patch_folder", lambda: tmp_path / "patches")
    megatron = tmp_path / "source" / "megatron"
    (megatron / "core").mkdir(parents=True)
    (megatron / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 3\n")
    (megatron / "core" / "numbers.py").write_text("one\n2\nthree\n")
    (megatron / "letters.py").write_text("a\nc\n")
    (megatron / "end.py").write_text("y\nz\n")
    return megatron


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", "patch", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        streams = capsys.readouterr()
        return exit_.value.code, streams.out, streams.err

    return run


def test_apply_check_and_revert(run, tree):
    code, out, err = run("apply", tree.parent)
    assert code == 0
    assert out.splitlines() == ["end: applied", "words: applied"]
    assert f"Megatron-Core 0.19.3 in {tree}" in err
    assert "note:" not in err
    assert (tree / "letters.py").read_text() == "a\nb\nc\n"

    assert run("apply", tree)[1].splitlines() == ["end: already applied", "words: already applied"]
    code, out, _ = run("check", tree)
    assert code == 0
    assert out.count("applied") == 2
    assert "Say two in words" in out

    assert run("revert", tree)[1].splitlines() == ["end: reverted", "words: reverted"]
    assert run("revert", tree)[1].splitlines() == ["end: not applied", "words: not applied"]
    assert (tree / "letters.py").read_text() == "a\nc\n"


def test_only_takes_the_named_patch(run, tree):
    assert run("apply", tree, "--only", "words")[:2] == (0, "words: applied\n")
    assert (tree / "end.py").read_text() == "y\nz\n"
    code, out, err = run("check", tree, "--json")
    assert (code, err) == (0, f"Megatron-Core 0.19.3 in {tree}\n")
    report = json.loads(out)
    assert (report["megatron"], report["version"]) == (str(tree), "0.19.3")
    assert {patch["name"]: patch["state"] for patch in report["patches"]} == {
        "end": "absent",
        "words": "applied",
    }
    code, _, err = run("revert", tree, "--only", "word")
    assert code == 2
    assert "unknown patch word" in err
    assert "end, words" in err


def test_changes_as_json(run, tree):
    (tree / "letters.py").write_text("a\nb\nc\n")  # of an interrupted run
    for word, states in {
        "apply": {"end": ("absent", "applied"), "words": ("partial", "applied")},
        "revert": {"end": ("applied", "absent"), "words": ("applied", "absent")},
    }.items():
        code, out, err = run(word, tree, "--json")
        assert (code, err) == (0, f"Megatron-Core 0.19.3 in {tree}\n")
        patches = json.loads(out)["patches"]
        assert {patch["name"]: (patch["was"], patch["state"]) for patch in patches} == states
    assert (tree / "end.py").read_text() == "y\nz\n"


def test_a_half_done_patch_is_told_and_completed(run, tree):
    (tree / "letters.py").write_text("a\nb\nc\n")
    code, out, _ = run("check", tree)
    assert code == 1
    assert "words: an interrupted run left it half done: apply or revert completes it" in out
    out = run("apply", tree)[1]
    assert "words: applied, completing an interrupted run" in out
    assert (tree / "core" / "numbers.py").read_text() == "one\ntwo\nthree\n"


def test_a_tree_that_does_not_fit_is_refused_in_one_line(run, tree):
    (tree / "letters.py").write_text("a\nx\nc\n")
    code, out, _ = run("check", tree)
    assert code == 1
    assert "words: letters.py: the block at line 1 of the release is not there" in out
    code, out, err = run("apply", tree)
    assert (code, out) == (2, "")
    assert "words does not fit Megatron-Core 0.19.3" in err
    assert "nothing was changed" in err
    assert (tree / "end.py").read_text() == "y\nz\n"
    assert run("apply", tree, "--only", "end")[0] == 0


@pytest.mark.parametrize("words", ["check", "apply", "revert"])
def test_bad_input_has_exit_code_2(run, tree, tmp_path, words):
    code, out, err = run(words, tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "holds no megatron/core" in err
    (tree / "core" / "package_info.py").write_text("MAJOR = 1\nMINOR = 2\nPATCH = 3\n")
    code, out, err = run(words, tree)
    assert (code, out) == (2, "")
    assert "no patches for Megatron-Core 1.2.3: there are megatron-core-0.19" in err


def test_patching_the_running_pythons_megatron_is_told(run, tree, monkeypatch):
    spec = ModuleSpec("megatron", None, is_package=True)
    spec.submodule_search_locations = [str(tree)]
    monkeypatch.setattr(command, "find_module", lambda name: spec)
    assert "the Megatron of the running Python" in run("apply", tree)[2]
