"""Open a checkpoint of either side as a source, with what travels along."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion.companions import Companions, vocabulary
from kha_megatron.conversion.sources import HFSource, MegatronSource, Source, is_hf_folder
from kha_megatron.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")


class Opened(NamedTuple):
    """A source and its companions."""

    source: Source
    companions: Companions
    vocabulary: Mapping[str, Any] | None = None
    """The arguments that explain the padding of a Megatron vocabulary, if it was kept."""


def open_checkpoint(path: Path, *, tokenizer: Path | None = None, padded: bool = False) -> Opened:
    """Open a Hugging Face folder (it has a ``config.json``), or a Megatron checkpoint.

    Args:
        path: the folder; of Megatron, a ``--save`` folder or one iteration of it.
        tokenizer: a tokenizer folder instead of the model's own.
        padded: keep the padding of a Megatron vocabulary.

    Raises:
        CheckpointError: it is damaged, or cannot be expressed; the message says why.
        ConfigError: the tokenizer cannot be loaded.
    """
    if is_hf_folder(path):
        checkpoint = HFCheckpoint.open(path)
        return Opened(HFSource(checkpoint), Companions.of_hf(checkpoint, tokenizer))
    checkpoint = MegatronCheckpoint.open(path)
    companions = Companions.of_megatron(checkpoint, tokenizer)
    if padded:
        kept = {name: checkpoint.args.get(name) for name in _VOCABULARY}
        return Opened(MegatronSource(checkpoint), companions, kept)
    entries = vocabulary(checkpoint, companions.loaded, companions.origin)
    return Opened(MegatronSource(checkpoint, entries), companions)


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a name; None for None.

    Raises:
        ConfigError: there is none.
    """
    if name is not None and name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES.get(name)
