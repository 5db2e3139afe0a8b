"""What ended a run: torchrun's report of a failure, and the guilty rank's own log."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 25
"""How much of a failing rank's log is kept for the user."""

_STREAMS = ("stderr.log", "stdout.log")
_RANK_PREFIX = re.compile(r"^\[[^\]]*\d+\]:")
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?"
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\).*?"
    r"exitcode\s*:\s*(?P<exitcode>-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """Which rank ended a run, and its last words."""

    rank: int | None
    """Rank whose failure torchrun saw first; None where torchrun itself failed."""

    exit_code: int | None
    """Exit code of that rank; minus the signal's number where a signal killed it."""

    log: Path
    """File that the lines come from."""

    lines: tuple[str, ...]
    """Its last lines, at most :data:`TAIL_LINES`."""

    def __str__(self) -> str:
        """One line: ``rank 1 was killed by SIGKILL (out of memory?)``."""
        if self.rank is None or self.exit_code is None:
            return "torchrun failed before it could name a rank"
        if self.exit_code >= 0:
            return f"rank {self.rank} failed with exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"rank {self.rank} was killed by {name}{hint}"


def find_failure(launcher: Path, ranks: Path) -> Failure:
    """What ended a run, from torchrun's table and the rank's own log.

    Args:
        launcher: folder with torchrun's own ``stdout.log`` and ``stderr.log``.
        ranks: folder of torchrun's ``--log-dir``: ``<run>/attempt_<n>/<local rank>/stderr.log``.
    """
    cause = _root_cause(_last_lines(launcher / "stderr.log", 1000))
    if cause is None:
        log = launcher / "stderr.log"
        return Failure(None, None, log, _last_lines(log))
    rank, local_rank, exit_code = cause
    attempts = sorted(ranks.glob(f"*/attempt_*/{local_rank}"))
    folder = attempts[-1] if attempts else launcher
    logs = (p for n in _STREAMS if (p := folder / n).is_file() and p.stat().st_size)
    log = next(logs, folder / _STREAMS[0])
    lines = _last_lines(log)
    return Failure(rank, exit_code, log, _complaint(lines) if exit_code == 2 else lines)


def failure_in(text: str, log: str) -> Failure:
    """What ended a run, from the end of the one log that torchrun and all ranks wrote.

    Args:
        text: its last part.
        log: where it lies, perhaps on another machine.
    """
    lines = text.rstrip().splitlines()
    if (cause := _root_cause(lines)) is None:
        return Failure(None, None, Path(log), _plain(lines))
    rank, local_rank, exit_code = cause
    own = [line for line in lines if line.startswith(f"[default{local_rank}]:")]
    found = _plain(own or lines)
    return Failure(rank, exit_code, Path(log), _complaint(found) if exit_code == 2 else found)


def _root_cause(lines: Sequence[str]) -> tuple[int, int, int] | None:
    """Rank, rank on its machine, and exit code of whom torchrun saw failing first."""
    if (table := _ROOT_CAUSE.search("\n".join(lines))) is None:
        return None
    exit_code = int(table["exitcode"])
    if exit_code == 2:  # bad input, which every rank refuses and rank 0 alone explains
        return 0, 0, exit_code
    return int(table["rank"]), int(table["local_rank"]), exit_code


def _complaint(lines: tuple[str, ...]) -> tuple[str, ...]:
    """An error of argparse's without its whole usage."""
    found = [i for i, line in enumerate(lines) if "error: " in line]
    return lines[found[-1] :] if found else lines


def _last_lines(log: Path, count: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a file of any size, without torchrun's ``[default0]:``; () if missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 512 * count))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return _plain(text.rstrip().splitlines(), count)


def _plain(lines: Sequence[str], count: int = TAIL_LINES) -> tuple[str, ...]:
    return tuple(_RANK_PREFIX.sub("", line.rstrip()) for line in lines[-count:])
