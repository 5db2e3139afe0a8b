"""Streaming writer for sharded safetensors models.

We write all headers first, so tensors can then be written in any order and from any thread. The
files are byte-identical to those of ``safetensors.torch.save_file``.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import INDEX, WEIGHTS
from kha_megatron.checkpoint.manifest import write_manifest
from kha_megatron.checkpoint.safetensors_file import DTYPE_NAMES, TensorEntry, bytes_of, header
from kha_megatron.checkpoint.staging import check_room


class HFWriter:
    """Writes safetensors shards, the index and the manifest.

    Note: this does not call ``fsync``. Use ``staging.staged_folder``, which flushes all files.

    Args:
        folder (Path): Empty output directory.
        tensors (Sequence[TensorEntry]): All tensors that will be written, in model order.
        max_shard_bytes (int): Maximum shard size. As in ``save_pretrained``, larger tensors get
            their own shard.

    Raises:
        OutputError: If there is not enough disk space.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorEntry],
        *,
        max_shard_bytes: int,
    ) -> None:
        self.folder = folder
        self._entries = {entry.name: entry for entry in tensors}
        self._files: dict[str, str] = {}
        self._file_offsets: dict[str, int] = {}  # in bytes
        self._digests: dict[str, str] = {}
        total_size = sum(entry.nbytes for entry in tensors)
        check_room(folder, total_size)
        split = split_state_dict_into_shards_factory(
            self._entries,
            get_storage_size=lambda entry: entry.nbytes,
            filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_bytes,
        )
        self._shards = split.filename_to_tensors
        for file, names in self._shards.items():
            entries = [self._entries[name] for name in names]
            header_bytes, file_offsets = header(entries)
            self._file_offsets |= file_offsets
            self._files |= dict.fromkeys(names, file)
            data_size = sum(entry.nbytes for entry in entries)
            with (folder / file).open("wb") as shard:
                shard.write(header_bytes)
                shard.truncate(len(header_bytes) + data_size)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor (thread-safe). It does not have to be contiguous."""
        entry = self._entries[name]
        assert entry.dtype == tensor.dtype, name
        assert entry.shape == tensor.shape, name
        data = bytes_of(tensor)
        path = self.folder / self._files[name]
        with path.open("r+b") as shard:
            shard.seek(self._file_offsets[name])
            shard.write(data)
        digest = hashlib.sha256(data)
        self._digests[name] = digest.hexdigest()

    def close(self, source: Mapping[str, Any]) -> int:
        """Write the manifest and (if there is more than one shard) the index.

        Args:
            source (Mapping[str, Any]): ``identity()`` of the source checkpoint.

        Returns:
            int: Number of shards.
        """
        missing = self._entries.keys() - self._digests.keys()
        assert not missing, f"{sorted(missing)} were not written"
        if len(self._shards) > 1:
            self._write_index()
        tensors = {}
        for name, entry in sorted(self._entries.items()):
            tensors[name] = {
                "file": self._files[name],
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "sha256": self._digests[name],
            }
        write_manifest(self.folder, source, tensors)
        return len(self._shards)

    def _write_index(self) -> None:
        parameters = 0
        size = 0
        for entry in self._entries.values():
            parameters += math.prod(entry.shape)
            size += entry.nbytes
        index = {
            "metadata": {"total_parameters": parameters, "total_size": size},
            "weight_map": self._files,
        }
        content = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / INDEX).write_text(content, encoding="utf-8")
