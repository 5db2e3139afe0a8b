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

INVALID_INPUT = 2
"""Exit code of ranks with invalid arguments or files."""

_RANK_PREFIX = re.compile(r"^\[[^\]]*\d+\]:")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROOT_CAUSE_FIELD = re.compile(r"\s*(time|host|rank|exitcode)\s*:\s*(.*)")
_RANK_FIELD = re.compile(r"(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)")
_MAX_LINE_BYTES = 1 << 16
_TYPICAL_LINE_BYTES = 512
"""Lines at the end of a log are read on the assumption that they are not longer on average."""
_REPORT_LINES = 1000
"""How many lines of torchrun's log are searched for its report, which is at the end."""


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the end of its log."""

    rank: int | None
    """None if torchrun itself failed."""
    exit_code: int | None
    """Minus the signal number if the rank was killed, e.g. -9."""
    log: Path
    lines: tuple[str, ...]
    """The end of the log, up to ``TAIL_LINES`` lines."""
    host: str | None = None
    """None if the rank ran on this machine."""

    def __str__(self) -> str:
        if self.rank is None or self.exit_code is None:
            return "torchrun failed without reporting a failed rank"
        rank = f"rank {self.rank}"
        if self.host:
            rank += f" on {self.host}"
        if self.exit_code >= 0:
            return f"{rank} failed with exit code {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"{rank} was killed by {name}{hint}"


@dataclass(frozen=True, kw_only=True)
class _RootCause:
    """The failure that a torchrun agent observed first. There is one agent per node."""

    time: str
    """ISO format, in seconds."""
    host: str
    rank: int
    local_rank: int
    exit_code: int


def find_failure(torchrun_logs: Path, rank_logs: Path) -> Failure:
    """Find the failed rank of a local run.

    Args:
        torchrun_logs: Directory with torchrun's own ``stdout.log`` and ``stderr.log``.
        rank_logs: torchrun's ``--log-dir``, containing ``<run>/attempt_<n>/<local rank>/``.
    """
    report = torchrun_logs / "stderr.log"
    cause = _find_root_cause(_last_lines(report, _REPORT_LINES))
    if cause is None:
        return _unknown_failure(report)
    attempts = sorted(rank_logs.glob(f"*/attempt_*/{cause.local_rank}"))
    folder = attempts[-1] if attempts else torchrun_logs
    log = folder / "stderr.log"
    stdout_log = folder / "stdout.log"
    if not _last_lines(log, 1) and _last_lines(stdout_log, 1):
        log = stdout_log
    return Failure(
        rank=cause.rank,
        exit_code=cause.exit_code,
        log=log,
        lines=_without_usage(_last_lines(log), cause.exit_code),
    )


def find_failure_in_log(log: Path) -> Failure:
    """Find the rank that failed first in a combined log of all nodes, whose lines start with
    :data:`LINE_PREFIX`.

    Reads the whole log twice, since a log with many nodes can be long after the first failure.
    """
    cause = _find_root_cause(_read_lines(log))
    if cause is None:
        return _unknown_failure(log)
    prefix = f"[default{cause.rank}]:"
    lines_of_rank: deque[str] = deque(maxlen=TAIL_LINES)
    for line in _read_lines(log):
        if line.startswith(prefix):
            lines_of_rank.append(line)
    last_lines = _without_prefixes(lines_of_rank) or _last_lines(log)
    return Failure(
        rank=cause.rank,
        exit_code=cause.exit_code,
        log=log,
        lines=_without_usage(last_lines, cause.exit_code),
        host=cause.host,
    )


def _unknown_failure(log: Path) -> Failure:
    """Return the failure of a job whose log does not tell which rank failed."""
    return Failure(rank=None, exit_code=None, log=log, lines=_last_lines(log))


def _find_root_cause(lines: Iterable[str]) -> _RootCause | None:
    """Find the earliest failure in the reports of all torchrun agents."""
    earliest: _RootCause | None = None
    for cause in _parse_reports(lines):
        if earliest is None or cause.time < earliest.time:
            earliest = cause
    return earliest


def _parse_reports(lines: Iterable[str]) -> Iterator[_RootCause]:
    """Yield the failure in each report. Reports consist of lines such as ``time : 2026-01-01``."""
    fields: dict[str, str] | None = None  # of the current report
    for line in lines:
        if _ROOT_CAUSE in line:
            fields = {}
            continue
        match = _ROOT_CAUSE_FIELD.match(line)
        if fields is None or match is None:
            continue
        name, value = match.groups()
        fields[name] = value
        if name == "exitcode":
            cause = _parse_cause(fields)
            if cause is not None:
                yield cause
            fields = None


def _parse_cause(fields: dict[str, str]) -> _RootCause | None:
    """Parse the fields of a report. Returns None if they are incomplete."""
    rank_match = _RANK_FIELD.match(fields.get("rank", ""))
    exit_code_match = re.match(r"-?\d+", fields["exitcode"])
    if rank_match is None or exit_code_match is None:
        return None
    rank = int(rank_match["rank"])
    local_rank = int(rank_match["local_rank"])
    exit_code = int(exit_code_match[0])
    if exit_code == INVALID_INPUT:  # only the first rank of a node prints the error
        rank -= local_rank
        local_rank = 0
    return _RootCause(
        time=fields.get("time", ""),
        host=fields.get("host", ""),
        rank=rank,
        local_rank=local_rank,
        exit_code=exit_code,
    )


def _read_lines(log: Path) -> Iterator[str]:
    """Yield the lines of a file of any size. Very long lines are split."""
    with log.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            yield line.decode(errors="replace").rstrip()


def _without_usage(lines: tuple[str, ...], exit_code: int) -> tuple[str, ...]:
    """Drop the usage text that argparse prints before an error."""
    if exit_code != INVALID_INPUT:
        return lines
    start = 0
    for index, line in enumerate(lines):
        if "error: " in line:
            start = index
    return lines[start:]


def _last_lines(log: Path, count: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines of a log, without prefixes. Empty if the file does not exist."""
    try:
        with log.open("rb") as file:
            start = log.stat().st_size - _TYPICAL_LINE_BYTES * count
            file.seek(max(0, start))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    lines = text.rstrip().splitlines()
    return _without_prefixes(lines[-count:])


def _without_prefixes(lines: Iterable[str]) -> tuple[str, ...]:
    """Return lines without prefixes such as ``[default0]:``."""
    return tuple(_RANK_PREFIX.sub("", line.rstrip()) for line in lines)
