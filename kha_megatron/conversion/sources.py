"""Open a checkpoint of either side as a source of Hugging Face tensors.

Opening compares the configuration with the shapes of all tensors, so that a mismatch is refused
before anything is written. Transformations (``transforms``) wrap a source's ``read``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kha_megatron.checkpoint.hf_reader import CONFIG, HFCheckpoint, is_hf_folder
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.checkpoint.safetensors_file import TensorEntry
from kha_megatron.config import KHAConfig
from kha_megatron.conversion.architecture import Architecture
from kha_megatron.conversion.companions import PADDING, Companions
from kha_megatron.conversion.hf_configs import family_of, from_hf_config
from kha_megatron.conversion.megatron_arguments import from_arguments, hybrid_layers
from kha_megatron.conversion.rows import STANDARD, FileFormat, Place
from kha_megatron.conversion.table import file_shapes, locate, places
from kha_megatron.errors import CheckpointError, ConfigError, KHAError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING = "embedding.word_embeddings.weight"
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
        CheckpointError: The checkpoint is damaged or does not fit its configuration or tokenizer.
        ConfigError: The tokenizer cannot be loaded.
    """
    if is_hf_folder(path):
        return _open_hf(path, tokenizer)
    return _open_megatron(path, tokenizer, padded=padded, comparing=comparing)


def _open_hf(path: Path, tokenizer: Path | None) -> Source:
    checkpoint = HFCheckpoint.open(path)
    companions = Companions.of_hf(path, checkpoint.config, tokenizer)
    files, model = family_of(checkpoint.config).files, from_hf_config(checkpoint.config)
    infos = {k: i for k, i in checkpoint.keys().items() if not k.endswith(_RECOMPUTED)}
    # with far more places than tensors some tensor is missing, however many layers there are
    wanted = file_shapes(model, files, 2 * len(infos) + 1000)
    # models without shared experts may have tensors of no width for them
    spare = {n for n, info in infos.items() if ".shared_experts." in n and 0 in info.shape}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if model.tied_embeddings and {head, embedding} <= infos.keys():  # some models are saved so
        if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
            raise CheckpointError(
                f"{path}: {CONFIG} has tie_word_embeddings=True, but {head} differs from "
                f"{embedding}."
            )
        spare.add(head)
    missing, unexpected = wanted.keys() - infos.keys(), infos.keys() - wanted.keys() - spare
    _check_tensors(str(path), CONFIG, infos, wanted, missing, unexpected)

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        names = files.names(place, model)
        if not meta:
            return files.read(place, model, [checkpoint.tensor(name) for name in names])
        held = [torch.empty(infos[n].shape, dtype=infos[n].dtype, device="meta") for n in names]
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
    step = 2 if hybrid_layers(args) else 1
    model = from_arguments(args, KHAConfig.from_entries(args) or KHAConfig(), rows)
    model = replace(model, vocab_size=entries)
    stored, unexpected, missing = locate(infos, model, step)
    wanted = {
        key: (
            *infos[key].shape[: len(index) - (place.expert is not None)],
            *(() if place.expert is None else (model.num_experts,)),
            *place.row.shape(model),
        )
        for place, (key, index) in stored.items()
    }
    what = str(checkpoint.path)
    _check_tensors(what, "training arguments", infos, wanted, missing, unexpected)

    def read(place: Place, *, meta: bool = False) -> list[Tensor]:
        key, index = stored[place]
        if meta:
            shape, dtype = place.row.shape(model), infos[key].dtype
            return place.row.split(torch.empty(shape, dtype=dtype, device="meta"), model)
        return place.row.split(checkpoint.tensor(key, index), model)

    kept = {name: args.get(name) for name in ("vocab_size", *PADDING)} if padded else {}
    return Source(checkpoint, companions, model, read, padding_arguments=kept)


def _check_tensors(
    what: str,
    caller: str,
    infos: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    """Check that a checkpoint holds the tensors that its configuration calls for."""
    for names, problem in (
        (sorted(missing), "lacks {} tensors that its {} calls for"),
        (sorted(unexpected), "holds {} tensors that its {} has no place for"),
    ):
        if names:
            listed = ", ".join(names[:5])
            raise CheckpointError(f"{what} {problem.format(len(names), caller)}: {listed}")
    for name, shape in wanted.items():
        if infos[name].shape != shape:
            raise CheckpointError(
                f"{what}: {name} is {infos[name].shape}, its {caller} calls for {shape}."
            )
        if infos[name].dtype not in DTYPES.values():
            raise CheckpointError(
                f"{what}: {name} is {infos[name].dtype}. Expected one of {', '.join(DTYPES)}: a "
                "quantized model cannot be converted."
            )


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name, None for None.

    Raises:
        ConfigError: The name is unknown.
    """
    if name is not None and name not in DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}. Choose one of {', '.join(DTYPES)}.")
    return None if name is None else DTYPES[name]
