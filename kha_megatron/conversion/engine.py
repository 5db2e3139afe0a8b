"""Move every tensor of a source to where it belongs, several at a time, in bounded memory.

Threads, not processes: copies, hashing and files release Python's lock. What is held at any time
is bounded in bytes, so that many small tensors go side by side and large ones one by one.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.conversion.sources import Source, not_finite
from kha_megatron.conversion.table import Place
from kha_megatron.errors import OutputError

OnBytes = Callable[[int], None]
Put = Callable[[Place, list[Tensor]], None]

_COPIES = 2
"""Times the bytes of a place that moving it holds: as read, and cast or in the other packing."""
_BESIDE = 256 * 2**20
"""Bytes in flight besides the largest place, so that nobody waits for the one that moves it."""


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    architecture: str
    """``model_type`` of a Hugging Face folder, ``megatron`` otherwise."""
    tensors: int
    parameters: int
    """Numbers that training moves by gradients: all but the biases that balance experts."""
    size: int
    """Bytes of all tensors."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Where the tokenizer came from; None if the source had none that can be saved."""
    not_finite: dict[str, int]
    """Tensors that hold NaN or infinities, and how many."""
    arguments: list[str] = field(default_factory=list)
    """Of a Megatron checkpoint: what a run that begins with it needs on its command line."""


@dataclass(frozen=True)
class Plan(ABC):
    """Everything checked and read but the tensors: nothing has been written yet."""

    source: Source

    mark: ClassVar[str]
    """The file by which a folder that it writes is known."""
    holds: ClassVar[tuple[str, ...]]
    """Patterns of what lies in such a folder: nothing else is ever deleted."""

    @property
    def entries(self) -> list[TensorEntry]:
        """What will be written, in the order of the model."""
        return [entry for _, held in self.source.entries() for entry in held]

    @property
    def size(self) -> int:
        """Bytes of the tensors to write."""
        return sum(entry.nbytes for entry in self.entries)

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        """Refuse a folder that :meth:`write` must not replace.

        Raises:
            OutputError: it holds what would be lost, such as the source, or is no converted model
                and ``overwrite`` is to delete it.
        """
        if self.source.path.resolve().is_relative_to(target.resolve()):
            raise OutputError(
                f"{target} holds what is converted, which must stay to be compared with: name "
                "another folder"
            )
        check_output_folder(target, overwrite=overwrite, mark=self.mark, only=self.holds)

    @abstractmethod
    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """Write the folder.

        Args:
            target: a folder; it is replaced at the end, all at once.
            workers: threads; None for one a core.
            on_bytes: called with the bytes of each tensor written.

        Raises:
            CheckpointError: a shard of the source is damaged.
            OutputError: the disk refuses; what was at ``target`` is still there.
        """

    def written(
        self, target: Path, architecture: str, shards: int, wrong: dict[str, int], *words: str
    ) -> Conversion:
        """What :meth:`write` answers; ``words`` are the arguments of a training."""
        entries = self.entries
        balances = (held for place, held in self.source.entries() if not place.row.trained)
        return Conversion(
            path=target,
            architecture=architecture,
            tensors=len(entries),
            parameters=_numbers(entries) - sum(map(_numbers, balances)),
            size=sum(entry.nbytes for entry in entries),
            shards=shards,
            dtype=str(entries[0].dtype).removeprefix("torch."),
            tokenizer=self.source.companions.origin,
            not_finite=wrong,
            arguments=list(words),
        )


def _numbers(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def transfer(
    source: Source,
    put: Put,
    *,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, int]:
    """Call ``put`` with the tensors of every place, from several threads, the largest first.

    Holds at most two copies of the largest place's tensors and 256 MiB more, whatever the number of
    workers. The first error stops the rest. Shards that have hashes are hashed meanwhile; all are
    right when it returns.

    Args:
        source: the tensors.
        put: writes the tensors of a place.
        workers: threads; None for one for each core that this process may use.
        on_bytes: called in this thread with the bytes of each place that is done.

    Returns:
        Tensors that hold NaN or infinities, sorted, and how many.

    Raises:
        CheckpointError: a file is damaged, or numbers overflow (``transforms.Cast``).
    """
    wrong: dict[str, int] = {}
    workers = workers or len(os.sched_getaffinity(0))
    sizes = {place: sum(entry.nbytes for entry in held) for place, held in source.entries()}
    # a large one that came last would keep one thread busy while the others have nothing to do
    waiting = sorted(sizes, key=sizes.__getitem__, reverse=True)[::-1]  # taken from the end
    free = _COPIES * sizes[waiting[-1]] + _BESIDE

    def largest_that_fits() -> Place | None:
        fitting = (n for n in reversed(range(len(waiting))) if _COPIES * sizes[waiting[n]] <= free)
        at = next(fitting, None)
        return None if at is None else waiting.pop(at)

    def move(place: Place) -> Place:
        parts = source.read(place)
        for name, part in zip(place.hf_names(source.model), parts, strict=True):
            if count := not_finite(part):
                wrong[name] = count
        put(place, parts)
        return place

    with source.verifying(), ThreadPoolExecutor(workers) as pool:
        running: set[Future[Place]] = set()
        try:
            while waiting or running:
                while len(running) < 2 * workers and (place := largest_that_fits()):
                    free -= _COPIES * sizes[place]
                    running.add(pool.submit(move, place))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    place = future.result()
                    free += _COPIES * sizes[place]
                    on_bytes(sizes[place])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return dict(sorted(wrong.items()))
