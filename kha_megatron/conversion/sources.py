"""Where a conversion takes its tensors from.

A source knows its architecture and answers for every place of it with the Hugging Face tensors
that belong there, so that Megatron and Hugging Face checkpoints look alike and transformations
(``transforms``) are sources around sources. Opening one compares the configuration with the shapes
of all tensors: what disagrees is refused before anything is written.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kha_megatron.announcements import announce
from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.companions import PADDING, Companions
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments, hybrid_layers
from kha_megatron.conversion.table import Place, places
from kha_megatron.errors import CheckpointError, ConfigError, KHAError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embedding.word_embeddings.weight"
_LARGEST = 2**56
"""Numbers of a tensor that some file might hold."""
_SINGLE = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
_ATTENTION = ("self_attention.", "input_layernorm.")
_RECOMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that old transformers saved and that follow from the configuration."""


class Source(ABC):
    """Tensors of a model, place by place. Reading is safe from several threads.

    Attributes:
        checkpoint: the open folder that they come from.
        companions: what travels along.
        model: what the tensors are.
        padding_arguments: those that explain the padding of a Megatron vocabulary, if it was kept.
    """

    padding_arguments: Mapping[str, Any] = {}

    def __init__(
        self,
        checkpoint: HFCheckpoint | MegatronCheckpoint,
        companions: Companions,
        model: Architecture,
    ) -> None:
        self.checkpoint, self.companions, self.model = checkpoint, companions, model

    @abstractmethod
    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """The Hugging Face tensors of a place, in the order of its names.

        Args:
            place: one of ``table.places(self.model)``.
            meta: only their shapes and dtypes, as meta tensors.

        Raises:
            CheckpointError: a file is damaged.
        """

    @property
    def path(self) -> Path:
        """The folder."""
        return self.checkpoint.path

    def identity(self) -> dict[str, Any]:
        """Which checkpoint this is, for manifests."""
        return self.checkpoint.identity()

    def verifying(self) -> AbstractContextManager[None]:
        """Around reading all: whatever is not checked as it is read is checked at its end."""
        return nullcontext()

    def entries(self) -> Iterator[tuple[Place, list[TensorEntry]]]:
        """Every place with the names, dtypes and shapes of its tensors, in the model's order."""
        for place in places(self.model):
            names, parts = place.hf_names(self.model), self.read(place, meta=True)
            yield (
                place,
                [
                    TensorEntry(name, part.dtype, tuple(part.shape))
                    for name, part in zip(names, parts, strict=True)
                ],
            )


class MegatronSource(Source):
    """A ``torch_dist`` checkpoint, of a GPTModel or a HybridModel of the same layers.

    Args:
        path: a ``--save`` folder or one iteration of it.
        tokenizer: a tokenizer folder instead of the run's own.
        padded: keep the padding of the vocabulary.
        comparing: go without a tokenizer that is not there or does not fit: only to tell the
            padding apart.

    Raises:
        CheckpointError: it is damaged; its arguments cannot be expressed, or call for other tensors
            than it holds; the tokenizer has more entries than the embedding has rows.
        ConfigError: the tokenizer cannot be loaded.
    """

    checkpoint: MegatronCheckpoint

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: Path | None = None,
        padded: bool = False,
        comparing: bool = False,
    ) -> None:
        checkpoint = MegatronCheckpoint.open(path)
        args, held = checkpoint.args, checkpoint.keys()
        if EMBEDDING not in held:
            raise CheckpointError(f"{checkpoint.path} lacks {EMBEDDING}: it holds no GPTModel")
        rows = held[EMBEDDING].shape[0]
        try:
            companions = Companions.of_megatron(args, tokenizer)
            entries = rows if padded else companions.vocabulary(args, rows)
        except KHAError:
            if not comparing:
                raise
            companions = Companions({})
            entries = companions.vocabulary(args, rows)
        if padded:
            self.padding_arguments = {name: args.get(name) for name in ("vocab_size", *PADDING)}
        self._step = 2 if hybrid_layers(args) else 1
        model = from_arguments(args, KHAConfig.recorded(args) or KHAConfig(), rows)
        model = replace(model, vocab_size=entries)
        super().__init__(checkpoint, companions, model)
        self._infos = held
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
        return place.row.packing.split(tensor, self.model)

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
        experts = () if place.expert is None else (self.model.num_experts,)
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
        path: the folder.
        tokenizer: a tokenizer folder instead of it.

    Raises:
        CheckpointError: it is damaged; ``config.json`` cannot be expressed, or calls for other
            tensors than the folder holds.
        ConfigError: there is no folder ``tokenizer``, or it holds none.
    """

    def __init__(self, path: Path, *, tokenizer: Path | None = None) -> None:
        checkpoint = HFCheckpoint.open(path)
        config = checkpoint.config
        super().__init__(
            checkpoint, Companions.of_hf(path, config, tokenizer), from_hf_config(config)
        )
        if tokenizer is not None:  # refuses one with more entries
            self.companions.vocabulary({}, self.model.vocab_size)
        self.dialect, self._lost = family_of(config).dialect, dict[Place, int]()
        self._infos = {k: i for k, i in checkpoint.keys().items() if not k.endswith(_RECOMPUTED)}
        held = self._infos.keys()
        wanted: dict[str, tuple[int, ...]] = {}
        # many more places than tensors are lacking some, however many layers there are
        for place in islice(places(self.model), 2 * len(held) + 1000):
            shape, names = place.row.shape(self.model), self.dialect.names(place, self.model)
            if min(shape) < 0 or math.prod(shape) > _LARGEST:
                raise CheckpointError(
                    f"{path}: its {CONFIG} calls for {names[0]} of {shape}, which no file holds"
                )
            parts = place.row.packing.split(torch.empty(shape, device="meta"), self.model)
            parts = self.dialect.written(place, self.model, parts)
            wanted |= {n: tuple(part.shape) for n, part in zip(names, parts, strict=True)}
        _refuse(wanted.keys() - held, f"{path} lacks {{}} tensors that its {CONFIG} calls for")
        _refuse(
            held - wanted.keys() - self._copy_of_the_embedding() - self._without_elements(),
            f"{path} holds {{}} tensors that its {CONFIG} has no place for",
        )
        for name, shape in wanted.items():
            if (found := self._infos[name].shape) != shape:
                raise CheckpointError(f"{path}: {name} is {found}, its {CONFIG} calls for {shape}")
            _check_dtype(path, name, self._infos[name].dtype)

    def read(self, place: Place, *, meta: bool = False) -> list[Tensor]:
        """See :class:`Source`."""
        names = self.dialect.names(place, self.model)
        if meta:
            infos = [self._infos[name] for name in names]
            held = [torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos]
        else:
            held = [self.checkpoint.tensor(name) for name in names]
            self._lost[place] = self.dialect.lost_in_reading(place, self.model, held)
        return self.dialect.read(place, self.model, held)

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """See :class:`Source`; says at the end what was rounded."""
        with super().verifying():
            yield
        if count := sum(self._lost.values()):
            announce(
                f"{count:,} weights of norms are rounded: {self.path} stores how far they are from "
                "one, which has finer digits than a weight near one",
                once=("norms", self.path),
            )

    def _copy_of_the_embedding(self) -> set[str]:
        """Some tied models are saved with an output layer all the same."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.model.tied_embeddings or not {head, embedding} <= self._infos.keys():
            return set()
        if not torch.equal(self.checkpoint.tensor(head), self.checkpoint.tensor(embedding)):
            raise CheckpointError(
                f"{self.path}: {CONFIG} has tie_word_embeddings=True, but {head} is not {embedding}"
            )
        return {head}

    def _without_elements(self) -> set[str]:
        """transformers gives a model with ``n_shared_experts=0`` tensors of no width."""
        shared = ((name, info) for name, info in self._infos.items() if ".shared_experts." in name)
        return {name for name, info in shared if math.prod(info.shape) == 0}


def open_source(
    path: Path, *, tokenizer: Path | None = None, padded: bool = False, comparing: bool = False
) -> Source:
    """A Hugging Face folder (it has a ``config.json``), or a Megatron checkpoint.

    For arguments and errors see :class:`HFSource` and :class:`MegatronSource`.
    """
    if is_hf_folder(path):
        return HFSource(path, tokenizer=tokenizer)
    return MegatronSource(path, tokenizer=tokenizer, padded=padded, comparing=comparing)


def not_finite(tensor: Tensor) -> int:
    """How many of its numbers are NaN or infinite; a meta tensor has none."""
    # the ends, which are NaN where one number is, take a tenth of the time of a look at each
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a name; None for None.

    Raises:
        ConfigError: there is none.
    """
    if name is not None and name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _check_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES.values():
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
