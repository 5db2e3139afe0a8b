"""Where a conversion takes its tensors from.

A source knows its architecture and answers for every place of it with the Hugging Face tensors
that belong there, so that Megatron and Hugging Face checkpoints look alike and transformations
(``transforms``) are sources around sources. Opening one compares the configuration with the shapes
of all tensors: what disagrees is refused before anything is written.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint
from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments, hybrid_layers
from kha_megatron.conversion.table import Place, places
from kha_megatron.errors import CheckpointError

EMBEDDING = "embedding.word_embeddings.weight"
_SINGLE = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
_ATTENTION = ("self_attention.", "input_layernorm.")
_RECOMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that old transformers saved and that follow from the configuration."""


class Source(ABC):
    """Tensors of a model, place by place. Reading is safe from several threads.

    Attributes:
        model: what the tensors are.
        path: the folder.
    """

    model: Architecture
    path: Path

    @abstractmethod
    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """The Hugging Face tensors of a place, in the order of its names.

        Args:
            place: one of ``table.places(self.model)``.
            meta: only their shapes and dtypes, as meta tensors.

        Raises:
            CheckpointError: a file is damaged.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Which checkpoint this is, for manifests."""

    def verifying(self) -> AbstractContextManager[None]:
        """Around reading all: whatever is not checked as it is read is checked at its end."""
        return nullcontext()

    def nbytes(self, place: Place) -> int:
        """Bytes of a place's tensors."""
        return sum(tensor.nbytes for tensor in self.read(place, meta=True))


class MegatronSource(Source):
    """A ``torch_dist`` checkpoint, of a GPTModel or a HybridModel of the same layers.

    Args:
        checkpoint: opened.
        vocab_size: entries, without padding; None for all rows of the embedding.

    Raises:
        CheckpointError: its arguments cannot be expressed, or call for other tensors than it holds.
    """

    def __init__(self, checkpoint: MegatronCheckpoint, vocab_size: int | None = None) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self._infos = held = checkpoint.keys()
        if EMBEDDING not in held:
            raise CheckpointError(f"{self.path} lacks {EMBEDDING}: it holds no GPTModel")
        rows = held[EMBEDDING].shape[0]
        model = from_arguments(checkpoint.args, checkpoint.kha or KHAConfig(), rows)
        self.model = replace(model, vocab_size=vocab_size or rows)
        self._step = 2 if hybrid_layers(checkpoint.args) else 1
        self._keys: dict[Place, tuple[str, tuple[int, ...]]] = {}
        self._find_keys()

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        key, index = self._keys[place]
        if meta:
            dtype = self._infos[key].dtype
            tensor = torch.empty(place.row.shape(self.model), dtype=dtype, device="meta")
        else:
            tensor = self.checkpoint.tensor(key, index)
        return place.row.layout.split(tensor, self.model)

    def verifying(self) -> AbstractContextManager[None]:
        """See :class:`Source`."""
        return self.checkpoint.verifying()

    def identity(self) -> dict[str, Any]:
        """See :class:`Source`."""
        return self.checkpoint.identity()

    def _find_keys(self) -> None:
        """Find each place's tensor; refuse tensors without a place and places without a tensor."""
        stored = self._stored()
        used, lost = set(), []
        for place in places(self.model):
            names = [self._position(place, name) for name in place.row.names]
            found = [name for name in names if name in stored]
            used |= set(found)
            if not found:
                lost.append(_full_name(names[0]))
                continue
            key, index = stored[found[0]]
            if place.expert is not None:
                index = (*index, place.expert)
            self._check_shape(key, index, place)
            self._keys[place] = key, index
        _refuse(
            {_full_name(name) for name in stored.keys() - used},
            f"{self.path} holds {{}} tensors that its training arguments have no place for",
        )
        _refuse(lost, f"{self.path} lacks {{}} tensors that its training arguments call for")

    def _stored(self) -> dict[tuple[int | None, str], tuple[str, tuple[int, ...]]]:
        """Where the tensor of each layer is, stacked or by itself."""
        stored: dict[tuple[int | None, str], tuple[str, tuple[int, ...]]] = {}
        for key, info in self._infos.items():
            if match := _SINGLE.fullmatch(key):
                stored[int(match[1]), match[2]] = key, ()
            elif key.startswith(LAYERS) and info.shape:
                name = key.removeprefix(LAYERS)
                stored |= {(layer, name): (key, (layer,)) for layer in range(info.shape[0])}
            else:
                stored[None, key] = key, ()
        return stored

    def _position(self, place: Place, name: str) -> tuple[int | None, str]:
        if place.layer is None:
            return None, name
        behind = self._step == 2 and not name.startswith(_ATTENTION)
        return self._step * place.layer + behind, name

    def _check_shape(self, key: str, index: tuple[int, ...], place: Place) -> None:
        shape = self._infos[key].shape
        expected = place.row.shape(self.model)
        experts = () if place.expert is None else (self.model.experts.count,)
        layers = shape[: len(index) - len(experts)]
        if shape != (*layers, *experts, *expected):
            raise CheckpointError(
                f"{self.path}: {key} is {shape}, its training arguments call for "
                f"{(*layers, *experts, *expected)}"
            )
        _check_dtype(self.path, key, self._infos[key].dtype)


class HFSource(Source):
    """A Hugging Face model folder.

    Args:
        checkpoint: opened.

    Raises:
        CheckpointError: ``config.json`` cannot be expressed, or calls for other tensors than the
            folder holds.
    """

    def __init__(self, checkpoint: HFCheckpoint) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self.model = from_hf_config(checkpoint.config)
        self._infos: dict[str, Any] = {}
        held = {key for key in sorted(checkpoint.keys()) if not key.endswith(_RECOMPUTED)}
        wanted: dict[str, tuple[int, ...]] = {}
        for place in places(self.model):
            shape = place.row.shape(self.model)
            parts = place.row.layout.split(torch.empty(shape, device="meta"), self.model)
            names = place.hf_names(self.model)
            wanted |= {n: tuple(part.shape) for n, part in zip(names, parts, strict=True)}
        _refuse(
            held - wanted.keys() - self._copy_of_the_embedding(held) - self._without_elements(held),
            f"{self.path} holds {{}} tensors that its {CONFIG} has no place for",
        )
        _refuse(wanted.keys() - held, f"{self.path} lacks {{}} tensors that its {CONFIG} calls for")
        for name, shape in wanted.items():
            self._infos[name] = info = checkpoint.info(name)
            if info.shape != shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {info.shape}, its {CONFIG} calls for {shape}"
                )
            _check_dtype(self.path, name, info.dtype)

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        names = place.hf_names(self.model)
        if not meta:
            return [self.checkpoint.tensor(name) for name in names]
        infos = [self._infos[name] for name in names]
        return [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos]

    def identity(self) -> dict[str, Any]:
        """See :class:`Source`."""
        return self.checkpoint.identity()

    def _copy_of_the_embedding(self, held: set[str]) -> set[str]:
        """Some tied models are saved with an output layer all the same."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.model.tied or not {head, embedding} <= held:
            return set()
        if not torch.equal(self.checkpoint.tensor(head), self.checkpoint.tensor(embedding)):
            raise CheckpointError(
                f"{self.path}: {CONFIG} has tie_word_embeddings=True, but {head} is not {embedding}"
            )
        return {head}

    def _without_elements(self, held: set[str]) -> set[str]:
        """transformers gives a model with ``n_shared_experts=0`` tensors of no width."""
        shared = (name for name in held if ".shared_experts." in name)
        return {name for name in shared if math.prod(self.checkpoint.info(name).shape) == 0}


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a Hugging Face model folder, and not a Megatron checkpoint."""
    return (Path(path) / CONFIG).is_file()


def _check_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{path}: {name} is {dtype}: a quantised model cannot be converted, save it in "
            "bfloat16 or float32"
        )


def _full_name(position: tuple[int | None, str]) -> str:
    layer, name = position
    return name if layer is None else f"{LAYERS}{layer}.{name}"


def _refuse(names: Iterable[str], problem: str) -> None:
    if names := sorted(set(names)):
        raise CheckpointError(f"{problem.format(len(names))}: {', '.join(names[:5])}")
