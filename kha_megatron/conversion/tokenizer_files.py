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

_TOKEN_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_GENERATION = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""Every tokenizer has at least one of these."""
_TOKENIZER = (
    *VOCABULARIES,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"
FILES = (
    *_TOKENIZER,
    _TEMPLATES,
    _GENERATION,
    "vocab.*",
    "*.model",
)
"""Glob patterns for everything that :meth:`TokenizerFiles.write` might create."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer and ``generation_config.json`` of a model."""

    token_ids: Mapping[str, Any]
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` for ``config.json``."""
    origin: str | None = None
    """Directory of the tokenizer. None if there is no Hugging Face tokenizer."""
    loaded: PreTrainedTokenizerBase | None = None
    """If None, we just copy the tokenizer files."""
    folder: Path = Path()
    files: tuple[str, ...] = ()  # to copy from the folder

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
        if isinstance(checkpoint, HFCheckpoint) and override is None:
            return cls._of_hf_model(checkpoint)
        if isinstance(checkpoint, MegatronCheckpoint):
            args = checkpoint.args
            if override is None and args.get("tokenizer_type") != "HuggingFaceTokenizer":
                return cls({})
            recorded = args.get("tokenizer_model")
            folder = override or Path(recorded if isinstance(recorded, str) else "")
            settings_folder = folder
        else:
            assert override is not None
            folder = override
            settings_folder = checkpoint.path
        if not folder.name or not os.path.isdir(folder):  # Path.is_dir() raises if it is too long
            raise ConfigError(
                f"Tokenizer directory {show_value(str(folder))} not found. Pass one with "
                "--tokenizer."
            )
        loaded = load_hf_tokenizer(folder)
        has_generation_config = has_file(settings_folder, _GENERATION)
        return cls(
            token_ids=_ids_of(loaded),
            origin=str(folder),
            loaded=loaded,
            folder=settings_folder,
            files=(_GENERATION,) if has_generation_config else (),
        )

    @classmethod
    def _of_hf_model(cls, checkpoint: HFCheckpoint) -> "TokenizerFiles":
        path = checkpoint.path
        files = _files(path)
        has_tokenizer = any(name in VOCABULARIES for name in files)
        token_ids = {}
        for name in _TOKEN_IDS:
            token = checkpoint.config.get(name)
            token_ids[name] = None if token == -1 else token  # some old configs use -1 for null
        return cls(
            token_ids=token_ids,
            origin=str(path) if has_tokenizer else None,
            folder=path,
            files=files,
        )

    def tokenize(self, text: str, rows: int, length: int) -> Tensor:
        """Tokenize a text and return a batch of up to ``[rows, length]`` token IDs.

        Special tokens are handled as in ``kha-megatron data prepare``: each row starts with those
        that the tokenizer adds (e.g. BOS), and those in the text itself are ordinary text.
        """
        if self.origin is None:
            raise ConfigError("The model has no tokenizer. Please pass one with --tokenizer.")
        tokenizer = self.loaded or load_hf_tokenizer(Path(self.origin))
        first_ids, _ = special_tokens(tokenizer)
        encoding = tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
        )
        ids = encoding["input_ids"]
        if len(ids) < 2:
            raise ConfigError(f"The text must have at least 2 tokens, got {len(ids)}.")
        text_length = min(length - len(first_ids), len(ids))
        text_rows = min(rows, len(ids) // text_length)
        text_ids = torch.tensor(ids[: text_rows * text_length])
        special_ids = torch.tensor(first_ids, dtype=torch.long)
        parts = [
            special_ids.expand(text_rows, -1),
            text_ids.view(text_rows, text_length),
        ]
        return torch.cat(parts, dim=1)

    def write_tokenizer(self, target: Path) -> bool:
        """Write the tokenizer and generation config. Returns False if there is no tokenizer.

        If the generation config comes from a different directory, we replace its special token IDs
        with those of the tokenizer.
        """
        if self.origin is None:
            return False
        target.mkdir(exist_ok=True)
        if self.loaded is not None:
            self.loaded.save_pretrained(target)
        for name in self.files:
            file = target / name
            file.parent.mkdir(exist_ok=True)
            copy_file(self.folder, name, file)
        if self.loaded is not None and _GENERATION in self.files:
            settings = self._merge_generation_config(_ids_of(self.loaded))
            content = json.dumps(settings, indent=2, sort_keys=True) + "\n"
            (target / _GENERATION).write_text(content, encoding="utf-8")
        _use_names_of_transformers_4(target)
        return True

    def _merge_generation_config(self, token_ids: Mapping[str, Any]) -> dict[str, Any]:
        """Read the generation config, and add the special token IDs of the tokenizer."""
        settings = _without_none(json_object(self.folder / _GENERATION))
        if str(self.folder) == self.origin:
            return _without_none({**token_ids, **settings})
        return _without_none({**settings, **token_ids})

    def write(self, target: Path) -> None:
        """Same as :meth:`write_tokenizer`, but for Hugging Face models.

        If the tokenizer does not have a padding token, we use EOS for padding. In this case we
        leave ``pad_token_id`` out of ``config.json``, because transformers would not train the EOS
        embedding otherwise.
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


def _ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _TOKEN_IDS}


def _files(folder: Path) -> tuple[str, ...]:
    templates = []
    for file in folder.glob(f"{_TEMPLATES}/*"):
        templates.append(f"{_TEMPLATES}/{file.name}")
    names = []
    for name in (*_TOKENIZER, *templates, _GENERATION):
        if has_file(folder, name):
            refuse_lfs_pointer(folder / name, CheckpointError)
            names.append(name)
    return tuple(names)


def load_hf_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from disk (never runs remote code)."""
    _files(folder)  # raises for Git LFS pointers, and if a symlink leaves the directory
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
