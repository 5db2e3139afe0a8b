"""Multi-threaded checkpoint conversion with bounded memory."""

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
from kha_megatron.conversion.table import tensor_slots
from kha_megatron.conversion.transforms import count_not_finite
from kha_megatron.errors import OutputError

OnBytes = Callable[[int], None]
Put = Callable[[TensorSlot, list[Tensor]], None]

_COPIES = 2  # of each tensor in memory, since the written tensor may be a copy of the one read
_EXTRA_BYTES = 256 * 2**20  # memory budget in addition to the copies of the largest slot


@dataclass(frozen=True)
class Conversion:
    """Result of :meth:`Plan.write`."""

    path: Path
    architecture: str
    """``model_type`` of the Hugging Face model, or ``megatron``."""
    tensors: int
    parameters: int
    """Number of trained parameters. Expert biases for load balancing are not counted."""
    size: int
    """Size of all tensors in bytes."""
    shards: int
    dtype: str
    tokenizer: str | None
    """Source directory of the tokenizer, or None if no tokenizer was written."""
    not_finite: dict[str, int]
    """Number of NaN and infinite elements, only for tensors that contain any."""
    arguments: list[str] = field(default_factory=list)
    """Megatron flags to start training from the checkpoint."""


@dataclass(frozen=True)
class Plan(ABC):
    """Base class for a validated conversion that is ready to be written."""

    source: ModelSource

    marker: ClassVar[str]
    """Name of a file by which an output directory of this conversion is recognized."""
    patterns: ClassVar[tuple[str, ...]]
    """Glob patterns of all output files. Overwriting never deletes any other files."""

    @property
    def entries(self) -> list[TensorEntry]:
        """The tensors to write, in model order."""
        return [entry for _, held in self.source.entries() for entry in held]

    @property
    def size(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(entry.nbytes for entry in self.entries)

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        """Check that the converted model can be written to ``target``.

        Raises:
            OutputError: If ``target`` contains the source checkpoint or unrelated files, or if it
                contains a converted model and ``overwrite`` is False.
        """
        if self.source.path.resolve().is_relative_to(os.path.realpath(target)):
            raise OutputError(f"{target} contains the source checkpoint. Use another directory.")
        check_output_folder(target, overwrite=overwrite, mark=self.marker, only=self.patterns)

    @abstractmethod
    def write(
        self, target: Path, *, workers: int | None = None, on_bytes: OnBytes = lambda count: None
    ) -> Conversion:
        """Convert the model and write it to ``target``.

        If the conversion fails, ``target`` is unchanged, because the output is first written to a
        temporary directory next to it. ``on_bytes`` is a progress callback that receives the number
        of bytes of each converted tensor. By default, there is one worker thread per core.

        Raises:
            CheckpointError: If a source file is corrupted or values overflow the new dtype.
            OutputError: If the output cannot be written.
        """

    def summarize(
        self, target: Path, architecture: str, shards: int, not_finite: dict[str, int], *flags: str
    ) -> Conversion:
        entries = self.entries
        untrained = [slot for slot in tensor_slots(self.source.model) if not slot.row.trained]
        return Conversion(
            path=target,
            architecture=architecture,
            tensors=len(entries),
            parameters=sum(math.prod(e.shape) for e in entries)
            - sum(math.prod(slot.row.shape(self.source.model)) for slot in untrained),
            size=self.size,
            shards=shards,
            dtype=str(entries[0].dtype).removeprefix("torch."),
            tokenizer=self.source.tokenizer.origin,
            not_finite=not_finite,
            arguments=list(flags),
        )


def transfer(
    source: ModelSource,
    put: Put,
    *,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, int]:
    """Read all slots and pass their tensors to ``put``, which is called from several threads.

    Large slots come first, so that all threads finish at about the same time. Memory usage is
    limited to two copies of the largest slot plus 256 MiB. See :meth:`Plan.write` for the other
    arguments. Returns the number of NaN and infinite elements of each tensor that contains any.
    """
    not_finite: dict[str, int] = {}
    workers = workers or len(os.sched_getaffinity(0))
    sizes = {slot: sum(entry.nbytes for entry in held) for slot, held in source.entries()}
    waiting = sorted(sizes, key=sizes.__getitem__)  # slots are popped from the end
    free = _COPIES * max(sizes.values()) + _EXTRA_BYTES

    def move(slot: TensorSlot) -> TensorSlot:
        parts = source.read(slot)
        for name, part in zip(slot.hf_names(source.model), parts, strict=True):
            if count := count_not_finite(part):
                not_finite[name] = count
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
    return dict(sorted(not_finite.items()))
