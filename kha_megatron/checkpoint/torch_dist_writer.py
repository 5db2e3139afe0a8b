"""Write a ``torch_dist`` checkpoint as Megatron-Core 0.19 does, without Megatron or process groups.

The counterpart of :mod:`kha_megatron.checkpoint.torch_dist`: each thread that writes has a shard
of its own, to which it appends one ``torch.save`` archive a chunk, and ``.metadata`` says where
they are.
"""

import hashlib
import io
import json
import math
import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kha_megatron.checkpoint.buffers import bytes_of
from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.manifest import write_converted_from
from kha_megatron.checkpoint.staging import write_at
from kha_megatron.checkpoint.torch_dist import METADATA, lie_apart
from kha_megatron.checkpoint.tracker import COMMIT_MARK
from kha_megatron.errors import CheckpointError

COMMON = "common_state"
_ALIGNMENT = 64
"""Of an archive in its shard: those of the tensors in it are then what ``torch.save`` makes them in
the archive, and they can be mapped."""

_MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class TorchDistWriter:
    """One iteration's folder, which must exist and be empty.

    :meth:`write` and :meth:`write_object` may be called from several threads. A contiguous tensor
    is written as it lies in memory, any other costs a contiguous copy. Nothing is flushed to disk:
    ``staging.staged_folder`` does that. As a context manager it closes its files when the block
    fails.
    """

    def __init__(self, iteration_folder: Path) -> None:
        self.folder = iteration_folder
        self._lock = threading.Lock()
        self._own = threading.local()
        self._shards: list[_Shard] = []
        self._of_objects: _Shard | None = None
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shards()

    def write(
        self, key: str, tensor: Tensor, *, shape: tuple[int, ...], offsets: tuple[int, ...]
    ) -> None:
        """Write a chunk of the whole tensor ``key``.

        A layer of a homogeneous model is a chunk of the stack: ``tensor[None]`` at
        ``offsets=(layer, 0, 0)``.

        Args:
            key: name of the whole tensor.
            tensor: the chunk, with as many dimensions as the whole.
            shape: of the whole tensor; the same for all its chunks, as is the dtype.
            offsets: where in the whole the chunk begins.

        Raises:
            ValueError: the chunk does not fit, or was written before.
            OSError: the disk refuses.
        """
        size, shape, offsets = tensor.shape, torch.Size(shape), torch.Size(offsets)
        fits = len(size) == len(shape) == len(offsets) and all(
            o >= 0 and o + n <= whole for o, n, whole in zip(offsets, size, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{key}: {tuple(size)} at {tuple(offsets)} is not in {tuple(shape)}")
        index = MetadataIndex(key, offsets)
        with self._lock:
            whole = self._tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(tensor.dtype), shape, [])
            )
            if (whole.size, whole.properties.dtype) != (shape, tensor.dtype):
                raise ValueError(f"{key}: its chunks differ in dtype or in the whole's shape")
            if index in self._storage:
                raise ValueError(f"{key}: two chunks at {tuple(offsets)}")
            whole.chunks.append(ChunkStorageMetadata(offsets, size))
            shard = self._shard()
            self._storage[index] = _StorageInfo(shard.name, -1, -1)  # taken
        self._storage[index] = shard.append(tensor.detach().contiguous())

    def write_object(
        self,
        key: str,
        value: Any,
        *,
        shape: tuple[int, ...] = (1,),
        offsets: tuple[int, ...] = (0,),
    ) -> None:
        """Write what is no tensor: plain values, a ``Namespace``.

        Megatron refuses to load a checkpoint that lacks one of its modules' ``_extra_state``. The
        one of a linear layer is None, in local modules always and in Transformer Engine's without
        FP8: write it with ``shape=(layers,), offsets=(layer,)`` where the weights of the layers
        are stacked, ``(layers, experts)`` and ``(layer, expert)`` for an expert's, and without
        both otherwise.

        Args:
            key: such as ``decoder.layers.self_attention.linear_proj._extra_state``.
            value: what ``torch.load(weights_only=True)`` can read.
            shape: of the grid of such objects.
            offsets: the place of this one.
        """
        name = f"{key}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, shape))}"
        index = MetadataIndex(name)
        with self._lock:
            if index in self._storage:
                raise ValueError(f"{name} is written twice")
            # a shard of their own, so that the arguments can be verified without hashing tensors
            if self._of_objects is None:
                self._of_objects = self._new_shard()
            self._storage[index] = self._of_objects.append([value])
            self._objects[name] = BytesStorageMetadata()

    def close(self, common: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Write the common state, the index, where it came from, the commit mark and the hashes.

        Args:
            common: what all ranks have in common: ``args`` (a ``Namespace`` of plain values),
                ``iteration``, ``checkpoint_version`` (3.0).
            source: identity of what was converted (``identity()`` of its reader).

        Raises:
            CheckpointError: a tensor lacks chunks, or ``common`` cannot be stored.
        """
        self._check_complete()
        try:
            self.write_object(COMMON, dict(common))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder}: the training state cannot be stored ({error})"
            ) from error
        self._close_shards()
        metadata = Metadata(
            state_dict_metadata=self._tensors | self._objects,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))
        tensors = {
            key: {
                "dtype": str(whole.properties.dtype).removeprefix("torch."),
                "shape": list(whole.size),
            }
            for key, whole in sorted(self._tensors.items())
        }
        write_converted_from(self.folder, source, tensors)
        (self.folder / COMMIT_MARK).write_text(json.dumps(_MARK))
        write_hashes(self.folder, {shard.name: shard.digest for shard in self._shards})

    def _shard(self) -> "_Shard":
        """This thread's own; call it under the lock."""
        if not hasattr(self._own, "shard"):
            self._own.shard = self._new_shard()
        return self._own.shard

    def _new_shard(self) -> "_Shard":
        shard = _Shard(self.folder / f"__0_{len(self._shards)}.distcp")
        self._shards.append(shard)
        return shard

    def _check_complete(self) -> None:
        for key, whole in self._tensors.items():
            held = sum(math.prod(chunk.sizes) for chunk in whole.chunks)
            if held != math.prod(whole.size):
                raise CheckpointError(
                    f"{self.folder} is incomplete: {held} of {math.prod(whole.size)} elements of "
                    f"{key} were written"
                )
            if not lie_apart([(chunk.offsets, chunk.sizes) for chunk in whole.chunks]):
                raise CheckpointError(
                    f"{self.folder} is incomplete: chunks of {key} overlap, and leave a part of it "
                    "unwritten"
                )

    def _close_shards(self) -> None:
        for shard in self._shards:
            shard.close()


def _alone(tensor: Tensor) -> Tensor:
    """A contiguous tensor over a storage of its own elements only: all of it is saved."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8)
    return memory.view(tensor.dtype).view(tensor.shape)


class _Shard(io.RawIOBase):
    """A file that is appended to, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.name = path.name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = hashlib.sha256()
        self._length = 0
        self._refused: OSError | None = None

    def append(self, value: Any) -> _StorageInfo:
        self.write(bytes(-self._length % _ALIGNMENT))
        start = self._length
        if isinstance(value, Tensor):
            value = _alone(value)
        try:
            torch.save(value, cast(IO[bytes], self))
        except RuntimeError as error:  # torch's, about an archive without an end
            raise self._refused or error from None
        return _StorageInfo(self.name, start, self._length - start)

    def write(self, data: Any) -> int:
        """Append; returns how many bytes."""
        part = memoryview(data).cast("B")
        try:
            write_at(self._file, part, self._length, self._hash.update)
        except OSError as error:
            self._refused = error
            raise
        self._length += len(part)
        return len(part)

    def writable(self) -> bool:
        """Always, and nothing else: it cannot seek."""
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
