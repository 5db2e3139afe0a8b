"""Move every tensor of a source to its target, several at a time, in bounded memory.

Threads suffice: copies, hashing and file access release Python's lock.
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
from kha_megatron.conversion.rows import Place
from kha_megatron.conversion.sources import Source
from kha_megatron.conversion.transforms import not_finite
from kha_megatron.errors import OutputError

OnBytes = Callable[[int], None]
Put = Callable[[Place, list[Tensor]], None]

_COPIES = 2
"""Copies of a place's tensors in memory: as read, and cast or packed differently."""
_BESIDE = 256 * 2**20
"""Bytes that may be moved besides the largest place."""


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    architecture: str
    """``model_type`` of a Hugging Face directory, ``megatron`` otherwise."""
    tensors: int
    parameters: int
    """Elements of all trained tensors. The biases that balance experts are not trained."""
    size: int
    """Bytes of all tensors."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Where the tokenizer came from; None if the source had none that can be saved."""
    not_finite: dict[str, int]
    """Tensors with NaN or infinities, and how many they have."""
    arguments: list[str] = field(default_factory=list)
    """For a Megatron checkpoint: the arguments of a run that starts from it."""


@dataclass(frozen=True)
class Plan(ABC):
    """A checked conversion. Nothing has been written yet."""

    source: Source

    mark: ClassVar[str]
    """The file that identifies a directory written by this kind of conversion."""
    holds: ClassVar[tuple[str, ...]]
    """Patterns of the files in such a directory. Nothing else is ever deleted."""

    @property
    def entries(self) -> list[TensorEntry]:
        """The tensors to write, in model order."""
        return [entry for _, held in self.source.entries() for entry in held]

    @property
    def size(self) -> int:
        """Bytes of the tensors to write."""
        return sum(entry.nbytes for entry in self.entries)

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        """Check that :meth:`write` may write to ``target``.

        Raises:
            OutputError: It holds the source, or files that are not a converted model's, or a
                converted model without ``overwrite``.
        """
        if self.source.path.resolve().is_relative_to(target.resolve()):
            raise OutputError(f"{target} holds the source of this conversion. Choose another path.")
        check_output_folder(target, overwrite=overwrite, mark=self.mark, only=self.holds)

    @abstractmethod
    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """Write the directory beside ``target`` and rename it at the end.

        ``workers`` threads write, None for one per core. ``on_bytes`` is called with the bytes of
        each tensor written.

        Raises:
            CheckpointError: A file of the source is damaged, or numbers overflow.
            OutputError: Writing failed. What was at ``target`` is still there.
        """

    def written(
        self, target: Path, architecture: str, shards: int, wrong: dict[str, int], *words: str
    ) -> Conversion:
        """Return the result of :meth:`write`; ``words`` are the arguments of a training."""
        entries = self.entries
        untrained = (held for place, held in self.source.entries() if not place.row.trained)
        return Conversion(
            path=target,
            architecture=architecture,
            tensors=len(entries),
            parameters=_elements(entries) - sum(map(_elements, untrained)),
            size=self.size,
            shards=shards,
            dtype=str(entries[0].dtype).removeprefix("torch."),
            tokenizer=self.source.companions.origin,
            not_finite=wrong,
            arguments=list(words),
        )


def _elements(entries: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def transfer(
    source: Source,
    put: Put,
    *,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, int]:
    """Call ``put`` with the tensors of every place, from several threads, the largest first.

    Holds at most two copies of the largest place's tensors and 256 MiB more. The first error stops
    the rest. The hashes of the source's files are checked meanwhile.

    Args:
        source: The tensors.
        put: Writes the tensors of a place.
        workers: Threads; None for one per available core.
        on_bytes: Called in this thread with the bytes of each finished place.

    Returns:
        The tensors with NaN or infinities, sorted, and how many they have.

    Raises:
        CheckpointError: A file is damaged, or numbers overflow.
    """
    wrong: dict[str, int] = {}
    workers = workers or len(os.sched_getaffinity(0))
    sizes = {place: sum(entry.nbytes for entry in held) for place, held in source.entries()}
    # a large one at the end would keep one thread busy while the others have nothing to do
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

    with ThreadPoolExecutor(workers) as pool:
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
