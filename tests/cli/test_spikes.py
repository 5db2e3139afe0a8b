"""``kha-megatron spikes``: JSON, table and bad input."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.compare.test_spikes import history, raised

VALUES = raised(raised(history(every=2), 300, [0.5, 1.5, 0.9]), 390, [2.0] * 10)


@pytest.fixture
def run(run):
    return lambda *words: run("spikes", *words)


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
    assert code == 0
    assert err == ""
    report = json.loads(out)
    assert report["values"] == 400
    assert report["iterations"] == [2, 800]
    assert report["count"] == 2
    assert report["not_recovered"] == 1
    assert report["median_recovery"] == 6
    assert report["longest_recovery"] == 6
    assert report["highest"] == pytest.approx(2, abs=0.1)
    first, second = report["spikes"]
    assert first["start"] == 602
    assert first["peak"] == 604
    assert first["end"] == 608
    assert first["recovery"] == 6
    assert second["start"] == 782
    assert second["end"] is None
    assert second["recovery"] is None


def test_tensorboard_files_as_a_table(run, tmp_path):
    with SummaryWriter(tmp_path) as writer:
        for iteration, loss in VALUES:
            writer.add_scalar("lm loss", loss, iteration)
            writer.add_scalar("grad-norm", float("nan") if iteration == 302 else 1, iteration)
    out = run(tmp_path)[1]
    assert "2 spikes in 400 values of 'lm loss' (iterations 2 to 800)" in out
    assert "not recovered" in out
    assert ["602", "604"] in [line.split()[:2] for line in out.splitlines()]
    assert run(tmp_path, "--margin", "3", "--window", "16")[1].startswith(
        "Found 0 spikes in 400 values"
    )
    (spike,) = json.loads(run(tmp_path, "--name", "grad-norm", "--json")[1])["spikes"]
    assert (spike["start"], spike["height"], spike["finite"]) == (302, None, False)
