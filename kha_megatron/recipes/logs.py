"""Find the rank that ended a run, from torchrun's report and the rank's own log."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25
"""Lines of a failing rank's log that are shown."""

_RANK_PREFIX = re.compile(r"^\[[^\]]*\d+\]:")
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?"
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\).*?"
    r"exitcode\s*:\s*(?P<exitcode>-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """Which rank ended a run, and the end of its log."""

    rank: int | None
    """Rank whose failure torchrun observed first; None if torchrun itself failed."""
    exit_code: int | None
    """Exit code of that rank; the negative signal number if a signal killed it."""
    log: Path
    lines: tuple[str, ...]
    """Last lines of ``log``, at most :data:`TAIL_LINES`."""

    def __str__(self) -> str:
        """Return one line such as ``rank 1 was killed by SIGKILL (out of memory?)``."""
        if self.rank is None or self.exit_code is None:
            return "torchrun failed before it could name a rank"
        if self.exit_code >= 0:
            return f"rank {self.rank} failed with exit code {self.exit_code}"
        hint = " (out of memory?)" if self.exit_code == -signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {signal.Signals(-self.exit_code).name}{hint}"


def find_failure(launcher: Path, ranks: Path) -> Failure:
    """Find what ended a run on this machine.

    Args:
        launcher: directory with torchrun's own ``stdout.log`` and ``stderr.log``.
        ranks: torchrun's ``--log-dir``, with ``<run>/attempt_<n>/<local rank>/stderr.log``.
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
    """Find what ended a run in the end (``text``) of a log that torchrun and all ranks wrote."""
    lines = text.rstrip().splitlines()
    if (cause := _root_cause(lines)) is None:
        return Failure(None, None, log, _without_prefixes(lines))
    rank, local_rank, exit_code = cause
    own = [line for line in lines if line.startswith(f"[default{local_rank}]:")]
    return Failure(rank, exit_code, log, _without_usage(_without_prefixes(own or lines), exit_code))


def _root_cause(lines: Sequence[str]) -> tuple[int, int, int] | None:
    """Return rank, local rank and exit code of the first failure in torchrun's report."""
    if (table := _ROOT_CAUSE.search("\n".join(lines))) is None:
        return None
    exit_code = int(table["exitcode"])
    if exit_code == 2:  # bad input: only rank 0 prints the reason
        return 0, 0, exit_code
    return int(table["rank"]), int(table["local_rank"]), exit_code


def _without_usage(lines: tuple[str, ...], exit_code: int) -> tuple[str, ...]:
    """Remove the usage text before an argparse error, which exits with code 2."""
    found = [i for i, line in enumerate(lines) if "error: " in line]
    return lines[found[-1] :] if found and exit_code == 2 else lines


def _last_lines(log: Path, count: int = TAIL_LINES) -> tuple[str, ...]:
    """Read the last lines; () if the file is missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 512 * count))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return _without_prefixes(text.rstrip().splitlines(), count)


def _without_prefixes(lines: Sequence[str], count: int = TAIL_LINES) -> tuple[str, ...]:
    """Return the last lines without torchrun's prefixes such as ``[default0]:``."""
    return tuple(_RANK_PREFIX.sub("", line.rstrip()) for line in lines[-count:])
