"""Reading the loss back from what Megatron leaves behind, and drawing it."""

import math
import sys

import pytest
import torch
from matplotlib.image import imread

from kha_megatron.cli import plots
from kha_megatron.errors import DataError, MissingDependencyError
from kha_megatron.recipes.log_lines import read_history, read_log

LOG = """\
using world size: 2, data-parallel size: 1
 [2026-11-21 07:11:45.7] iteration        1/      10 | consumed samples:            8 | \
elapsed time per iteration (ms): 329.3 | learning rate: 5.000000E-03 | lm loss: 4.869645E+00 | \
grad norm: 1.123 | number of nan iterations:   0 |Number of parameters in billions: 0.12
[default1]: [2026-11-21 07:11:46.0] iteration        2/      10 | lm loss: nan | grad norm: 2.5 |
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
    assert second[0] == 2
    assert math.isnan(second[1])
    assert history["grad norm"] == [(1, 1.123), (2, 2.5), (3, 3.0)]
    assert history["elapsed time per iteration (ms)"] == [(1, 329.3)]
    assert "Number of parameters in billions" not in history
    assert "lm loss value" not in history


@pytest.mark.parametrize("content", [None, "no such line\n"])
def test_a_log_without_training_lines_is_an_error(tmp_path, content):
    file = tmp_path / "log.txt"
    if content:
        file.write_text(content)
    with pytest.raises(DataError, match=r"log\.txt"):
        read_log(file)


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
    old, new = range(1, 6), range(6, 10)
    assert history["lm loss"] == [(s, 10.0 - s) for s in old] + [(s, 20.0 - s) for s in new]
    assert history["lm loss validation"] == [(9, 3.5)]


def test_a_folder_without_events_is_an_error(tmp_path):
    with pytest.raises(DataError, match="--tensorboard-dir"):
        read_history(tmp_path)


def test_a_loss_curve_falls_from_left_to_right(tmp_path):
    loss = [(step, 9.0 * 0.9**step) for step in range(60)]
    loss[7] = (7, math.nan)
    plots.loss_curve({"lm loss": loss}, tmp_path / "loss.png")
    pixels = imread(tmp_path / "loss.png")
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    rows, columns = blue.nonzero()
    inside = columns < pixels.shape[1] * 0.8  # the legend has the same colour
    assert rows[inside][columns[inside].argmin()] < rows[inside][columns[inside].argmax()]
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize("history", [{}, {"grad norm": [(1, 2.0)]}, {"lm loss": [(1, math.nan)]}])
def test_nothing_to_draw_is_an_error(tmp_path, history):
    with pytest.raises(DataError, match="no finite 'lm loss'"):
        plots.loss_curve(history, tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere is not a folder"):
        plots.loss_curve({"lm loss": [(1, 2.0)]}, tmp_path / "nowhere" / "loss.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"kha-megatron\[plots\]"):
        plots.loss_curve({"lm loss": [(1, 2.0)]}, tmp_path / "loss.png")


def _pixels(tmp_path, matrices, **options):
    plots.matrix_grid(matrices, tmp_path / "grid.png", title="$T^Q$", **options)
    return imread(tmp_path / "grid.png")


def test_matrices_are_clipped_and_gates_are_not(tmp_path):
    inside = {0: torch.eye(7), 1: torch.eye(7)}
    outside = {0: torch.eye(7) * 5 - torch.eye(7).roll(1, 0) * 3, 1: torch.eye(7)}
    assert (_pixels(tmp_path, inside) == _pixels(tmp_path, outside)).all()
    unlike = _pixels(tmp_path, inside, diverging=True), _pixels(tmp_path, outside, diverging=True)
    assert (unlike[0] != unlike[1]).any()


def test_what_is_not_finite_is_magenta(tmp_path):
    def magenta(matrix):
        pixels = _pixels(tmp_path, {0: matrix})
        return int(((pixels[..., 0] == 1) & (pixels[..., 1] == 0) & (pixels[..., 2] == 1)).sum())

    assert magenta(torch.eye(7)) == 0
    broken = torch.eye(7)
    broken[2, 3] = math.nan
    assert magenta(broken) > 100
    assert magenta(torch.full((7, 7), math.inf)) > 49 * 100


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 18, 23, 36, 97])
def test_every_layer_has_a_cell(n):
    columns, rows = plots._grid(n)
    assert n <= columns * rows < n + columns
    assert columns <= 2 * math.isqrt(n - 1) + 2 if n > 1 else columns == 1
