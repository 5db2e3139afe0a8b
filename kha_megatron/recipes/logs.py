"""Find out which rank failed first, and why, from the logs of a torchrun job."""

import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25

LINE_PREFIX = "[${role_name}${rank}]:"
"""Template for torchrun's prefix of each line. By default, it contains the local rank, which does
not identify a rank in a log of several nodes."""

_RANK_PREFIX = re.compile(r"^\[[^\]]*\d+\]:")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROOT_CAUSE_FIELD = re.compile(r"\s*(time|host|rank|exitcode)\s*:\s*(.*)")
_LOCAL_RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the end of its log."""

    rank: int | None  # None if torchrun itself failed
    exit_code: int | None  # minus the signal number if the rank was killed (e.g. -9)
    log: Path
    lines: tuple[str, ...]  # the end of the log, up to TAIL_LINES lines
    host: str | None = None  # None if the rank ran on this machine

    def __str__(self) -> str:
        if self.rank is None or self.exit_code is None:
            return "torchrun failed without reporting a failed rank"
        rank = f"rank {self.rank}" + (f" on {self.host}" if self.host else "")
        if self.exit_code >= 0:
            return f"{rank} failed with exit code {self.exit_code}"
        hint = " (out of memory?)" if self.exit_code == -signal.SIGKILL else ""
        return f"{rank} was killed by {signal.Signals(-self.exit_code).name}{hint}"


@dataclass(frozen=True, kw_only=True)
class _RootCause:
    """The failure that a torchrun agent observed first. There is one agent per node."""

    time: str
    """ISO format, in seconds."""
    host: str
    rank: int
    local_rank: int
    exit_code: int


def find_failure(launcher: Path, ranks: Path) -> Failure:
    """Find the failed rank of a local run.

    Args:
        launcher: Directory with torchrun's own ``stdout.log`` and ``stderr.log``.
        ranks: torchrun's ``--log-dir``, containing ``<run>/attempt_<n>/<local rank>/``.
    """
    report = launcher / "stderr.log"
    cause = _find_root_cause(_last_lines(report, 1000))
    if cause is None:
        return Failure(None, None, report, _last_lines(report))
    attempts = sorted(ranks.glob(f"*/attempt_*/{cause.local_rank}"))
    stderr, stdout = (
        (attempts[-1] if attempts else launcher) / f"{name}.log" for name in ("stderr", "stdout")
    )
    log = stderr if _last_lines(stderr, 1) or not _last_lines(stdout, 1) else stdout
    lines = _without_usage(_last_lines(log), cause.exit_code)
    return Failure(cause.rank, cause.exit_code, log, lines)


def find_failure_in_log(log: Path) -> Failure:
    """Find the rank that failed first in a combined log of all nodes, whose lines start with
    :data:`LINE_PREFIX`.

    Reads the whole log twice, since a log with many nodes can be long after the first failure.
    """
    cause = _find_root_cause(_read_lines(log))
    if cause is None:
        return Failure(None, None, log, _last_lines(log))
    prefix = f"[default{cause.rank}]:"
    own_lines = deque(
        (line for line in _read_lines(log) if line.startswith(prefix)), maxlen=TAIL_LINES
    )
    lines = _without_prefixes(own_lines) if own_lines else _last_lines(log)
    return Failure(
        cause.rank,
        cause.exit_code,
        log,
        _without_usage(lines, cause.exit_code),
        cause.host,
    )


def _find_root_cause(lines: Iterable[str]) -> _RootCause | None:
    """Find the earliest failure in the reports of all torchrun agents."""
    earliest: _RootCause | None = None
    for cause in _parse_reports(lines):
        if earliest is None or cause.time < earliest.time:
            earliest = cause
    return earliest


def _parse_reports(lines: Iterable[str]) -> Iterator[_RootCause]:
    fields: dict[str, str] | None = None  # of the current report
    for line in lines:
        if _ROOT_CAUSE in line:
            fields = {}
        elif fields is not None and (match := _ROOT_CAUSE_FIELD.match(line)):
            fields[match[1]] = match[2]
            if match[1] == "exitcode":
                if (cause := _parse_cause(fields)) is not None:
                    yield cause
                fields = None


def _parse_cause(fields: dict[str, str]) -> _RootCause | None:
    ranks = _LOCAL_RANK.match(fields.get("rank", ""))
    exit_code = re.match(r"-?\d+", fields["exitcode"])
    if ranks is None or exit_code is None:
        return None
    rank, local_rank = int(ranks[1]), int(ranks[2])
    if int(exit_code[0]) == 2:  # for invalid input, only the first rank of a node prints the error
        rank, local_rank = rank - local_rank, 0
    return _RootCause(
        time=fields.get("time", ""),
        host=fields.get("host", ""),
        rank=rank,
        local_rank=local_rank,
        exit_code=int(exit_code[0]),
    )


def _read_lines(log: Path) -> Iterator[str]:
    """Yield the lines of a file of any size. Very long lines are split."""
    with log.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            yield line.decode(errors="replace").rstrip()


def _without_usage(lines: tuple[str, ...], exit_code: int) -> tuple[str, ...]:
    """Drop the usage text that argparse prints before an error (exit code 2)."""
    found = [i for i, line in enumerate(lines) if "error: " in line]
    return lines[found[-1] :] if found and exit_code == 2 else lines


def _last_lines(log: Path, count: int = TAIL_LINES) -> tuple[str, ...]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 512 * count))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return _without_prefixes(text.rstrip().splitlines()[-count:])


def _without_prefixes(lines: Iterable[str]) -> tuple[str, ...]:
    """Return lines without prefixes such as ``[default0]:``."""
    return tuple(_RANK_PREFIX.sub("", line.rstrip()) for line in lines)
