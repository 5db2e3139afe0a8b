"""``kha-megatron spikes`` as a user meets it."""

import json
import sys

import pytest
from torch.utils.tensorboard import SummaryWriter

from kha_megatron import cli
from tests.compare.test_spikes import history, raised

VALUES = raised(raised(history(every=2), 300, [0.5, 1.5, 0.9]), 390, [2.0] * 10)


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kha-megatron", "spikes", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        streams = capsys.readouterr()
        return exit_.value.code, streams.out, streams.err

    return run


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "slurm-17.out"
    lines = ["some other text\n"]
    for iteration, loss in VALUES:
        lines.append(
            f"3: [2026-11-21 10:00:00] iteration {iteration:8d}/     900 | consumed samples: "
            f"{6 * iteration} | lm loss: {loss:.6E} | grad norm: 1.000 |\n"
        )
    file.write_text("".join(lines))
    return file


def test_a_log_as_json(run, log):
    code, out, err = run(log, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["run"] == str(log)
    assert (answer["values"], answer["iterations"]) == (400, [2, 800])
    assert answer["definition"] == {"window": 64, "deviations": 6.0, "margin": 0.1}
    assert (answer["count"], answer["not_recovered"]) == (2, 1)
    assert (answer["median_recovery"], answer["longest_recovery"]) == (6, 6)
    assert answer["highest"] == pytest.approx(2, abs=0.1)
    first, second = answer["spikes"]
    assert (first["start"], first["peak"], first["end"], first["recovery"]) == (602, 604, 608, 6)
    assert (second["start"], second["end"], second["recovery"]) == (782, None, None)


def test_a_tensorboard_folder_as_a_table(run, tmp_path):
    with SummaryWriter(tmp_path) as writer:
        for iteration, loss in VALUES:
            writer.add_scalar("lm loss", loss, iteration)
            writer.add_scalar("grad-norm", float("nan") if iteration == 302 else 1, iteration)
    code, out, _ = run(tmp_path)
    assert code == 0
    assert "2 spikes in 400 values of 'lm loss', iterations 2 to 800" in out
    assert "not recovered" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["602", "604"] in [row[:2] for row in rows]
    code, out, _ = run(tmp_path, "--margin", "3", "--window", "16")
    assert code == 0
    assert out.startswith("0 spikes in 400 values")
    code, out, _ = run(tmp_path, "--name", "grad-norm", "--json")
    (spike,) = json.loads(out)["spikes"]
    assert (spike["start"], spike["height"], spike["finite"]) == (302, None, False)


def test_what_cannot_be_looked_at_is_refused(run, log, tmp_path):
    for words, complaint in (
        ([log, "--name", "mtp loss"], "has no 'mtp loss'. Choose from"),
        ([log, "--window", "2"], "Expected a window of 4 or more"),
        ([log, "--window", "2000"], "got 400. Choose a smaller --window"),
        ([tmp_path / "missing"], "missing: No such file"),
        ([tmp_path], "Expected TensorBoard files"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert complaint in " ".join(err.split())
