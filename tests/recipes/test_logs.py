"""Progress and failures are read from the very lines that Megatron and torchrun write."""

import math

import pytest

from kha_megatron.recipes.log_lines import Step, new_lines, parse_step, read_log, read_steps
from kha_megatron.recipes.logs import TAIL_LINES, find_failure

LINE = (
    "[default1]: [2026-11-20 10:00:00.123456] iteration       10/     300 | consumed samples:"
    "           80 | elapsed time per iteration (ms): 884.1 | learning rate: 1.810226E-03 | "
    "global batch size:     8 | lm loss: 8.221897E+00 | loss scale: 1.0 | grad norm: 1.955 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (LINE, Step(10, 300, 80, 0.8841, 8.221897)),
        (  # an interval of which no iteration counted: Megatron prints its sum
            LINE.replace("8.221897E+00", "0.000000E+00").replace(
                "iterations:   0", "iterations:   1"
            ),
            Step(10, 300, 80, 0.8841, None),
        ),
        (" iteration 1/ 3 | lm loss: 1.5E+00 |", Step(1, 3, None, None, 1.5)),
        (
            " validation loss at iteration 10 | lm loss value: 8.2E+00 | lm loss PPL: 3.7E+03",
            None,
        ),
        ("saving checkpoint at iteration      20 to /x in torch_dist format", None),
        ("", None),
    ],
)
def test_parse_step(line, step):
    assert parse_step(line) == step


def test_a_loss_that_is_no_number_is_read_though_megatron_leaves_it_out(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        f"{LINE}\n{LINE.replace(' lm loss: 8.221897E+00 |', '')}\n".replace("10/", "9/", 1)
    )
    (_, number), (iteration, none) = read_log(log)["lm loss"]
    assert (number, iteration) == (8.221897, 10)
    assert math.isnan(none)


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path):
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as writer, log.open("rb") as reader:
        writer.write(LINE.encode() + b"\nhalf")
        assert [parse_step(line).iteration for line in new_lines(reader)] == [10]
        assert list(new_lines(reader)) == []
        writer.write(b" a \xff line\n")
        assert list(new_lines(reader)) == ["half a \ufffd line"]
    assert [step.loss for step in read_steps(log)] == [8.221897]


TABLE = """\
E1121 07:15:03 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: {code})
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.sh FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_07:15:03
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6034)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_07:15:03
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 6033)
  error_file: <N/A>
============================================================
"""


@pytest.fixture
def run(tmp_path):
    """Log folders as NeMo-Run and torchrun lay them out; returns ``(launcher, ranks)``."""
    launcher, ranks = tmp_path / "train" / "0", tmp_path / "torchelastic"
    launcher.mkdir(parents=True)
    for rank in (0, 1):
        folder = ranks / "77_abc" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"rank {rank} says\n")
        (folder / "stderr.log").write_text("")
    return launcher, ranks


def write_stderr(run, rank: int, text: str) -> None:
    (run[1] / "77_abc" / "attempt_0" / str(rank) / "stderr.log").write_text(text)


def test_the_rank_that_failed_first_is_shown_not_the_one_that_was_stopped(run):
    (run[0] / "stderr.log").write_text(TABLE.format(code=1))
    write_stderr(run, 0, "terminated\n")
    write_stderr(run, 1, "\n".join(f"line {i}" for i in range(100)) + "\nRuntimeError: boom\n\n")
    failure = find_failure(*run)
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert failure.lines[-1] == "RuntimeError: boom"
    assert len(failure.lines) == TAIL_LINES
    assert str(failure) == "rank 1 failed with exit code 1"


def test_a_silent_rank_shows_its_output(run):
    (run[0] / "stderr.log").write_text(TABLE.format(code=-9))
    failure = find_failure(*run)
    assert failure.lines == ("rank 1 says",)
    assert str(failure) == "rank 1 was killed by SIGKILL (out of memory?)"


def test_bad_input_is_explained_by_rank_0_without_the_usage(run):
    (run[0] / "stderr.log").write_text(TABLE.format(code=2))
    write_stderr(run, 0, "usage: x\n  [--many]\nx: error: unrecognized arguments: --lrr 3\n")
    write_stderr(run, 1, "a warning\n")
    failure = find_failure(*run)
    assert failure.lines == ("x: error: unrecognized arguments: --lrr 3",)


def test_torchrun_that_fails_itself(run):
    (run[0] / "stderr.log").write_text("torchrun: error: unknown option\n")
    failure = find_failure(*run)
    assert failure.rank is None
    assert failure.lines == ("torchrun: error: unknown option",)
    assert "torchrun failed" in str(failure)


def test_a_log_of_gigabytes_is_not_read_whole(run, monkeypatch):
    (run[0] / "stderr.log").write_text(TABLE.format(code=1))
    big = run[1] / "77_abc/attempt_0/1/stderr.log"
    with big.open("wb") as file:
        file.seek(1 << 32)  # sparse: takes no room
        file.write(b"\nlast words\n")
    assert find_failure(*run).lines[-1] == "last words"
