"""What travels with a model's tensors: the tokenizer, special tokens, generation settings."""

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
"""Files of a tokenizer; code is never among it."""

_TEMPLATES = "additional_chat_templates"

COMPANIONS = (*_TOKENIZER, _TEMPLATES, _GENERATION, "vocab.*", "*.model")
"""What :meth:`Companions.write` writes: names, and patterns of other tokenizers' vocabularies."""

PADDING = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")
"""Arguments to a multiple of which Megatron pads a vocabulary."""


@dataclass(frozen=True)
class Companions:
    """The tokenizer of a model and what goes with it."""

    token_ids: Mapping[str, Any]
    """Ids of the special tokens, for ``config.json``."""
    origin: str | None = None
    """The folder that the tokenizer comes from; None if there is none that can be saved."""
    loaded: PreTrainedTokenizerBase | None = None
    """The tokenizer of a Megatron run, or the one named in place of a Hugging Face folder's."""
    folder: Path = Path()
    files: tuple[str, ...] = ()
    """What is copied as it is from a Hugging Face folder: names of files of the tokenizer, and
    ``generation_config.json``."""

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any], override: Path | None) -> "Companions":
        """Of a Megatron run: nothing if it used no Hugging Face tokenizer.

        Generation settings are those that lie beside its tokenizer: Megatron has none of its own.

        Args:
            args: the run's arguments.
            override: a tokenizer folder instead of the one that they name.

        Raises:
            ConfigError: the folder is not there, or holds no tokenizer.
            CheckpointError: a file of it is a link that leads elsewhere, or no regular file.
        """
        named = override or args.get("tokenizer_model")
        if override is None and args.get("tokenizer_type") != "HuggingFaceTokenizer":
            return cls({})
        if not named or not (folder := Path(named)).is_dir():
            raise ConfigError(
                f"no tokenizer: {named} is not a folder: name the run's tokenizer folder with "
                "--tokenizer"
            )
        return cls._of_tokenizer(folder, settings=folder)

    @classmethod
    def _of_tokenizer(cls, folder: Path, *, settings: Path) -> "Companions":
        """Of one folder, with the generation settings of another."""
        _files(folder)
        loaded = load_tokenizer(folder)
        files = (_GENERATION,) if has_file(settings, _GENERATION) else ()
        return cls(_ids_of(loaded), str(folder), loaded, settings, files)

    @classmethod
    def of_hf(cls, path: Path, config: Mapping[str, Any], override: Path | None) -> "Companions":
        """Of a Hugging Face folder, or with the tokenizer of another folder and its ids.

        Args:
            path: the model's folder.
            config: its ``config.json``.
            override: a tokenizer folder instead of it.

        Raises:
            ConfigError: ``override`` is not there, or holds no tokenizer.
            CheckpointError: a file is a link that leads out of its folder, or none to copy.
        """
        if override is not None:
            if not override.is_dir():
                raise ConfigError(f"no tokenizer: {override} is not a folder")
            return cls._of_tokenizer(override, settings=path)
        files = _files(path)
        origin = str(path) if set(files) & set(VOCABULARIES) else None
        ids = {name: _id(config.get(name)) for name in _TOKEN_IDS}
        return cls(ids, origin, folder=path, files=files)

    def vocabulary(self, args: Mapping[str, Any], rows: int) -> int:
        """Rows of a Megatron embedding without its padding; all if padding does not explain them.

        Args:
            args: the run's arguments.
            rows: of the embedding.

        Raises:
            CheckpointError: the tokenizer has more entries than the embedding has rows.
        """
        multiple = math.prod(args.get(name) or 1 for name in PADDING)
        entries = len(self.loaded) if self.loaded is not None else 0
        if entries > rows:
            raise CheckpointError(
                f"the tokenizer {self.origin} has {entries} entries, the embedding {rows} rows: "
                "name the tokenizer of this run with --tokenizer"
            )
        # the argument says more than the tokenizer, which may have fewer entries than the model
        for size in (args.get("vocab_size"), entries):
            if size and entries <= size <= rows < size + multiple:
                return size
        return rows

    def read(self, text: str, rows: int, length: int, *, entries: int) -> Tensor:
        """The tokens of the beginning of a text, ``[B, S]``: full rows, or one that is shorter.

        Args:
            text: what to read.
            rows: how many at most.
            length: of a row.
            entries: of the model's vocabulary.

        Raises:
            ConfigError: there is no tokenizer, or it cannot be loaded, or finds no two tokens.
            CheckpointError: it finds one that the model has not.
        """
        if self.origin is None:
            raise ConfigError("no tokenizer to read a text with: name one with --tokenizer")
        tokenizer = self.loaded or load_tokenizer(Path(self.origin))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < 2:
            raise ConfigError(f"a text of {len(ids)} tokens has no next token: give a longer one")
        if (most := max(ids)) >= entries:
            raise CheckpointError(
                f"the tokenizer {self.origin} makes token {most}, the model has {entries}: name "
                "the model's own with --tokenizer"
            )
        length = min(length, len(ids))
        rows = min(rows, len(ids) // length)
        return torch.tensor(ids[: rows * length]).view(rows, length)

    def write_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer into a folder, if there is one. Files are copied, never run.

        Generation settings go with it: models that chat end at more tokens than their tokenizers
        name, and a checkpoint of Megatron's has no other place for them. Those of another folder
        get the tokenizer's ids.

        Raises:
            CheckpointError: ``generation_config.json`` is no JSON object.
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
        """Write everything into a Hugging Face folder.

        Where a run's tokenizer has no token to pad with, its end of text is one, for tokenizer and
        generation. ``config.json`` names none then: the embedding of the token that stands there
        gets no gradient.

        Raises:
            CheckpointError: see :meth:`write_tokenizer`.
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
    """A folder's tokenizer, templates that are loaded with it, and its generation settings."""
    more = (f"{_TEMPLATES}/{file.name}" for file in folder.glob(f"{_TEMPLATES}/*"))
    return tuple(n for n in (*_TOKENIZER, *more, _GENERATION) if has_file(folder, n))


def _id(value: Any) -> Any:
    """Of a special token; some old configurations say -1 for none."""
    return None if value == -1 else value


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer folder without running any code of it.

    Raises:
        ConfigError: it cannot be loaded so.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file fails wherever the loader first trips over it
        raise ConfigError(
            f"no tokenizer: {folder} cannot be loaded ({type(error).__name__}: "
            f"{in_one_line(error)})"
        ) from error
