"""Write a ``torch_dist`` checkpoint as Megatron-Core does, without Megatron or process groups.

Each thread has a shard of its own and appends one ``torch.save`` archive per chunk.
``.metadata`` lists where the chunks are. :mod:`kha_megatron.checkpoint.torch_dist` reads them.
"""

import json
import math
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

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

from kha_megatron.checkpoint.integrity import write_hashes
from kha_megatron.checkpoint.manifest import write_converted_from
from kha_megatron.checkpoint.torch_dist import METADATA
from kha_megatron.checkpoint.tracker import COMMIT_MARK
from kha_megatron.errors import CheckpointError

COMMON = "common_state"
_MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class TorchDistWriter:
    """Writes one iteration into an existing, empty directory.

    Several threads may call :meth:`write` and :meth:`write_object`. A tensor that is contiguous and
    has a storage of its own is not copied. Nothing is flushed to disk: ``staging.staged_folder``
    does that. As a context manager it closes its files.
    """

    def __init__(self, iteration_folder: Path) -> None:
        self.folder = iteration_folder
        self._lock = threading.Lock()
        self._own = threading.local()
        self._shards: list[IO[bytes]] = []
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._shards:
            shard.close()

    def write(
        self, key: str, tensor: Tensor, *, shape: tuple[int, ...], offsets: tuple[int, ...]
    ) -> None:
        """Write a chunk of the tensor ``key``.

        A layer of a homogeneous model is a chunk of the stack: ``tensor[None]`` at
        ``offsets=(layer, 0, 0)``.

        Args:
            key: Name of the whole tensor.
            tensor: The chunk, with as many dimensions as the whole.
            shape: Shape of the whole tensor. Shape and dtype are the same for all chunks.
            offsets: Where the chunk begins.
        """
        size, shape, offsets = tensor.shape, torch.Size(shape), torch.Size(offsets)
        fits = len(size) == len(shape) == len(offsets) and all(
            o >= 0 and o + n <= whole for o, n, whole in zip(offsets, size, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{key}: {tuple(size)} at {tuple(offsets)} is not in {tuple(shape)}")
        with self._lock:
            whole = self._tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(tensor.dtype), shape, [])
            )
            if (whole.size, whole.properties.dtype) != (shape, tensor.dtype):
                raise ValueError(f"{key}: its chunks differ in dtype or in the whole's shape")
            whole.chunks.append(ChunkStorageMetadata(offsets, size))
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes whole storages
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._append(MetadataIndex(key, offsets), tensor)

    def write_object(
        self,
        key: str,
        value: Any,
        *,
        shape: tuple[int, ...] = (1,),
        offsets: tuple[int, ...] = (0,),
    ) -> None:
        """Write a value that is not a tensor, such as a ``Namespace``.

        Megatron loads a checkpoint only if it has the ``_extra_state`` of every module, which is
        None without FP8. Use ``shape=(layers,), offsets=(layer,)`` for stacked layers, and
        ``(layers, experts)`` and ``(layer, expert)`` for an expert.

        Args:
            key: Such as ``decoder.layers.self_attention.linear_proj._extra_state``.
            value: Plain values, or a ``Namespace``.
            shape: Shape of the grid of such objects.
            offsets: The place of this object in the grid.
        """
        name = f"{key}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, shape))}"
        self._objects[name] = BytesStorageMetadata()
        self._append(MetadataIndex(name), [value])

    def close(self, common: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Write the common state, the index, ``converted_from.json``, the commit mark and hashes.

        Args:
            common: The state that all ranks share: ``args`` (a ``Namespace`` of plain values),
                ``iteration``, ``checkpoint_version`` (3.0).
            source: Identity of what was converted (``identity()`` of its reader).
        """
        for key, whole in self._tensors.items():
            held = sum(math.prod(chunk.sizes) for chunk in whole.chunks)
            if held != math.prod(whole.size):
                raise CheckpointError(
                    f"{self.folder} is incomplete: {held} of {math.prod(whole.size)} elements of "
                    f"{key} were written"
                )
        try:
            self.write_object(COMMON, dict(common))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder}: the training state cannot be stored ({error})"
            ) from error
        self.__exit__()
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
        write_hashes(self.folder)

    def _append(self, index: MetadataIndex, value: Any) -> None:
        """Append an archive to this thread's shard."""
        if not hasattr(self._own, "shard"):
            with self._lock:
                path = self.folder / f"__0_{len(self._shards)}.distcp"
                self._own.shard = path.open("wb")
                self._shards.append(self._own.shard)
        shard = self._own.shard
        start = shard.tell()
        try:
            torch.save(value, shard)
        except RuntimeError as error:
            # torch fails to end the archive after the disk has refused a part of it
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        self._storage[index] = _StorageInfo(Path(shard.name).name, start, shard.tell() - start)
