"""Move all tensors of a source to a target with several threads and bounded memory.

Copies, hashing and file access release the GIL.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.conversion.rows import TensorSlot
from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.transforms import count_not_finite
from kha_megatron.errors import OutputError

OnBytes = Callable[[int], None]
Put = Callable[[TensorSlot, list[Tensor]], None]

_COPIES = 2
"""Copies of a slot's tensors in memory: as read, and as written."""
_BESIDE = 256 * 2**20
"""Bytes that may be in flight besides the largest slot."""


@dataclass(frozen=True)
class Conversion:
    """Summary of a written directory."""

    path: Path
    architecture: str
    """``model_type`` of a Hugging Face directory, or ``megatron``."""
    tensors: int
    parameters: int
    """Elements of all trained tensors, without the biases that balance experts."""
    size: int
    """Bytes of all tensors."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Directory of the source's tokenizer, if it has one that can be saved."""
    not_finite: dict[str, int]
    """Number of NaN and infinite elements of each tensor that has any."""
    arguments: list[str] = field(default_factory=list)
    """Flags of a training run that starts from a Megatron checkpoint."""


@dataclass(frozen=True)
class Plan(ABC):
    """A checked conversion. Nothing has been written yet."""

    source: ModelSource

    marker: ClassVar[str]
    """File that identifies a directory written by this kind of conversion."""
    patterns: ClassVar[tuple[str, ...]]
    """Patterns of the files in such a directory. No other files are ever deleted."""

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
            OutputError: It holds the source, files of something other than a converted model, or a
                converted model without ``overwrite``.
        """
        if self.source.path.resolve().is_relative_to(target.resolve()):
            raise OutputError(f"{target} holds the source of this conversion. Choose another path.")
        check_output_folder(target, overwrite=overwrite, mark=self.marker, only=self.patterns)

    @abstractmethod
    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """Write a temporary directory next to ``target`` and rename it at the end.

        Args:
            target: The directory to write.
            workers: Number of threads; None for one per core.
            on_bytes: Called with the number of bytes after each tensor.

        Raises:
            CheckpointError: A file of the source is damaged, or numbers overflow.
            OutputError: Writing failed. ``target`` is unchanged.
        """

    def summarize(
        self, target: Path, architecture: str, shards: int, wrong: dict[str, int], *words: str
    ) -> Conversion:
        """Return the result of :meth:`write`. ``words`` are the flags of a training run."""
        entries = self.entries
        untrained = [
            e for slot, held in self.source.entries() for e in held if not slot.row.trained
        ]
        return Conversion(
            path=target,
            architecture=architecture,
            tensors=len(entries),
            parameters=sum(math.prod(e.shape) for e in entries)
            - sum(math.prod(e.shape) for e in untrained),
            size=self.size,
            shards=shards,
            dtype=str(entries[0].dtype).removeprefix("torch."),
            tokenizer=self.source.tokenizer.origin,
            not_finite=wrong,
            arguments=list(words),
        )


def transfer(
    source: ModelSource,
    put: Put,
    *,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, int]:
    """Call ``put`` with the tensors of every slot, from several threads, the largest first.

    Holds at most two copies of the largest slot's tensors and 256 MiB more. The first error stops
    the transfer. The hashes of the source's files are checked.

    Args:
        source: The tensors.
        put: Writes the tensors of a slot.
        workers: Number of threads; None for one per available core.
        on_bytes: Called in this thread with the number of bytes of each finished slot.

    Returns:
        The number of NaN and infinite elements of each tensor that has any, sorted by name.

    Raises:
        CheckpointError: A file is damaged, or numbers overflow.
    """
    wrong: dict[str, int] = {}
    workers = workers or len(os.sched_getaffinity(0))
    sizes = {slot: sum(entry.nbytes for entry in held) for slot, held in source.entries()}
    # the largest first, so that no thread is left alone with a large tensor at the end
    waiting = sorted(sizes, key=sizes.__getitem__)  # taken from the end
    free = _COPIES * max(sizes.values()) + _BESIDE

    def move(slot: TensorSlot) -> TensorSlot:
        parts = source.read(slot)
        for name, part in zip(slot.hf_names(source.model), parts, strict=True):
            if count := count_not_finite(part):
                wrong[name] = count
        put(slot, parts)
        return slot

    with ThreadPoolExecutor(workers) as pool:
        running: set[Future[TensorSlot]] = set()
        try:
            while waiting or running:
                while len(running) < 2 * workers:
                    fitting = (
                        n
                        for n in reversed(range(len(waiting)))
                        if _COPIES * sizes[waiting[n]] <= free
                    )
                    if (at := next(fitting, None)) is None:
                        break
                    slot = waiting.pop(at)
                    free -= _COPIES * sizes[slot]
                    running.add(pool.submit(move, slot))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    slot = future.result()
                    free += _COPIES * sizes[slot]
                    on_bytes(sizes[slot])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return dict(sorted(wrong.items()))
