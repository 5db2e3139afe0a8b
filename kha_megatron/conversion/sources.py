"""Open a checkpoint of either side as a source of Hugging Face tensors.

Opening compares the configuration with the shapes of all tensors, so that a mismatch is refused
before anything is written. Transformations (``transforms``) wrap a source's ``read``.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.companions import PADDING, Companions
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.hf_families import STANDARD, FileFormat
from kha_megatron.conversion.megatron_arguments import from_arguments, hybrid_layers
from kha_megatron.conversion.table import Place, places
from kha_megatron.errors import CheckpointError, ConfigError, KHAError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embedding.word_embeddings.weight"
_LARGEST = 2**56
"""More elements than any file holds."""
_SINGLE = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")
_ATTENTION = ("self_attention.", "input_layernorm.")
_RECOMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers of old transformers checkpoints that follow from the configuration."""


class Read(Protocol):
    """Return the Hugging Face tensors of a place in the order of its names.

    With ``meta``, return meta tensors of the same shapes and dtypes. Safe to call from several
    threads. Raises CheckpointError if a file is damaged.
    """

    def __call__(self, place: Place, *, meta: bool = False) -> list[Tensor]: ...


@dataclass(frozen=True)
class Source:
    """A model's tensors, place by place."""

    checkpoint: HFCheckpoint | MegatronCheckpoint
    companions: Companions
    model: Architecture
    """What the tensors are."""
    read: Read
    files: FileFormat = STANDARD
    """How the files of a Hugging Face directory differ from the table."""
    padding_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that explain the padding of a Megatron vocabulary, if it was kept."""

    @property
    def path(self) -> Path:
        """The directory."""
        return self.checkpoint.path

    def entries(self) -> Iterator[tuple[Place, list[TensorEntry]]]:
        """Yield every place with the names, dtypes and shapes of its tensors, in model order."""
        for place in places(self.model):
            named = zip(place.hf_names(self.model), self.read(place, meta=True), strict=True)
            yield place, [TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in named]


def open_source(
    path: Path, *, tokenizer: Path | None = None, padded: bool = False, comparing: bool = False
) -> Source:
    """Open a Hugging Face directory (it has a ``config.json``) or a Megatron checkpoint.

    Args:
        path: The directory. For Megatron, the ``--save`` directory or one iteration of it.
        tokenizer: A tokenizer directory instead of the model's own.
        padded: Keep the padding of a Megatron vocabulary.
        comparing: Accept a Megatron run whose tokenizer is missing or does not fit.

    Raises:
        CheckpointError: The checkpoint is damaged, its configuration cannot be expressed or calls
            for other tensors than it holds, or the tokenizer has too many entries.
        ConfigError: The tokenizer cannot be loaded.
    """
    if is_hf_folder(path):
        return _open_hf(path, tokenizer)
    return _open_megatron(path, tokenizer, padded=padded, comparing=comparing)


def _open_hf(path: Path, tokenizer: Path | None) -> Source:
    checkpoint = HFCheckpoint.open(path)
    companions = Companions.of_hf(path, checkpoint.config, tokenizer)
    model, files = from_hf_config(checkpoint.config), family_of(checkpoint.config).files
    if tokenizer is not None:
        companions.vocabulary({}, model.vocab_size)  # refuses a tokenizer with more entries
    infos = {k: i for k, i in checkpoint.keys().items() if not k.endswith(_RECOMPUTED)}
    wanted: dict[str, tuple[int, ...]] = {}
    # with far more places than tensors some tensor is missing, however many layers there are
    for place in islice(places(model), 2 * len(infos) + 1000):
        shape, names = place.row.shape(model), files.names(place, model)
        if min(shape) < 0 or math.prod(shape) > _LARGEST:
            raise CheckpointError(
                f"{path}: {CONFIG} calls for an impossible shape {shape} of {names[0]}."
            )
        parts = place.row.split(torch.empty(shape, device="meta"), model)
        parts = files.write(place, model, parts)
        wanted |= {n: tuple(part.shape) for n, part in zip(names, parts, strict=True)}
    # some tied models are saved with an output layer, and some without shared experts with tensors
    # of no width
    spare = {n for n, info in infos.items() if ".shared_experts." in n and 0 in info.shape}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if model.tied_embeddings and {head, embedding} <= infos.keys():
        if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
            raise CheckpointError(
                f"{path}: {CONFIG} has tie_word_embeddings=True, but {head} differs from "
                f"{embedding}."
            )
        spare.add(head)
    _refuse(wanted.keys() - infos.keys(), f"{path} lacks {{}} tensors that its {CONFIG} calls for")
    extra = infos.keys() - wanted.keys() - spare
    _refuse(extra, f"{path} holds {{}} tensors that its {CONFIG} has no place for")
    for name, shape in wanted.items():
        _check(path, name, infos[name], shape, CONFIG)

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        names = files.names(place, model)
        held = [_empty(infos[name]) if meta else checkpoint.tensor(name) for name in names]
        return files.read(place, model, held)

    return Source(checkpoint, companions, model, read, files)


def _open_megatron(path: Path, tokenizer: Path | None, *, padded: bool, comparing: bool) -> Source:
    checkpoint = MegatronCheckpoint.open(path)
    args, infos = checkpoint.args, checkpoint.keys()
    if EMBEDDING not in infos:
        raise CheckpointError(f"{checkpoint.path} lacks {EMBEDDING}. Expected a GPT model.")
    rows = infos[EMBEDDING].shape[0]
    try:
        companions = Companions.of_megatron(args, tokenizer)
        entries = rows if padded else companions.vocabulary(args, rows)
    except KHAError:
        if not comparing:
            raise
        companions = Companions({})
        entries = companions.vocabulary(args, rows)
    model = from_arguments(args, KHAConfig.recorded(args) or KHAConfig(), rows)
    model = replace(model, vocab_size=entries)
    stored = _find(checkpoint, model, step=2 if hybrid_layers(args) else 1)

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        key, index = stored[place]
        if meta:
            shape, dtype = place.row.shape(model), infos[key].dtype
            return place.row.split(torch.empty(shape, dtype=dtype, device="meta"), model)
        return place.row.split(checkpoint.tensor(key, index), model)

    kept = {name: args.get(name) for name in ("vocab_size", *PADDING)} if padded else {}
    return Source(checkpoint, companions, model, read, padding_arguments=kept)


def _find(
    checkpoint: MegatronCheckpoint, model: Architecture, step: int
) -> dict[Place, tuple[str, tuple[int, ...]]]:
    """Return the key and index of each place's tensor.

    Args:
        checkpoint: The tensors. Layers of the same shapes are stacked.
        model: What its arguments describe.
        step: 2 for a HybridModel, in which attention and MLP are separate layers.

    Raises:
        CheckpointError: A tensor has no place, or a place has no tensor or one of another shape.
    """
    infos, path = checkpoint.keys(), checkpoint.path
    stored: dict[tuple[int | None, str], tuple[str, tuple[int, ...]]] = {}
    for key, info in infos.items():
        if match := _SINGLE.fullmatch(key):
            stored[int(match[1]), match[2]] = key, ()
        elif key.startswith(LAYERS) and info.shape:
            name = key.removeprefix(LAYERS)
            stored |= {(layer, name): (key, (layer,)) for layer in range(info.shape[0])}
        else:
            stored[None, key] = key, ()
    found: dict[Place, tuple[str, tuple[int, ...]]] = {}
    used, lost = set(), []
    for place in places(model):
        at: list[tuple[int | None, str]] = []
        for name in place.row.names:
            behind = step == 2 and not name.startswith(_ATTENTION)
            at.append((None if place.layer is None else step * place.layer + behind, name))
        held = [position for position in at if position in stored]
        used |= set(held)
        if not held:
            lost.append(_full_name(at[0]))
            continue
        key, index = stored[held[0]]
        experts = () if place.expert is None else (model.num_experts,)
        expected = (*infos[key].shape[: len(index)], *experts, *place.row.shape(model))
        _check(path, key, infos[key], expected, "training arguments")
        found[place] = key, index if place.expert is None else (*index, place.expert)
    extra = {_full_name(position) for position in stored.keys() - used}
    _refuse(extra, f"{path} holds {{}} tensors that its training arguments have no place for")
    _refuse(lost, f"{path} lacks {{}} tensors that its training arguments call for")
    return found


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name, None for None.

    Raises:
        ConfigError: The name is unknown.
    """
    if name is not None and name not in DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}. Choose one of {', '.join(DTYPES)}.")
    return None if name is None else DTYPES[name]


def not_finite(tensor: Tensor) -> int:
    """Return how many elements are NaN or infinite; 0 for a meta tensor."""
    # aminmax is NaN if any element is, and takes a tenth of the time of isfinite
    if tensor.is_meta or not tensor.numel() or all(map(torch.isfinite, tensor.aminmax())):
        return 0
    return int((~tensor.isfinite()).sum())


def _empty(info: Any) -> Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _check(path: Path, name: str, info: Any, shape: tuple[int, ...], caller: str) -> None:
    if info.shape != shape:
        raise CheckpointError(f"{path}: {name} is {info.shape}, its {caller} calls for {shape}.")
    if info.dtype not in DTYPES.values():
        raise CheckpointError(
            f"{path}: {name} is {info.dtype}. Expected one of {', '.join(DTYPES)}: a quantized "
            "model cannot be converted."
        )


def _full_name(position: tuple[int | None, str]) -> str:
    layer, name = position
    return name if layer is None else f"{LAYERS}{layer}.{name}"


def _refuse(names: Iterable[str], problem: str) -> None:
    if names := sorted(set(names)):
        raise CheckpointError(f"{problem.format(len(names))}: {', '.join(names[:5])}")
