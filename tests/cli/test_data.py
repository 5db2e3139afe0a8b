"""Output and warnings of ``kha-megatron data``."""

import json

import pytest


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.py").write_text("print('[bold]one[/]')\n" * 7)
    (folder / "[red]two.py").write_text("print('two')\n")
    (folder / "[bold]empty.py").touch()
    return folder


def test_prepare_then_show(run, source, tmp_path):
    out = tmp_path / "out"
    options = ["--out", out, "--vocab-size", 270, "--max-file-bytes", "100"]
    code, stdout, stderr = run("data", "prepare", "--from", source, *options, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    assert report["files"] == 2
    assert report["split_files"] == 1
    assert report["documents"] == 3
    assert report == json.loads((out / "data.json").read_text())
    assert "tokenizing" in stderr
    assert "2 files" in stderr
    for split in ("969,30,1", "99,1,0"):  # Megatron would hang with either
        assert f"--split {split} leaves no document for validation" in " ".join(stderr.split())

    code, stdout, stderr = run("data", "show", out, "--json")
    assert code == 0, stderr
    assert json.loads(stdout) == report
    code, stdout, _ = run("data", "show", out)
    assert code == 0
    flat = stdout.replace("\n", "").replace("│", "").replace(" ", "")
    assert str(source / "[bold]empty.py") in flat  # neither markup nor truncated
    assert f"--data-path {out}/corpus" in stdout
    assert f"--tokenizer-model {out}/tokenizer" in stdout
    assert "text <|endoftext|>" in stdout  # the tokens around each document

    for name in ("tokens_before", "tokens_after"):  # of an older version
        del report[name]
    (out / "data.json").write_text(json.dumps(report))
    code, older, _ = run("data", "show", out)
    assert code == 0
    assert older == stdout
