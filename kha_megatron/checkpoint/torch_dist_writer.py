"""Multi-threaded writer for ``torch_dist`` checkpoints (no Megatron or process groups needed).

Each thread appends to its own shard. For the file format, see
:mod:`kha_megatron.checkpoint.torch_dist`.
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
    """Writes one checkpoint. Use it as a context manager to close the files.

    :meth:`write` and :meth:`write_object` are thread-safe. Like ``HFWriter``, we leave ``fsync`` to
    ``staging.staged_folder``.
    """

    def __init__(self, iteration_folder: Path) -> None:
        self.folder = iteration_folder
        self._lock = threading.Lock()
        self._thread = threading.local()  # has the attribute shard: the file of this thread
        self._shards: list[IO[bytes]] = []
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shards()

    def _close_shards(self) -> None:
        for shard in self._shards:
            shard.close()

    def write(
        self,
        key: str,
        tensor: Tensor,
        *,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
    ) -> None:
        """Write a chunk of a global tensor.

        For stacked layers, you would write the weight of layer 3 like this::

            writer.write(key, weight[None], shape=(num_layers, *weight.shape), offsets=(3, 0, 0))

        Args:
            key (str): Name of the global tensor.
            tensor (Tensor): Chunk with the same number of dimensions as the global tensor.
            shape (tuple[int, ...]): Shape of the global tensor.
            offsets (tuple[int, ...]): Position of the chunk in the global tensor.
        """
        global_shape = torch.Size(shape)
        chunk_offsets = torch.Size(offsets)
        new_tensor = TensorStorageMetadata(
            TensorProperties(tensor.dtype),
            global_shape,
            [],
        )
        with self._lock:
            global_tensor = self._tensors.setdefault(key, new_tensor)
            assert global_tensor.size == global_shape, key
            assert global_tensor.properties.dtype == tensor.dtype, key
            chunk = ChunkStorageMetadata(chunk_offsets, tensor.shape)
            global_tensor.chunks.append(chunk)
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes whole storages
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._append(MetadataIndex(key, chunk_offsets), tensor)

    def write_object(
        self,
        key: str,
        value: Any,
        *,
        shape: tuple[int, ...] = (1,),
        offsets: tuple[int, ...] = (0,),
    ) -> None:
        """Write anything that is not a tensor, e.g. a ``Namespace`` or an ``_extra_state``.

        Megatron expects an ``_extra_state`` for every module (it is None without FP8). Use
        ``shape=(num_layers,)`` and ``offsets=(layer,)`` if layers are stacked, and
        ``shape=(num_layers, num_experts)`` and ``offsets=(layer, expert)`` for experts.
        """
        # Megatron's name for a shard of an object, e.g. KEY/shard_3.0_12.8
        position = ".".join(map(str, offsets))
        size = ".".join(map(str, shape))
        name = f"{key}/shard_{position}_{size}"
        self._objects[name] = BytesStorageMetadata()
        self._append(MetadataIndex(name), [value])

    def close(self, common: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Write the common state, all metadata, and hashes.

        Args:
            common (Mapping[str, Any]): Common state dict with ``args`` (a ``Namespace`` of plain
                values), ``iteration``, and ``checkpoint_version`` (3.0).
            source (Mapping[str, Any]): ``identity()`` of the source checkpoint.
        """
        for key, tensor in self._tensors.items():
            written = 0
            for chunk in tensor.chunks:
                written += math.prod(chunk.sizes)
            size = math.prod(tensor.size)
            assert written == size, f"{key}: {written} elements of {tensor.size}"
        self.write_object(COMMON, dict(common))
        self._close_shards()
        metadata = Metadata(
            state_dict_metadata=self._tensors | self._objects,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        metadata_file = self.folder / METADATA
        metadata_file.write_bytes(pickle.dumps(metadata))
        source_file = self.folder / CONVERTED_FROM
        content = json.dumps({"source": dict(source)}, indent=2) + "\n"
        source_file.write_text(content, encoding="utf-8")
        commit_mark = self.folder / COMMIT_MARK
        commit_mark.write_text(json.dumps(_MARK))
        write_hashes(self.folder)

    def _append(self, index: MetadataIndex, value: Any) -> None:
        if not hasattr(self._thread, "shard"):
            with self._lock:
                path = self.folder / f"__0_{len(self._shards)}.distcp"
                self._thread.shard = path.open("wb")
                self._shards.append(self._thread.shard)
        shard = self._thread.shard
        start = shard.tell()
        try:
            torch.save(value, shard)
        except RuntimeError as error:
            # torch cannot finish the archive after a failed write
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        name = Path(shard.name).name
        length = shard.tell() - start
        self._storage[index] = _StorageInfo(name, start, length)
