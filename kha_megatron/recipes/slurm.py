"""Following jobs on Slurm, with accounting or without: ``scontrol`` knows them while they last.

``sacct`` is asked only about a job that Slurm's controller has forgotten. NeMo-Run asks nothing
else, and gives up on a running job where there is no accounting.
"""

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.history.log_lines import Step, parse_step
from kha_megatron.recipes.logs import Failure, failure_in

_FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
_ENDS = {"COMPLETED": "succeeded", "CANCELLED": "cancelled", "UNKNOWN": "unknown"}
_ENDS |= dict.fromkeys(_FAILED, "failed")
_POLL_SECONDS = 3.0
_TAIL_BYTES = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one job ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled`` or ``unknown``."""
    log: str
    """Output of all its ranks, on the cluster."""
    reason: str | None = None
    """In Slurm's words; None where it succeeded."""
    failure: Failure | None = None
    """What its log says last; None where it succeeded, or has no log."""


def follow(jobs: Sequence[Any], on_step: Callable[[Step], None] | None = None) -> Ended:
    """Wait for the end of each job of a chain, through requeues; how the last one ended.

    Args:
        jobs: NeMo-Run's, submitted.
        on_step: called with each progress line of Megatron's.
    """
    for job in jobs:
        announce(f"Slurm has taken job {number_of(job)}; its log: {log_of(job)}")
    for job in jobs:
        ended = _follow(job, on_step)
        if job is not jobs[-1] and ended.reason is not None:
            announce(ended.reason)
    return ended


def number_of(job: Any) -> str:
    """Slurm's number of one of NeMo-Run's jobs."""
    return str(job.handle).rpartition("/")[2]


def log_of(job: Any, restarts: str = "0") -> str:
    """Where the ranks of a job write, on the cluster; each start of it has a log of its own."""
    log = str(job._dryrun_info.request.executor.job_details.srun_stdout)
    return log.replace("%j", number_of(job)).replace("${SLURM_RESTART_COUNT:-0}", restarts)


def _follow(job: Any, on_step: Callable[[Step], None] | None) -> Ended:
    number, tunnel = number_of(job), job._dryrun_info.request.executor.tunnel
    said, seen, path, facts = "", 0, "", {"JobState": "PENDING"}
    while True:
        facts |= _facts(number, tunnel)  # before reading the log: nothing of it is missed
        state, restarts = facts["JobState"], facts.get("Restarts", "0")
        if (now := log_of(job, restarts)) != path:
            path, seen = now, 0
        if (text := f"job {number} is {state}; its log: {path}") != said:
            announce(said := text)
        for line in _new_lines(path, seen, tunnel):
            seen += len(line)
            if on_step is not None and (step := parse_step(line)) is not None:
                on_step(step)
        if state in _ENDS:
            break
        time.sleep(_POLL_SECONDS)
    status = _ENDS[state]
    if status == "succeeded":
        return Ended(status=status, log=path)
    how = f"exit code {facts.get('ExitCode', 'unknown')}, {facts.get('Reason', 'no reason given')}"
    reason = f"Slurm ended job {number} as {state} ({how})"
    if state == "UNKNOWN":
        reason = f"Slurm no longer knows job {number}, and has no accounting: see its log"
    return Ended(status=status, log=path, reason=reason, failure=_failure(path, facts, tunnel))


def _facts(number: str, tunnel: Any) -> dict[str, str]:
    """What Slurm says of a job now; nothing while its controller does not answer."""
    asked = _ask(f"scontrol show job --oneliner {number}", tunnel)
    if asked.ok:
        found = re.findall(r"(\w+)=(\S*)", asked.stdout)
        return dict(reversed(found))  # the first of a name counts: what users wrote comes later
    if "Invalid job id" not in asked.stderr:
        announce(f"scontrol does not answer, waiting for it: {asked.stderr.strip()}", once=number)
        return {}
    asked = _ask(f"sacct -n -X -P -j {number} -o State,ExitCode", tunnel)
    state, _, code = asked.stdout.strip().rpartition("\n")[2].partition("|")
    return {"JobState": state.partition(" ")[0] or "UNKNOWN", "ExitCode": code}


def _new_lines(path: str, seen: int, tunnel: Any) -> Iterator[str]:
    """Complete lines behind the first ``seen`` bytes, one character a byte."""
    lines = _ask(f"tail -c +{seen + 1} {shlex.quote(path)}", tunnel).stdout.split("\n")
    yield from (f"{line}\n" for line in lines[:-1])


def _failure(path: str, facts: dict[str, str], tunnel: Any) -> Failure | None:
    """From the ranks' log, or from the batch script's own where no rank wrote any."""
    for log in (path, facts.get("StdOut")):
        if log and (text := _ask(f"tail -c {_TAIL_BYTES} {shlex.quote(log)}", tunnel).stdout):
            return failure_in(text, log)
    return None


def _ask(command: str, tunnel: Any) -> Any:
    """What a command says; a lost connection is a failed command, and is tried again.

    NeMo-Run's tunnel ends the process where a login is refused.
    """
    try:
        return tunnel.run(command, hide=True, warn=True, encoding="latin-1")
    except (Exception, SystemExit) as error:
        return SimpleNamespace(ok=False, stdout="", stderr=f"no connection ({error})")
