"""Copy tokenizers and generation configs."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from kha_megatron.checkpoint.hf_reader import HFCheckpoint, copy_file, has_file, json_object
from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.data import special_tokens
from kha_megatron.errors import CheckpointError, ConfigError, in_one_line, show_value
from kha_megatron.lfs import refuse_lfs_pointer

_SPECIAL_TOKEN_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""Every tokenizer has at least one of these."""
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES_DIRECTORY = "additional_chat_templates"
OUTPUT_PATTERNS = (
    *_TOKENIZER_FILES,
    _TEMPLATES_DIRECTORY,
    _GENERATION_CONFIG,
    "vocab.*",
    "*.model",
)
"""Glob patterns for everything that :class:`TokenizerFiles` might create."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer and ``generation_config.json`` of a model.

    The tokenizer of a Hugging Face model is copied file by file. All other tokenizers are loaded
    and saved by transformers, and only ``generation_config.json`` is copied.
    """

    token_ids: Mapping[str, Any]
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` for ``config.json``."""
    path: str | None = None
    """Directory of the tokenizer. None if there is no Hugging Face tokenizer."""
    loaded_tokenizer: PreTrainedTokenizerBase | None = None
    """None if we copy the files of the tokenizer, or if there is no tokenizer."""
    copied_from: Path = Path()
    """Directory of ``copied_files``. Can be another one than that of the tokenizer."""
    copied_files: tuple[str, ...] = ()
    """Relative paths of the files to copy."""

    @classmethod
    def open(
        cls,
        checkpoint: HFCheckpoint | MegatronCheckpoint,
        override: Path | None,
    ) -> "TokenizerFiles":
        """Find the tokenizer of a checkpoint, unless it is overridden by ``override``.

        For Megatron checkpoints, this only works with ``--tokenizer-type HuggingFaceTokenizer``. We
        do not copy any other kind of tokenizer.
        """
        if isinstance(checkpoint, HFCheckpoint):
            if override is None:
                return cls._of_hf_model(checkpoint)
            return cls._load(override, generation_config_folder=checkpoint.path)
        if override is not None:
            return cls._load(override, generation_config_folder=override)
        if checkpoint.args.get("tokenizer_type") != "HuggingFaceTokenizer":
            return cls({})
        recorded_path = checkpoint.args.get("tokenizer_model")
        folder = Path(recorded_path if isinstance(recorded_path, str) else "")
        return cls._load(folder, generation_config_folder=folder)

    @classmethod
    def _load(cls, folder: Path, generation_config_folder: Path) -> "TokenizerFiles":
        if not folder.name or not os.path.isdir(folder):  # Path.is_dir() raises if it is too long
            raise ConfigError(
                f"Tokenizer directory {show_value(str(folder))} not found. Pass one with "
                "--tokenizer."
            )
        tokenizer = load_hf_tokenizer(folder)
        has_generation_config = has_file(generation_config_folder, _GENERATION_CONFIG)
        return cls(
            token_ids=_special_token_ids(tokenizer),
            path=str(folder),
            loaded_tokenizer=tokenizer,
            copied_from=generation_config_folder,
            copied_files=(_GENERATION_CONFIG,) if has_generation_config else (),
        )

    @classmethod
    def _of_hf_model(cls, checkpoint: HFCheckpoint) -> "TokenizerFiles":
        files = _find_files(checkpoint.path)
        has_tokenizer = not set(files).isdisjoint(_VOCABULARY_FILES)
        token_ids = {}
        for name in _SPECIAL_TOKEN_IDS:
            token_id = checkpoint.config.get(name)
            token_ids[name] = None if token_id == -1 else token_id  # some old configs use -1
        return cls(
            token_ids=token_ids,
            path=str(checkpoint.path) if has_tokenizer else None,
            copied_from=checkpoint.path,
            copied_files=files,
        )

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens, including added ones. None if we did not load the tokenizer."""
        if self.loaded_tokenizer is None:
            return None
        return len(self.loaded_tokenizer)

    def tokenize(self, text: str, rows: int, length: int) -> Tensor:
        """Tokenize a text and return a batch of up to ``[rows, length]`` token IDs.

        Special tokens are handled as in ``kha-megatron data prepare``: each row starts with those
        that the tokenizer adds (e.g. BOS), and those in the text itself are ordinary text.
        """
        if self.path is None:
            raise ConfigError("The model has no tokenizer. Please pass one with --tokenizer.")
        tokenizer = self.loaded_tokenizer or load_hf_tokenizer(Path(self.path))
        first_ids, _ = special_tokens(tokenizer)
        encoding = tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
        )
        text_ids = encoding["input_ids"]
        if len(text_ids) < 2:
            raise ConfigError(f"The text must have at least 2 tokens, got {len(text_ids)}.")
        ids_per_row = min(length - len(first_ids), len(text_ids))
        full_rows = min(rows, len(text_ids) // ids_per_row)
        used_ids = text_ids[: full_rows * ids_per_row]
        text_batch = torch.tensor(used_ids).view(full_rows, ids_per_row)
        special_batch = torch.tensor(first_ids, dtype=torch.long).expand(full_rows, -1)
        return torch.cat([special_batch, text_batch], dim=1)

    def write_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer and generation config. Returns False if there is no tokenizer."""
        if self.path is None:
            return False
        target.mkdir(exist_ok=True)
        if self.loaded_tokenizer is not None:
            self.loaded_tokenizer.save_pretrained(target)
        for name in self.copied_files:
            file = target / name
            file.parent.mkdir(exist_ok=True)
            copy_file(self.copied_from, name, file)
        if self.loaded_tokenizer is not None and _GENERATION_CONFIG in self.copied_files:
            settings = self._merge_generation_config(_special_token_ids(self.loaded_tokenizer))
            content = json.dumps(settings, indent=2, sort_keys=True) + "\n"
            (target / _GENERATION_CONFIG).write_text(content, encoding="utf-8")
        _use_names_of_transformers_4(target)
        return True

    def _merge_generation_config(self, token_ids: Mapping[str, Any]) -> dict[str, Any]:
        """Read the generation config, and add the special token IDs of the tokenizer.

        If both define an ID, we prefer that of the generation config, unless it comes from another
        directory than the tokenizer.
        """
        settings = _without_none(json_object(self.copied_from / _GENERATION_CONFIG))
        has_same_directory = str(self.copied_from) == self.path
        if has_same_directory:
            return _without_none({**token_ids, **settings})
        return _without_none({**settings, **token_ids})

    def write(self, target: Path) -> None:
        """Write the tokenizer and generation config of a Hugging Face model.

        In contrast to :meth:`write_tokenizer`, we always write a generation config, even without a
        tokenizer.

        If the tokenizer does not have a padding token, we use EOS for padding. In this case we
        leave ``pad_token_id`` out of ``config.json``, because transformers would not train the EOS
        embedding otherwise.
        """
        generation_token_ids = self.token_ids
        tokenizer = self.loaded_tokenizer
        if tokenizer is not None and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
            generation_token_ids = _special_token_ids(tokenizer)
        has_tokenizer = self.write_tokenizer(target)
        if _GENERATION_CONFIG not in self.copied_files:
            GenerationConfig(**generation_token_ids).save_pretrained(target)
        elif not has_tokenizer:
            copy_file(self.copied_from, _GENERATION_CONFIG, target / _GENERATION_CONFIG)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _use_names_of_transformers_4(folder: Path) -> None:
    """Rewrite ``tokenizer_config.json`` such that transformers 4 and 5 can both read it."""
    file = folder / _TOKENIZER_CONFIG
    if not file.is_file():
        return
    settings = json_object(file)
    renamed = dict(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        renamed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        renamed["additional_special_tokens"] = renamed.pop("extra_special_tokens")
    if renamed != settings:
        content = json.dumps(renamed, indent=2, ensure_ascii=False) + "\n"
        file.write_text(content, encoding="utf-8")


def _special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _SPECIAL_TOKEN_IDS}


def _find_files(folder: Path) -> tuple[str, ...]:
    """Return the relative paths of all tokenizer files and of the generation config.

    Raises:
        CheckpointError: If a file is a Git LFS pointer, or a symlink leaves the directory.
    """
    templates = []
    for file in folder.glob(f"{_TEMPLATES_DIRECTORY}/*"):
        templates.append(f"{_TEMPLATES_DIRECTORY}/{file.name}")
    names = []
    for name in (*_TOKENIZER_FILES, *templates, _GENERATION_CONFIG):
        if has_file(folder, name):
            refuse_lfs_pointer(folder / name, CheckpointError)
            names.append(name)
    return tuple(names)


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from disk (never runs remote code)."""
    _find_files(folder)  # raises if a file is not safe to read
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # corrupted files can raise anything
        raise ConfigError(
            f"Could not load the tokenizer {folder} ({type(error).__name__}: "
            f"{in_one_line(error)}). Please pass a valid tokenizer with --tokenizer."
        ) from error
