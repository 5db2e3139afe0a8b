"""The tokenizer, special token ids and generation settings that travel with a model's tensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kha_megatron.checkpoint.hf_reader import copy_file, has_file, json_object
from kha_megatron.errors import CheckpointError, ConfigError, in_one_line

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which every tokenizer has one."""
_TOKENIZER = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"
COMPANIONS = (*_TOKENIZER, _TEMPLATES, _GENERATION, "vocab.*", "*.model")
"""Names and patterns of the files that :meth:`Companions.write` writes."""
PADDING = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
"""Megatron pads a vocabulary to a multiple of the product of these arguments."""


@dataclass(frozen=True)
class Companions:
    """The tokenizer of a model and its generation settings."""

    token_ids: Mapping[str, Any]
    """Ids of the special tokens, for ``config.json``."""
    origin: str | None = None
    """The directory that the tokenizer comes from; None without a Hugging Face tokenizer."""
    loaded: PreTrainedTokenizerBase | None = None
    """The tokenizer, unless its files are copied from a Hugging Face directory."""
    folder: Path = Path()
    files: tuple[str, ...] = ()
    """Files that are copied from ``folder``: the tokenizer's and ``generation_config.json``."""

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any], override: Path | None) -> "Companions":
        """Return those of a Megatron run, empty if it used no Hugging Face tokenizer.

        ``override`` is a tokenizer directory instead of the one in ``args``.

        Raises:
            ConfigError: The directory does not exist or holds no tokenizer.
            CheckpointError: One of its files is a link out of it, or not a regular file.
        """
        if override is None and args.get("tokenizer_type") != "HuggingFaceTokenizer":
            return cls({})
        named = Path(override or args.get("tokenizer_model") or "")
        return cls.of_tokenizer(named, settings=named)

    @classmethod
    def of_tokenizer(cls, folder: Path, *, settings: Path) -> "Companions":
        """Return a tokenizer directory's, with the generation settings of ``settings``.

        Raises as :meth:`of_megatron`.
        """
        if not folder.name or not folder.is_dir():
            raise ConfigError(f"No tokenizer directory {folder}. Pass one with --tokenizer.")
        _files(folder)  # checks them
        loaded = load_tokenizer(folder)
        files = (_GENERATION,) if has_file(settings, _GENERATION) else ()
        return cls(_ids_of(loaded), str(folder), loaded, settings, files)

    @classmethod
    def of_hf(cls, path: Path, config: Mapping[str, Any], override: Path | None) -> "Companions":
        """Return those of a Hugging Face directory with the content of its ``config.json``.

        ``override`` is a tokenizer directory instead of ``path``, which also gives the token ids.
        Raises as :meth:`of_megatron`.
        """
        if override is not None:
            found, rows = cls.of_tokenizer(override, settings=path), config.get("vocab_size")
            if type(rows) is int:
                found.vocabulary({}, rows)  # refuses a tokenizer with more entries
            return found
        files = _files(path)
        origin = str(path) if set(files) & set(VOCABULARIES) else None
        # some old configurations have -1 instead of null
        ids = {name: None if config.get(name) == -1 else config.get(name) for name in _TOKEN_IDS}
        return cls(ids, origin, folder=path, files=files)

    def vocabulary(self, args: Mapping[str, Any], rows: int) -> int:
        """Return the rows of an embedding without Megatron's padding.

        All ``rows`` of the embedding are kept if padding does not explain them.

        Raises:
            CheckpointError: The tokenizer has more entries than the embedding has rows.
        """
        multiple = math.prod(args.get(name) or 1 for name in PADDING)
        entries = len(self.loaded) if self.loaded is not None else 0
        if entries > rows:
            raise CheckpointError(
                f"The tokenizer {self.origin} has {entries} entries, but the embedding has {rows} "
                "rows. Pass the tokenizer of this model with --tokenizer."
            )
        # the argument comes first: a tokenizer may have fewer entries than its model
        for size in (args.get("vocab_size"), entries):
            if size and entries <= size <= rows < size + multiple:
                return size
        return rows

    def read(self, text: str, rows: int, length: int, *, entries: int) -> Tensor:
        """Return the first tokens of a text, ``[B, S]`` with ``B <= rows`` and ``S <= length``.

        Raises:
            ConfigError: There is no tokenizer, it cannot be loaded, or the text is too short.
            CheckpointError: A token is outside the vocabulary of ``entries`` entries.
        """
        if self.origin is None:
            raise ConfigError("No tokenizer to read the text with. Pass one with --tokenizer.")
        tokenizer = self.loaded or load_tokenizer(Path(self.origin))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 2:
            raise ConfigError(f"Expected a text of at least 2 tokens, got {len(ids)}.")
        if (largest := max(ids)) >= entries:
            raise CheckpointError(
                f"The tokenizer {self.origin} gives token {largest}, but the model has {entries} "
                "entries. Pass the tokenizer of this model with --tokenizer."
            )
        length = min(length, len(ids))
        rows = min(rows, len(ids) // length)
        return torch.tensor(ids[: rows * length]).view(rows, length)

    def write_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer and the generation settings; return False if there is no tokenizer.

        Generation settings of another directory than the tokenizer's get the tokenizer's ids.

        Raises:
            CheckpointError: ``generation_config.json`` is not a JSON object.
        """
        if self.origin is None:
            return False
        target.mkdir(exist_ok=True)
        if self.loaded is not None:
            self.loaded.save_pretrained(target)
        for name in self.files:
            (target / name).parent.mkdir(exist_ok=True)
            copy_file(self.folder, name, target / name)
        if self.loaded is not None and _GENERATION in self.files:
            read = json_object(self.folder / _GENERATION)
            own = {name: value for name, value in read.items() if value is not None}
            ids = _ids_of(self.loaded)
            settings = ids | own if str(self.folder) == self.origin else own | ids
            given = {name: value for name, value in settings.items() if value is not None}
            text = json.dumps(given, indent=2, sort_keys=True) + "\n"
            (target / _GENERATION).write_text(text, encoding="utf-8")
        return True

    def write(self, target: Path) -> None:
        """Write everything into a Hugging Face directory.

        A tokenizer without a padding token pads with its end of text. ``config.json`` names no
        padding token then, because the embedding of that token would get no gradient.

        Raises:
            CheckpointError: See :meth:`write_tokenizer`.
        """
        ids = self.token_ids
        if self.loaded is not None and self.loaded.pad_token is None:
            self.loaded.pad_token = self.loaded.eos_token
            ids = _ids_of(self.loaded)
        written = self.write_tokenizer(target)
        if _GENERATION not in self.files:
            GenerationConfig(**ids).save_pretrained(target)
        elif not written:
            copy_file(self.folder, _GENERATION, target / _GENERATION)


def _ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _TOKEN_IDS}


def _files(folder: Path) -> tuple[str, ...]:
    """Return the files of a tokenizer and the generation settings that a directory has."""
    templates = (f"{_TEMPLATES}/{file.name}" for file in folder.glob(f"{_TEMPLATES}/*"))
    return tuple(n for n in (*_TOKENIZER, *templates, _GENERATION) if has_file(folder, n))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer directory without running code from it.

    Raises:
        ConfigError: It cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file fails anywhere in the loader
        raise ConfigError(
            f"The tokenizer {folder} cannot be loaded ({type(error).__name__}: "
            f"{in_one_line(error)}). Pass another with --tokenizer."
        ) from error
