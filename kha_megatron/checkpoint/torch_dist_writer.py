"""Write Megatron's ``torch_dist`` checkpoints without Megatron or process groups.

Each thread appends its chunks to its own shard, as ``torch.save`` archives. ``.metadata`` records
the byte range of each chunk. See :mod:`kha_megatron.checkpoint.torch_dist` for the reader.
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
from kha_megatron.checkpoint.manifest import CONVERTED_FROM
from kha_megatron.checkpoint.torch_dist import METADATA
from kha_megatron.checkpoint.tracker import COMMIT_MARK

COMMON = "common_state"
_MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


class TorchDistWriter:
    """Writer of one checkpoint, a context manager that closes its files on exit.

    :meth:`write` and :meth:`write_object` are thread-safe. The writer does not call ``fsync``,
    because ``staging.staged_folder`` flushes all files.

    Args:
        iteration_folder: Existing, empty directory to write to.
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
        """Write a chunk of a global tensor.

        If all layers of a model are alike, their parameters are stacked, and the weight of a layer
        is written as ``tensor[None]`` with ``offsets=(layer, 0, 0)``.

        Args:
            key: Name of the global tensor.
            tensor: Chunk with as many dimensions as the global tensor.
            shape: Shape of the global tensor.
            offsets: Position of the chunk in each dimension of the global tensor.
        """
        size, shape, offsets = tensor.shape, torch.Size(shape), torch.Size(offsets)
        with self._lock:
            whole = self._tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(tensor.dtype), shape, [])
            )
            assert (whole.size, whole.properties.dtype) == (shape, tensor.dtype), key
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
        """Write an object that is not a tensor, such as a ``Namespace`` or an ``_extra_state``.

        Megatron expects an ``_extra_state`` for every module, which is None without FP8. For
        stacked layers use ``shape=(layers,)`` and ``offsets=(layer,)``, and for experts
        ``shape=(layers, experts)`` and ``offsets=(layer, expert)``.
        """
        name = f"{key}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, shape))}"
        self._objects[name] = BytesStorageMetadata()
        self._append(MetadataIndex(name), [value])

    def close(self, common: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Finish the checkpoint: write the common state, all metadata files and the hashes.

        Args:
            common: State common to all ranks: ``args`` (a ``Namespace`` of plain values),
                ``iteration`` and ``checkpoint_version`` (3.0).
            source: Description of the converted checkpoint, from ``identity()`` of its reader.
        """
        for key, whole in self._tensors.items():
            written = sum(math.prod(chunk.sizes) for chunk in whole.chunks)
            assert written == math.prod(whole.size), f"{key}: {written} elements of {whole.size}"
        self.write_object(COMMON, dict(common))
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
        text = json.dumps({"source": dict(source), "tensors": tensors}, indent=2) + "\n"
        (self.folder / CONVERTED_FROM).write_text(text, encoding="utf-8")
        (self.folder / COMMIT_MARK).write_text(json.dumps(_MARK))
        write_hashes(self.folder)

    def _append(self, index: MetadataIndex, value: Any) -> None:
        """Append a ``torch.save`` archive to this thread's shard."""
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
            # torch cannot finish the archive after a failed write
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        self._storage[index] = _StorageInfo(Path(shard.name).name, start, shard.tell() - start)
