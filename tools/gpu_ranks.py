"""Check collectives of two ranks on one device against the same sums on the CPU.

``python tools/gpu_ranks.py nccl`` starts two processes on one GPU. NCCL 2.30 or newer accepts
this with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. ``gloo`` does the same with CUDA tensors, which travel
through the CPU, and ``gloo --device cpu`` needs no GPU. Each collective is one row of
``tools/gpu.py run``.
Exit codes: 1 if a result was wrong, 3 if the ranks did not end within ``--seconds``.
"""

import argparse
import ctypes
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import publish
from torch import Tensor

RANKS = 2
COUNT = 4099
"""Elements of each rank's tensor, an odd number; one per rank where ranks exchange parts."""

START_SECONDS = 120
"""Time limit for both processes to import torch."""
STARTED = "started"

Check = tuple[Tensor, Tensor]
"""The result of a collective on the device, and what the CPU computes."""


def draw(rank: int) -> Tensor:
    """Return the input of a rank, ``[RANKS, COUNT]`` in float32 on the CPU."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(RANKS, COUNT, generator=generator)


def all_reduce(rank: int, device: torch.device) -> Check:
    result = draw(rank).to(device)
    dist.all_reduce(result)
    return result, draw(0) + draw(1)


def all_gather(rank: int, device: torch.device) -> Check:
    result = torch.empty(RANKS * RANKS, COUNT, device=device)
    dist.all_gather_into_tensor(result, draw(rank).to(device))
    return result, torch.cat([draw(0), draw(1)])


def reduce_scatter(rank: int, device: torch.device) -> Check:
    result = torch.empty(COUNT, device=device)
    dist.reduce_scatter_tensor(result, draw(rank).to(device).flatten())
    return result, draw(0)[rank] + draw(1)[rank]


def all_to_all(rank: int, device: torch.device) -> Check:
    result = torch.empty(RANKS, COUNT, device=device)
    dist.all_to_all_single(result, draw(rank).to(device))
    return result, torch.stack([draw(0)[rank], draw(1)[rank]])


def send_and_receive(rank: int, device: torch.device) -> Check:
    """Exchange tensors in one batch, as pipeline stages and ring attention do."""
    other = 1 - rank
    result = torch.empty(RANKS, COUNT, device=device)
    requests = [
        dist.P2POp(dist.isend, draw(rank).to(device), other),
        dist.P2POp(dist.irecv, result, other),
    ]
    for request in dist.batch_isend_irecv(requests):
        request.wait()
    return result, draw(other)


COLLECTIVES: dict[str, Callable[[int, torch.device], Check]] = {
    "all-reduce": all_reduce,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "send and receive": send_and_receive,
}


def describe_backend(backend: str) -> str:
    """Return the name of a back-end, with the version of the NCCL that is loaded.

    ``torch.cuda.nccl.version()`` returns the version that torch was compiled with.
    """
    if backend != "nccl":
        return backend
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return f"nccl {version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def work(rank: int, backend: str, device_name: str, store: str, results: Any) -> None:
    """Run all collectives on one rank, and put ``(name, error or text)`` of each."""
    results.put((STARTED, 0.0))
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    for name, collective in COLLECTIVES.items():
        try:
            result, expected = collective(rank, device)
            results.put((name, (result.cpu() - expected).abs().max().item()))
        except (RuntimeError, ValueError) as error:
            message = str(error).strip().partition("\n")[0]
            results.put((name, f"{type(error).__name__}: {message}"))
    dist.destroy_process_group()


def run(backend: str, device: str, seconds: float) -> int:
    """Start the ranks and publish the result of each collective. Return the exit code."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    failed = False
    with tempfile.TemporaryDirectory(prefix="kha-ranks-") as folder:
        store = str(Path(folder, "store"))
        processes = []
        for rank in range(RANKS):
            arguments = (rank, backend, device, store, results)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            processes.append(process)
        try:
            answers = Answers(results, processes)
            answers.wait(STARTED, time.monotonic() + START_SECONDS)
            deadline = time.monotonic() + seconds
            for name in COLLECTIVES:
                errors = answers.wait(name, deadline)
                failed |= not report(backend, name, errors)
        except TimeoutError as error:
            print(f"{backend}: {error}", file=sys.stderr)
            publish(f"{backend}: ranks", "failed", str(error))
            return 3
        finally:
            for process in processes:
                process.kill()
                process.join()
    return int(failed)


class Answers:
    """What the ranks put into a queue, by the name of the collective."""

    def __init__(self, results: Any, processes: list[Any]) -> None:
        self.results = results
        self.processes = processes
        self.received: defaultdict[str, list[float | str]] = defaultdict(list)

    def wait(self, name: str, deadline: float) -> list[float | str]:
        """Return the answer of each rank for ``name``.

        Raises:
            TimeoutError: a rank did not answer before the deadline, or all have ended.
        """
        while len(self.received[name]) < RANKS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not answer in time: {name}")
            have_ended = not any(process.is_alive() for process in self.processes)
            try:
                answered, error = self.results.get(timeout=0.2)
            except queue.Empty:
                if have_ended:
                    raise TimeoutError(f"the ranks ended without an answer: {name}") from None
                continue
            self.received[answered].append(error)
        return self.received[name]


def report(backend: str, name: str, errors: list[float | str]) -> bool:
    """Publish a collective's largest error over the ranks. Return whether the result was right."""
    messages = [error for error in errors if isinstance(error, str)]
    numbers = [error for error in errors if isinstance(error, float)]
    # a sum of two numbers is always rounded in the same way
    is_right = not messages and all(number == 0 for number in numbers)
    detail = messages[0] if messages else f"largest difference from the CPU {max(numbers)}"
    print(f"{backend}: {name}: {detail}", flush=True)
    status = "passed" if is_right else "failed"
    publish(f"{backend}: {name}", status, f"{describe_backend(backend)}, {detail}")
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("backend", choices=["nccl", "gloo"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run(args.backend, args.device, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
