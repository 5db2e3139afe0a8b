"""Run test cases on ranks that stay alive for many cases.

Importing Megatron takes seconds. Workers therefore live for many cases, and those on the CPU are
forks of a process that has imported it. Each case creates and destroys a process group of the first
``n`` workers: gloo on the CPU runtime, which is installed in the workers only, or NCCL.
"""

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import psutil

_START = 300  # seconds for a new rank
_THREADS = 400  # of a rank: each gloo group that is still referenced has some


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; the message holds the traceback."""


class RankPool:
    """Worker processes that act as ranks 0 to ``n - 1`` of one case after another.

    Args:
        device: ``cpu``, or ``cuda``. Ranks share GPUs if there are more ranks than GPUs.
        backend: ``gloo`` or ``nccl``; by default gloo on the CPU and NCCL on GPUs.
        prepare: function that every worker calls first, of a module that does not import torch.
        install: function that installs the CPU runtime, if not ``kha_megatron.mcore.cpu.install``.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        backend: str | None = None,
        prepare: Callable[[], None] | None = None,
        install: Callable[[], None] | None = None,
    ) -> None:
        backend = backend or ("gloo" if device == "cpu" else "nccl")
        self._settings = device, backend, prepare, install
        self._store: Any = None
        self._server: Any = None
        self._cases = 0
        self._workers: list[tuple[psutil.Process, Any]] = []

    def __call__(
        self,
        case: Callable[..., Any],
        n: int,
        *args: Any,
        timeout: float = 300,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``case(*args, **kwargs)`` on ``n`` ranks and return what each returned.

        Args:
            case: a function at the top level of a module that workers can import.
            n: world size.
            timeout: seconds for the whole case; then the pool is killed and the case fails.

        Raises:
            RankError: with the traceback of the first rank that failed.
        """
        new = [self._start() for _ in range(len(self._workers), n)]
        for connection in new:  # a busy machine may take a minute to import torch and Megatron
            if not connection.poll(_START):
                raise RankError(f"a rank did not start within {_START} s")
            self._workers.append((psutil.Process(connection.recv()), connection))
        self._cases += 1
        for rank, (_, connection) in enumerate(self._workers[:n]):
            connection.send((case, args, kwargs, rank, n, f"case {self._cases}"))
        results = self._collect(n, timeout)
        failures = []
        for rank, (passed, result) in sorted(results.items()):
            if not passed:
                failures.append(f"rank {rank}:\n{result}")
        if failures or len(results) < n:
            self.close()  # a rank may hang, and the others have created other numbers of groups
            silent = sorted(set(range(n)) - set(results))
            raise RankError("\n".join([*failures, f"ranks without an answer: {silent}"]))
        answers = [results[rank][1] for rank in range(n)]
        if any(worker.num_threads() > _THREADS for worker, _ in self._workers):
            self.close()  # before a later test reaches the limit of the machine
        return answers

    def _collect(self, n: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return for each rank that answered in time whether the case passed, and its result."""
        pending = {connection: rank for rank, (_, connection) in enumerate(self._workers[:n])}
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                with contextlib.suppress(EOFError):  # it died
                    results[rank] = connection.recv()
                if not results.get(rank, (False,))[0]:  # the others may fail as well
                    deadline = min(deadline, time.monotonic() + 3)
        return results

    def _start(self) -> Any:
        """Start a worker and return the connection to it."""
        if self._store is None:  # one for all cases: a file store makes ranks poll a locked file
            from torch.distributed import TCPStore

            self._store = TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
            )
        ours, theirs = mp.Pipe()
        if self._settings[0] == "cuda":  # a fork could not use CUDA
            self._spawn(_prepare_and_work, theirs)
        else:
            if self._server is None:
                self._server, requests = mp.Pipe()
                self._spawn(_fork_workers, requests)
            self._server.send(theirs)
        theirs.close()
        return ours

    def _spawn(self, function: Callable[..., None], connection: Any) -> None:
        arguments = (connection, self._store.port, *self._settings)
        mp.get_context("spawn").Process(
            target=function,
            args=arguments,
            daemon=True,
        ).start()
        connection.close()

    def close(self) -> None:
        """Kill the workers; the next case starts new ones."""
        for process, connection in self._workers:
            connection.close()
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()
        self._workers.clear()


def _prepare(device: str, prepare: Any, install: Any) -> None:
    if prepare:
        prepare()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["OMP_NUM_THREADS"] = "1"
    if device == "cpu":
        from kha_megatron.mcore import cpu

        if install:
            install()
        cpu.install(despite_cuda=True, quiet=True)
    import kha_megatron.mcore  # noqa: F401, which hides a Transformer Engine that is incomplete

    # isort: split
    import tests.distributed.models  # noqa: F401, so that no case has to wait for Megatron


def _prepare_and_work(
    connection: Any, port: int, device: str, backend: str, *settings: Any
) -> None:
    _prepare(device, *settings)
    _work(connection, port, backend)


def _fork_workers(requests: Any, port: int, device: str, backend: str, *settings: Any) -> None:
    """Import Megatron, and fork a worker for each connection that is received."""
    _prepare(device, *settings)
    gc.collect()
    gc.freeze()  # a collection after each case would visit 300,000 objects of torch and Megatron
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker becomes a zombie
    with contextlib.suppress(EOFError):
        while True:
            connection = requests.recv()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                try:
                    _work(connection, port, backend)
                finally:
                    os._exit(0)
            connection.close()


def _work(connection: Any, port: int, backend: str) -> None:
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    connection.send(os.getpid())
    while True:
        try:
            *request, name = connection.recv()
        except EOFError:
            return
        connection.send(_run(*request, PrefixStore(name, store), backend))


def _run(
    case: Any,
    args: Any,
    kwargs: Any,
    rank: int,
    world_size: int,
    store: Any,
    backend: str,
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=200),  # below the pool's, so that the error names the place
        )
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")  # NVIDIA's containers ask for less
        result = case(*args, **kwargs)
        # A rank that leaves a gloo group closes its connections. A slower rank that still creates
        # the group would fail. The pool waits no longer than the case may take
        store.set(f"through {rank}", "")
        store.wait([f"through {r}" for r in range(world_size)], timedelta(hours=1))
        return True, result
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if engine := sys.modules.get("transformer_engine.pytorch.quantization"):
            engine.FP8GlobalStateManager.reset()  # it would use the groups of this case again
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # models refer to their groups in cycles, and a gloo group has threads
