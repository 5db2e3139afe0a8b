"""Copy the tokenizer and the generation settings that lie next to a model's weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kha_megatron.checkpoint.hf_reader import HFCheckpoint, copy_file, has_file, json_object
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
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
FILES = (*_TOKENIZER, _TEMPLATES, _GENERATION, "vocab.*", "*.model")
"""Patterns of the files that :meth:`TokenizerFiles.write` writes."""


@dataclass(frozen=True)
class TokenizerFiles:
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
    def open(
        cls, checkpoint: HFCheckpoint | MegatronCheckpoint, override: Path | None
    ) -> "TokenizerFiles":
        """Find the tokenizer of a checkpoint. Empty if a Megatron run used another kind.

        ``override`` is a tokenizer directory that replaces the checkpoint's own. It then also
        gives the token ids.

        Raises:
            ConfigError: The directory does not exist or holds no tokenizer.
            CheckpointError: A file is a link out of the directory or not a regular file.
        """
        if isinstance(checkpoint, MegatronCheckpoint):
            args = checkpoint.args
            if override is None and args.get("tokenizer_type") != "HuggingFaceTokenizer":
                return cls({})
            folder = settings = Path(override or args.get("tokenizer_model") or "")
        elif override is not None:
            folder, settings = override, checkpoint.path
        else:
            path, config = checkpoint.path, checkpoint.config
            files = _files(path)
            origin = str(path) if set(files) & set(VOCABULARIES) else None
            ids = {name: config.get(name) for name in _TOKEN_IDS}
            # some old configurations have -1 instead of null
            ids = {name: None if token == -1 else token for name, token in ids.items()}
            return cls(ids, origin, folder=path, files=files)
        if not folder.name or not folder.is_dir():
            raise ConfigError(f"No tokenizer directory {folder}. Pass one with --tokenizer.")
        _files(folder)  # raises for links out of the directory
        loaded = load_hf_tokenizer(folder)
        files = (_GENERATION,) if has_file(settings, _GENERATION) else ()
        return cls(_ids_of(loaded), str(folder), loaded, settings, files)

    def tokenize(self, text: str, rows: int, length: int, *, entries: int) -> Tensor:
        """Return the first tokens of a text, ``[B, S]`` with ``B <= rows`` and ``S <= length``.

        Raises:
            ConfigError: There is no tokenizer, it cannot be loaded, or the text is too short.
            CheckpointError: A token is outside the vocabulary of ``entries`` entries.
        """
        if self.origin is None:
            raise ConfigError("The model has no tokenizer. Pass one with --tokenizer.")
        tokenizer = self.loaded or load_hf_tokenizer(Path(self.origin))
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
        """Write the tokenizer and the generation settings. Return False without a tokenizer.

        Generation settings from another directory get the tokenizer's ids.

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
        """Write tokenizer and generation settings into a Hugging Face directory.

        A tokenizer without a padding token gets its end-of-text token. ``config.json`` then has no
        padding token, because the embedding of that token would get no gradient.

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
    """Return the names of a directory's tokenizer files and generation settings."""
    templates = (f"{_TEMPLATES}/{file.name}" for file in folder.glob(f"{_TEMPLATES}/*"))
    return tuple(n for n in (*_TOKENIZER, *templates, _GENERATION) if has_file(folder, n))


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer directory without running code from it.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # damaged files raise many exception types
        raise ConfigError(
            f"The tokenizer {folder} cannot be loaded ({type(error).__name__}: "
            f"{in_one_line(error)}). Pass another with --tokenizer."
        ) from error
