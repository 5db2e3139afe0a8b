"""Find out which rank failed first, and why, from the logs of a torchrun job."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25

_RANK_PREFIX = re.compile(r"^\[[^\]]*\d+\]:")
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?"
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\).*?"
    r"exitcode\s*:\s*(?P<exitcode>-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the end of its log."""

    rank: int | None  # None if torchrun itself failed
    exit_code: int | None  # minus the signal number if the rank was killed (e.g. -9)
    log: Path
    lines: tuple[str, ...]  # the end of the log, up to TAIL_LINES lines

    def __str__(self) -> str:
        if self.rank is None or self.exit_code is None:
            return "torchrun failed without reporting a failed rank"
        if self.exit_code >= 0:
            return f"rank {self.rank} failed with exit code {self.exit_code}"
        hint = " (out of memory?)" if self.exit_code == -signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {signal.Signals(-self.exit_code).name}{hint}"


def find_failure(launcher: Path, ranks: Path) -> Failure:
    """Find the failed rank of a local run.

    Args:
        launcher: Directory with torchrun's own ``stdout.log`` and ``stderr.log``.
        ranks: torchrun's ``--log-dir``, containing ``<run>/attempt_<n>/<local rank>/``.
    """
    report = launcher / "stderr.log"
    cause = _root_cause(_last_lines(report, 1000))
    if cause is None:
        return Failure(None, None, report, _last_lines(report))
    rank, local_rank, exit_code = cause
    attempts = sorted(ranks.glob(f"*/attempt_*/{local_rank}"))
    stderr, stdout = (
        (attempts[-1] if attempts else launcher) / f"{name}.log" for name in ("stderr", "stdout")
    )
    log = stderr if _last_lines(stderr, 1) or not _last_lines(stdout, 1) else stdout
    return Failure(rank, exit_code, log, _without_usage(_last_lines(log), exit_code))


def find_failure_in_text(text: str, log: Path) -> Failure:
    """Find the failed rank from ``text``, the tail of a combined log of torchrun and its ranks."""
    lines = text.rstrip().splitlines()
    if (cause := _root_cause(lines)) is None:
        return Failure(None, None, log, _without_prefixes(lines))
    rank, local_rank, exit_code = cause
    own = [line for line in lines if line.startswith(f"[default{local_rank}]:")]
    return Failure(rank, exit_code, log, _without_usage(_without_prefixes(own or lines), exit_code))


def _root_cause(lines: Sequence[str]) -> tuple[int, int, int] | None:
    """Parse torchrun's failure report. Returns ``(rank, local_rank, exit_code)``."""
    if (table := _ROOT_CAUSE.search("\n".join(lines))) is None:
        return None
    exit_code = int(table["exitcode"])
    if exit_code == 2:  # for invalid arguments, only rank 0 prints the error
        return 0, 0, exit_code
    return int(table["rank"]), int(table["local_rank"]), exit_code


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
    return _without_prefixes(text.rstrip().splitlines(), count)


def _without_prefixes(lines: Sequence[str], count: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last ``count`` lines without prefixes such as ``[default0]:``."""
    return tuple(_RANK_PREFIX.sub("", line.rstrip()) for line in lines[-count:])
