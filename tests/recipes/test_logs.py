"""Progress and failures from log lines of Megatron and torchrun."""

import pytest

from kha_megatron.recipes.log_lines import Step, parse_step, read_new_lines, read_steps
from kha_megatron.recipes.logs import TAIL_LINES, find_failure, find_failure_in_log

LINE = (
    "[default1]: [2026-11-20 10:00:00.123456] iteration       10/     300 | consumed samples:"
    "           80 | elapsed time per iteration (ms): 884.1 | learning rate: 1.810226E-03 | "
    "global batch size:     8 | lm loss: 8.221897E+00 | loss scale: 1.0 | grad norm: 1.955 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("line", "step"),
    [
        (LINE, Step(10, 300, 80, 0.8841, 8.221897)),
        (  # all iterations were skipped
            LINE.replace("8.221897E+00", "0.000000E+00").replace(
                "iterations:   0",
                "iterations:   1",
            ),
            Step(10, 300, 80, 0.8841, None),
        ),
        (" iteration 1/ 3 | lm loss: 1.5E+00 |", Step(1, 3, None, None, 1.5)),
        ("", None),
    ],
)
def test_parse_step(line, step):
    assert parse_step(line) == step


def test_incomplete_line_is_read_after_its_end(tmp_path):
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as writer, log.open("rb") as reader:
        writer.write(LINE.encode() + b"\nhalf")
        assert [parse_step(line).iteration for line in read_new_lines(reader)] == [10]
        assert list(read_new_lines(reader)) == []
        writer.write(b" a \xff line\n")
        assert list(read_new_lines(reader)) == ["half a \ufffd line"]
    assert [step.loss for step in read_steps(log)] == [8.221897]


REPORT = """\
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
USAGE = "usage: x\n  [--many]\n"
ERROR = "x: error: unrecognized arguments: --lrr 3"


@pytest.fixture
def logs(tmp_path):
    """Write logs as NeMo-Run and torchrun do; return the directories of launcher and ranks."""

    def write(report: str, *errors: str):
        launcher = tmp_path / "train" / "0"
        ranks = tmp_path / "torchelastic"
        launcher.mkdir(parents=True)
        (launcher / "stderr.log").write_text(report)
        for rank, text in enumerate(errors):
            directory = ranks / "77_abc" / "attempt_0" / str(rank)
            directory.mkdir(parents=True)
            (directory / "stdout.log").write_text(f"output of rank {rank}\n")
            (directory / "stderr.log").write_text(text)
        return launcher, ranks

    return write


@pytest.mark.fast
@pytest.mark.parametrize(
    ("report", "errors", "lines", "text"),
    [
        (
            REPORT.format(code=1),
            ("terminated\n", "x\n" * 100 + "RuntimeError: boom\n\n"),
            ("x",) * (TAIL_LINES - 1) + ("RuntimeError: boom",),
            "rank 1 failed with exit code 1",
        ),
        (  # stdout of a rank without stderr
            REPORT.format(code=-9),
            ("", ""),
            ("output of rank 1",),
            "rank 1 was killed by SIGKILL (out of memory?)",
        ),
        (  # bad input: argparse's error of rank 0, without the usage text
            REPORT.format(code=2),
            (f"{USAGE}{ERROR}\n", "a warning\n"),
            (ERROR,),
            "rank 0 failed with exit code 2",
        ),
        ("torchrun: error: x\n", (), ("torchrun: error: x",), "torchrun failed without"),
    ],
)
def test_failure_is_that_of_the_first_rank_that_failed(report, errors, lines, text, logs):
    failure = find_failure(*logs(report, *errors))
    assert failure.lines == lines
    assert str(failure).startswith(text)


def test_earliest_failure_of_64_nodes(tmp_path):
    """Node 37 fails first. All other nodes lose their connection and fill the end of the log."""
    report = REPORT.replace("localhost", "kn{node}").replace("07:15:03", "07:15:{second}")
    report = report.replace("rank      : 1", "rank      : {rank}")
    parts = ["[default297]: RuntimeError: CUDA error: uncorrectable ECC error\n"]
    parts += ["[default29]: another rank\n", "[default297]:   the last line\n"]
    for node in [*range(37), *range(38, 64)]:
        parts.append(f"[default{8 * node + 1}]: RuntimeError: Connection closed by peer\n" * 100)
        parts.append(
            report.format(
                code=1,
                node=node,
                second="10",
                rank=8 * node + 1,
            )
        )
        if node == 3:
            parts.append(report.format(code=-6, node=37, second="09", rank=297))
    text = "".join(parts)
    log = tmp_path / "log"
    log.write_text(text)
    assert len(text) - text.index("host      : kn37") > 1 << 17
    failure = find_failure_in_log(log)
    assert str(failure) == "rank 297 on kn37 was killed by SIGABRT"
    assert failure.lines == (
        " RuntimeError: CUDA error: uncorrectable ECC error",
        "   the last line",
    )


def test_invalid_input_on_one_node(tmp_path):
    report = REPORT.format(code=2).replace("rank      : 1", "rank      : 9")
    log = tmp_path / "log"
    log.write_text(f"[default8]:error: No data\n[default9]:other\n[default0]:other\n{report}")
    failure = find_failure_in_log(log)
    assert str(failure) == "rank 8 on localhost failed with exit code 2"
    assert failure.lines == ("error: No data",)


def test_only_the_end_of_a_huge_log_is_read(logs):
    launcher, ranks = logs(REPORT.format(code=1), "", "")
    with (ranks / "77_abc/attempt_0/1/stderr.log").open("wb") as file:
        file.seek(1 << 32)  # sparse
        file.write(b"\nlast words\n")
    assert find_failure(launcher, ranks).lines[-1] == "last words"
