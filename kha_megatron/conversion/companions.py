"""What travels with a model's tensors: the tokenizer, special tokens, generation settings."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kha_megatron.checkpoint.hf_reader import HFCheckpoint
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion.sources import EMBEDDING
from kha_megatron.errors import CheckpointError, ConfigError

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a tokenizer, of which one of the first four must be there; code is never among it."""


def megatron_tokenizer(
    args: Mapping[str, Any], override: Path | None
) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """The tokenizer of a Megatron run, and the folder it comes from.

    Args:
        args: the run's arguments.
        override: a folder instead of the one that they name.

    Returns:
        Twice None if the run used no Hugging Face tokenizer.

    Raises:
        ConfigError: the folder is not there, or holds no tokenizer.
    """
    kind, model = args.get("tokenizer_type"), args.get("tokenizer_model")
    if override is None and kind != "HuggingFaceTokenizer":
        return None, None
    folder = Path(override or model or "")
    if not (override or model) or not folder.is_dir():
        raise ConfigError(
            f"no tokenizer: {override or model} is not a folder: name the run's tokenizer folder "
            "with --tokenizer"
        )
    return load_tokenizer(folder), str(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer folder without running any code of it.

    Raises:
        ConfigError: it holds none that can be loaded so.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file fails wherever the loader first trips over it
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"no tokenizer: {folder} cannot be loaded ({type(error).__name__}: {first})"
        ) from error


def vocabulary(
    checkpoint: MegatronCheckpoint, loaded: PreTrainedTokenizerBase | None, source: str | None
) -> int | None:
    """Rows of a Megatron embedding without its padding; None if padding does not explain them.

    Raises:
        CheckpointError: the tokenizer has more entries than the embedding has rows.
    """
    args, held = checkpoint.args, checkpoint.keys()
    if EMBEDDING not in held:
        return None
    padded = held[EMBEDDING].shape[0]
    sizes = [args.get(n) for n in ("make_vocab_size_divisible_by", "tensor_model_parallel_size")]
    multiple = math.prod(size or 1 for size in sizes)
    entries = len(loaded) if loaded is not None else 0
    if entries > padded:
        raise CheckpointError(
            f"the tokenizer {source} has {entries} entries, the embedding {padded} rows: name the "
            "tokenizer of this run with --tokenizer"
        )
    # the argument says more than the tokenizer, which may have fewer entries than the model
    for size in (args.get("vocab_size"), entries):
        if size and entries <= size <= padded < size + multiple:
            return size
    return None


@dataclass(frozen=True)
class Companions:
    """The tokenizer of a model and what goes with it."""

    token_ids: Mapping[str, Any]
    """Ids of the special tokens, for ``config.json``."""
    origin: str | None
    """The folder that the tokenizer comes from."""
    loaded: PreTrainedTokenizerBase | None = None
    """The tokenizer of a Megatron run."""
    folder: Path | None = None
    """The Hugging Face folder to copy from."""

    @classmethod
    def of_megatron(cls, checkpoint: MegatronCheckpoint, override: Path | None) -> "Companions":
        """Of a Megatron run; ``override`` is a tokenizer folder instead of the run's own.

        Raises:
            ConfigError: the folder is not there, or holds no tokenizer.
        """
        loaded, origin = megatron_tokenizer(checkpoint.args, override)
        ids = {name: getattr(loaded, name) for name in _TOKEN_IDS} if loaded is not None else {}
        return cls(ids, origin, loaded)

    @classmethod
    def of_hf(cls, checkpoint: HFCheckpoint, override: Path | None) -> "Companions":
        """Of a Hugging Face folder, or with the tokenizer of another folder."""
        ids = {name: checkpoint.config.get(name) for name in _TOKEN_IDS}
        folder = override or checkpoint.path
        if override is not None and not override.is_dir():
            raise ConfigError(f"no tokenizer: {override} is not a folder")
        has_one = any((folder / name).is_file() for name in _TOKENIZER[:4])
        return cls(ids, str(folder) if has_one else None, folder=folder)

    def write_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer into a folder, if there is one. Files are copied, never run."""
        if self.origin is None:
            return False
        target.mkdir(exist_ok=True)
        if self.loaded is not None:
            self.loaded.save_pretrained(target)
            return True
        for name in _TOKENIZER:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, target / name)
        return True

    def write(self, target: Path) -> None:
        """Write everything into a Hugging Face folder."""
        self.write_tokenizer(target)
        if self.folder is not None and (self.folder / _GENERATION).is_file():
            shutil.copyfile(self.folder / _GENERATION, target / _GENERATION)
        else:
            GenerationConfig(**self.token_ids).save_pretrained(target)
