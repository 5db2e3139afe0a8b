"""Move every tensor of a source to where it belongs, several at a time, in bounded memory.

Threads, not processes: copies, hashing and files release Python's lock. What is held at any time
is bounded in bytes, so that many small tensors go side by side and large ones one by one.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from torch import Tensor

from kha_megatron.conversion.sources import Source
from kha_megatron.conversion.table import Place, places
from kha_megatron.mcore.memory import give_back_freed_memory

OnBytes = Callable[[int], None]
Put = Callable[[Place, list[Tensor]], None]

_COPIES = 2
"""Times the bytes of a place that moving it holds: as read, and cast or in the other layout."""
_ROOM = 256 * 2**20
"""Bytes in flight that are always allowed, for many small tensors."""


def default_workers() -> int:
    """One thread for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def transfer(
    source: Source, put: Put, *, workers: int, on_bytes: OnBytes = lambda count: None
) -> None:
    """Call ``put`` with the tensors of every place, from several threads.

    Holds at most two copies of the largest place's tensors, or 256 MiB, whatever the number of
    workers. The first error stops the rest. Shards that have hashes are hashed meanwhile; all are
    right when it returns.

    Args:
        source: the tensors.
        put: writes the tensors of a place.
        workers: threads.
        on_bytes: called in this thread with the bytes of each place that is done.

    Raises:
        CheckpointError: a file is damaged.
    """
    give_back_freed_memory()
    sizes = {place: source.nbytes(place) for place in places(source.model)}
    room = _Room(max(_ROOM, _COPIES * max(sizes.values())))

    def move(place: Place) -> int:
        with room.taken(_COPIES * sizes[place]):
            put(place, source.read(place))
        return sizes[place]

    with source.verifying(), ThreadPoolExecutor(workers) as pool:
        running: set[Future[int]] = set()
        waiting = iter(sizes)
        try:
            while True:
                while len(running) < 2 * workers and (place := next(waiting, None)):
                    running.add(pool.submit(move, place))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    on_bytes(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Room:
    """A number of bytes that threads share."""

    def __init__(self, size: int) -> None:
        self._free = self._size = size
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until there is room, and give it back afterwards."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()
