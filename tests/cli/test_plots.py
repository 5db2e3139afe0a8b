"""Reading losses from logs and TensorBoard files, and plotting them."""

import math

import pytest

from kha_megatron.recipes.log_lines import read_history, read_log

LOG = """\
using world size: 2, data-parallel size: 1
 [2026-11-21 07:11:45.7] iteration        1/      10 | consumed samples:            8 | \
elapsed time per iteration (ms): 329.3 | learning rate: 5.000000E-03 | lm loss: 4.869645E+00 | \
grad norm: 1.123 | number of nan iterations:   0 |Number of parameters in billions: 0.12
[default1]: [2026-11-21 07:11:46.0] iteration        2/      10 | grad norm: 2.5 |
 [2026-11-21 07:11:46.1] iteration        3/      10 | lm loss: 4.3E+00 | grad norm: 9.0 |
saving checkpoint at iteration       3 to somewhere
 [2026-11-21 07:12:46.1] iteration        3/      10 | lm loss: 4.2E+00 | grad norm: 3.0 |
 validation loss at iteration 10 on validation set | lm loss value: 3.385478E+00 | PPL: 2.9 |
"""


def _events(folder, name, values):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for step, value in values:
            writer.add_scalar(name, value, step)
            writer.add_scalar(f"{name} vs samples", value, step * 8)


def test_a_log_is_parsed(tmp_path):
    (tmp_path / "log.txt").write_text(LOG)
    history = read_log(tmp_path / "log.txt")
    (first, second, third) = history["lm loss"]
    assert (first, third) == ((1, 4.869645), (3, 4.2)), "a repeated iteration counts the last time"
    assert second == (2, pytest.approx(math.nan, nan_ok=True))  # Megatron omits it
    assert history["grad norm"] == [(1, 1.123), (2, 2.5), (3, 3.0)]
    assert history["elapsed time per iteration (ms)"] == [(1, 329.3)]
    assert "Number of parameters in billions" not in history
    assert "lm loss value" not in history


def test_tensorboard_history_of_a_resumed_run(tmp_path, monkeypatch):
    now = 1_700_000_000
    monkeypatch.setattr("time.time", lambda: now)
    _events(tmp_path, "lm loss", [(step, 10.0 - step) for step in range(1, 8)])
    now += 100  # killed at 7, resumed from 5
    _events(tmp_path, "lm loss", [(step, 20.0 - step) for step in range(6, 10)])
    now += 100
    _events(tmp_path, "lm loss validation", [(9, 3.5), (9, 3.25)])  # the second is the test loss
    history = read_history(tmp_path)
    assert set(history) == {"lm loss", "lm loss validation"}
    expected = [(step, 10.0 - step) for step in range(1, 6)]
    expected += [(step, 20.0 - step) for step in range(6, 10)]
    assert history["lm loss"] == expected
    assert history["lm loss validation"] == [(9, 3.5)]
