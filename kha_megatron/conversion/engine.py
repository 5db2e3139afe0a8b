"""Multi-threaded checkpoint conversion with bounded memory."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.checkpoint.staging import check_output_folder
from kha_megatron.conversion.sources import ModelSource
from kha_megatron.conversion.tensor_mappings import TensorSlot
from kha_megatron.conversion.transforms import count_not_finite
from kha_megatron.errors import OutputError

OnBytes = Callable[[int], None]
"""Progress callback. Receives the number of bytes that were converted since the last call."""
Put = Callable[[TensorSlot, list[Tensor]], None]
"""Write the converted tensors of a slot."""

_COPIES = 2
"""How often a tensor is in memory: once as read, and possibly once as converted for the output."""
_EXTRA_BYTES = 256 * 2**20
"""Memory for other slots while the largest one is being converted."""


@dataclass(frozen=True)
class Conversion:
    """Summary returned by :meth:`Plan.write`."""

    path: Path
    architecture: str
    """``model_type`` of the HF model, or ``megatron``."""
    tensors: int
    parameters: int
    """Trainable parameters, i.e. excluding the load-balancing biases of MoE routers."""
    size: int
    """Total size in bytes."""
    shards: int
    """Number of files with tensors."""
    dtype: str
    """Dtype of the first tensor, e.g. ``bfloat16``."""
    tokenizer: str | None
    """Where the tokenizer was loaded from. None if we did not write one."""
    not_finite: dict[str, int]
    """NaN/Inf counts by tensor name. Only has tensors with at least one."""
    arguments: list[str] = field(default_factory=list)
    """Megatron flags for training from the converted checkpoint."""


@dataclass(frozen=True)
class Plan(ABC):
    """Base class for conversions. The source is already validated when a plan is created."""

    source: ModelSource

    marker: ClassVar[str]
    """We assume that a directory with this file was written by the same kind of conversion."""
    patterns: ClassVar[tuple[str, ...]]
    """Glob patterns for all output files. ``--overwrite`` never deletes anything else."""

    @property
    def entries(self) -> list[TensorEntry]:
        """Metadata of the output tensors, in model order."""
        all_entries = []
        for _, entries in self.source.entries():
            all_entries += entries
        return all_entries

    @property
    def size(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def check_target(self, target: Path, *, overwrite: bool) -> None:
        """Make sure that we can write to ``target`` without destroying anything.

        Raises:
            OutputError: If ``target`` contains the source checkpoint or unrelated files, or if
                there is already a converted model and ``overwrite`` is not set.
        """
        source_path = self.source.path.resolve()
        if source_path.is_relative_to(os.path.realpath(target)):
            raise OutputError(f"{target} contains the source checkpoint. Use another directory.")
        check_output_folder(
            target,
            overwrite=overwrite,
            mark=self.marker,
            only=self.patterns,
        )

    @abstractmethod
    def write(
        self,
        target: Path,
        *,
        workers: int | None = None,
        on_bytes: OnBytes = lambda count: None,
    ) -> Conversion:
        """Convert the model and write it to ``target``.

        We write to a temporary directory first, so ``target`` does not change if anything fails.

        Args:
            target: Output directory.
            workers: Number of threads (default: one per available CPU core).
            on_bytes: Progress callback, called with the size of each chunk of converted tensors.

        Raises:
            CheckpointError: If the source is corrupted, or values overflow the new dtype.
            OutputError: If we cannot write to ``target``.
        """

    def summarize(
        self,
        target: Path,
        architecture: str,
        shards: int,
        not_finite: dict[str, int],
        arguments: Sequence[str] = (),
    ) -> Conversion:
        """Describe a conversion that was written to ``target`` (see :class:`Conversion`)."""
        entries = self.entries
        parameters = 0
        for slot, slot_entries in self.source.entries():
            if not slot.mapping.trained:
                continue
            for entry in slot_entries:
                parameters += math.prod(entry.shape)
        return Conversion(
            path=target,
            architecture=architecture,
            tensors=len(entries),
            parameters=parameters,
            size=sum(entry.nbytes for entry in entries),
            shards=shards,
            dtype=str(entries[0].dtype).removeprefix("torch."),
            tokenizer=self.source.tokenizer.path,
            not_finite=not_finite,
            arguments=list(arguments),
        )


class _SlotQueue:
    """Waiting slots, and the memory that is left to convert them."""

    def __init__(self, sizes: Mapping[TensorSlot, int]) -> None:
        self._needed_bytes = {slot: _COPIES * size for slot, size in sizes.items()}
        self._smallest_first = sorted(sizes, key=lambda slot: sizes[slot])
        self._free_bytes = max(self._needed_bytes.values()) + _EXTRA_BYTES

    def __bool__(self) -> bool:
        return bool(self._smallest_first)

    def pop_largest_fitting(self) -> TensorSlot | None:
        """Return the largest slot that fits and reserve memory for it. None if no slot fits."""
        for index in reversed(range(len(self._smallest_first))):
            needed_bytes = self._needed_bytes[self._smallest_first[index]]
            if needed_bytes <= self._free_bytes:
                self._free_bytes -= needed_bytes
                return self._smallest_first.pop(index)
        return None

    def release(self, slot: TensorSlot) -> None:
        """Free the memory that was reserved for a slot."""
        self._free_bytes += self._needed_bytes[slot]


def transfer(
    source: ModelSource,
    put: Put,
    *,
    workers: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> dict[str, int]:
    """Read all tensors with a thread pool and pass them to ``put``.

    Large slots are scheduled first so that all threads finish at about the same time. Peak memory
    is at most two copies of the largest slot plus 256 MiB. Note that ``put`` needs to be
    thread-safe.

    Returns:
        NaN/Inf counts by tensor name.
    """
    not_finite: dict[str, int] = {}
    sizes = {}
    for slot, entries in source.entries():
        sizes[slot] = sum(entry.nbytes for entry in entries)
    queue = _SlotQueue(sizes)
    workers = workers or len(os.sched_getaffinity(0))
    max_scheduled = 2 * workers  # a thread that finishes a slot finds the next one waiting

    def convert(slot: TensorSlot) -> TensorSlot:
        names = slot.hf_names(source.model)
        tensors = source.read(slot)
        for name, tensor in zip(names, tensors, strict=True):
            if count := count_not_finite(tensor):
                not_finite[name] = count
        put(slot, tensors)
        return slot

    with ThreadPoolExecutor(workers) as pool:
        scheduled: set[Future[TensorSlot]] = set()
        try:
            while queue or scheduled:
                while len(scheduled) < max_scheduled:
                    next_slot = queue.pop_largest_fitting()
                    if next_slot is None:
                        break
                    scheduled.add(pool.submit(convert, next_slot))
                done, scheduled = wait(scheduled, return_when=FIRST_COMPLETED)
                for future in done:
                    converted_slot = future.result()
                    queue.release(converted_slot)
                    on_bytes(sizes[converted_slot])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return dict(sorted(not_finite.items()))
