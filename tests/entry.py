"""Run the training entry point in processes forked from one that has imported Megatron.

Each run has its own processes, because Megatron's ``pretrain`` keeps global state and tests may
kill them.
"""

import argparse
import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing as mp
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from torch.distributed import TCPStore

TIMEOUT = 300.0
"""Seconds until the ranks of a run are killed."""
GRACE = 60.0
"""Seconds until ranks are killed after one has failed, and child processes after all ranks."""

_IMPORTED_ONCE = (
    "kha_megatron.training.pretrain",
    "megatron.core.tokenizers.text",  # Megatron imports these two when it first needs them
    "torch._dynamo",
)


@dataclass(frozen=True)
class Ended:
    """Exit codes of a run (negative: killed by a signal) and the output of its ranks."""

    codes: list[int]
    output: str
    overdue: list[int]
    """Ranks that were still running after the grace period."""
    helpers: bool = False
    """True if a child process outlived all ranks by the grace period."""

    @property
    def errors(self) -> list[str]:
        """Lines with an error of the entry point."""
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    @property
    def remarks(self) -> list[str]:
        """Lines that the entry point logged."""
        return [line for line in self.output.splitlines() if line.startswith("kha_megatron: ")]

    @property
    def knocks(self) -> str:
        """The logged line that describes the knocked layers."""
        return "\n".join(re.findall(r"^kha_megatron: (knocks .*)$", self.output, re.MULTILINE))


class Entry:
    """Run the entry point with ``entry(words, ranks)``. The server ends with this process.

    Args:
        install: function that installs the CPU runtime, if not ``kha_megatron.mcore.cpu.install``.
    """

    def __init__(self, install: Callable[[], None] | None = None) -> None:
        self._connection: Any = None
        self._install = install

    def __call__(
        self,
        words: Sequence[str],
        ranks: int = 1,
        *,
        program: str | None = None,
        before: Callable[[int], None] | None = None,
        kill_after: Callable[[], float] | None = None,
        kill_with: signal.Signals = signal.SIGKILL,
        grace: float = GRACE,
    ) -> Ended:
        """Run on ``ranks`` processes in the caller's environment.

        Args:
            program: Python source to run instead of the entry point.
            before: called first in each process, with the rank.
            kill_after: called when the run has started. Returns the seconds until all ranks and
                their children are killed.
            kill_with: signal that they get.
        """
        if self._connection is None:
            self._start()
        life = functools.partial(_rank, list(words), dict(os.environ), program, before)
        self._connection.send((life, ranks, kill_after, kill_with, grace))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._install))
        self._process.start()
        theirs.close()
        atexit.register(self._connection.close)  # which ends it, before multiprocessing waits


def _serve(connection: Any, install: Callable[[], None] | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.set_start_method(None, force=True)  # as in a process that was not spawned
    from kha_megatron.mcore import cpu

    if install:
        install()
    cpu.install(despite_cuda=True, quiet=True)
    for module in _IMPORTED_ONCE:
        importlib.import_module(module)
    _make_runs_start_faster()
    gc.collect()
    gc.freeze()  # so that no rank visits the 300,000 objects of torch and Megatron

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_run(*request))
        except Exception as error:
            connection.send(error)


def _make_runs_start_faster() -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import argument_utils, arguments

    # With the short sequences of tests, each run would shuffle 17 million samples, which takes 1 s.
    MockGPTLowLevelDataset.size = 4000
    # Megatron reads the help texts of its arguments from its own source, three times a run.
    factory = argument_utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    texts: dict[type, dict[str, str]] = {}

    def read_once(self: Any, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = read(self, config)
        return dict(texts[config])

    factory._get_field_docstrings = read_once
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _run(
    life: Callable[[dict[str, str], int], None],
    ranks: int,
    kill_after: Callable[[], float] | None,
    kill_with: signal.Signals,
    grace: float,
) -> Ended:
    # like torchrun's agent, which serves the store of its ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.TemporaryFile() as log:
        pids: list[int] = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                group = pids[0] if pids else 0
                os.setpgid(0, group)
                life(world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log.fileno())
            os.setpgid(pid, pids[0] if pids else pid)  # whoever comes first
            pids.append(pid)
        if kill_after is not None:
            time.sleep(kill_after())
            os.killpg(pids[0], kill_with)
        codes, overdue = _wait(pids, grace)
        deadline = time.monotonic() + grace
        while (helpers := _lives(pids[0])) and time.monotonic() < deadline:
            time.sleep(0.01)
        if helpers:
            os.killpg(pids[0], signal.SIGKILL)
        log.seek(0)
        return Ended(codes, log.read().decode(errors="replace"), overdue, helpers)


def _lives(group: int) -> bool:
    """Return True if a process of the group runs. Some containers do not reap zombies."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _wait(pids: list[int], grace: float) -> tuple[list[int], list[int]]:
    deadline = time.monotonic() + TIMEOUT
    codes: dict[int, int] = {}
    overdue: list[int] = []
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline and not overdue:
            overdue = [rank for rank in range(len(pids)) if rank not in codes]
            for rank in overdue:
                os.kill(pids[rank], signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in range(len(pids))], overdue


def _rank(
    words: list[str],
    environment: dict[str, str],
    program: str | None,
    before: Callable[[int], None] | None,
    place: dict[str, str],
    log: int,
) -> None:
    """Run a rank; never returns."""
    code: Any = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        engine = {name: os.environ[name] for name in os.environ if name.startswith("NVTE_")}
        os.environ.clear()
        os.environ |= environment | engine | {"OMP_NUM_THREADS": "1"} | place
        sys.argv = ["kha_megatron.training", *words]
        if before is not None:
            before(int(place["RANK"]))
        if program is None:
            importlib.import_module("kha_megatron.training.__main__").main()
        else:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            mp.util._exit_function()  # ends the manager process of Megatron's writer
        finally:
            os._exit(code or 0)


run = Entry()
"""The entry point whose server all tests share."""
