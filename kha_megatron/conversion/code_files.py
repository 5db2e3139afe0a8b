"""Update the modeling code in the directory of an exported ``kha`` model."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kha_megatron import __version__
from kha_megatron.checkpoint.hf_reader import CONFIG, is_hf_folder, json_object
from kha_megatron.checkpoint.reading import MAX_JSON_BYTES, read_regular
from kha_megatron.checkpoint.staging import as_json, flush, staged_file
from kha_megatron.errors import CheckpointError, OutputError, in_one_line
from kha_megatron.hf import KHAModelConfig
from kha_megatron.hf.modeling_kha import attention_class
from kha_megatron.hf.modelling_files import AUTO_MAP, is_modelling_file, modelling_files


@dataclass(frozen=True)
class CodeUpdate:
    """Result of :func:`update_code`."""

    path: Path
    version: str
    """Version of kha-megatron that the code comes from."""
    added: list[str]
    replaced: list[str]
    """May include ``config.json``, where only ``auto_map`` changes."""
    unchanged: list[str]


def update_code(folder: Path) -> CodeUpdate:
    """Replace the modeling code of an exported model by the code of this version.

    The weights, the tokenizer and the manifest (which has hashes of tensors only) do not change.
    All files are written and flushed to disk before the first one is replaced.

    Raises:
        CheckpointError: If ``folder`` is not a ``kha`` model, or has an invalid ``config.json``.
        OutputError: If a file was not written by kha-megatron, or cannot be replaced.
    """
    if not is_hf_folder(folder):
        raise CheckpointError(
            f"{CONFIG} not found in {folder}. Pass the directory of an exported kha model."
        )
    raw = json_object(folder / CONFIG)
    if raw.get("model_type") != KHAModelConfig.model_type:
        raise CheckpointError(
            f"{folder} has model_type {raw.get('model_type')!r}. Only kha models contain modeling "
            "code. All other architectures are part of transformers."
        )
    new_contents: dict[str, bytes] = {}
    for name, code in modelling_files(_read_config(folder, raw)).items():
        _check_ours(folder / name)
        new_contents[name] = code.encode()
    auto_map = _merge_auto_map(folder, raw)
    if auto_map != raw.get("auto_map"):
        config = as_json(raw | {"auto_map": auto_map}) + "\n"
        new_contents[CONFIG] = config.encode()
    added = {}
    replaced = {}
    unchanged = []
    for name, content in new_contents.items():
        file = folder / name
        if not file.exists():
            added[name] = content
        elif read_regular(file, MAX_JSON_BYTES) != content:
            replaced[name] = content
        else:
            unchanged.append(name)
    _write_files(folder, added | replaced)
    return CodeUpdate(
        path=folder,
        version=__version__,
        added=sorted(added),
        replaced=sorted(replaced),
        unchanged=sorted(unchanged),
    )


def _check_ours(file: Path) -> None:
    if file.exists() and not is_modelling_file(file):
        raise OutputError(
            f"{file} was not written by kha-megatron and is not replaced. Move it to "
            "another directory."
        )


def _read_config(folder: Path, raw: dict[str, Any]) -> KHAModelConfig:
    fields = dict(raw)
    fields.pop("auto_map", None)
    fields.pop("model_type", None)
    try:
        config = KHAModelConfig(**fields)
        if not config.is_plain:
            attention_class(config).check_config(config)  # raises for unknown mechanisms
    except Exception as error:  # bad types can raise almost anything
        raise CheckpointError(
            f"{folder / CONFIG} is not a valid config of a kha model ({in_one_line(error)})."
        ) from error
    return config


def _merge_auto_map(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Keep entries of the user, e.g. for a tokenizer."""
    auto_map = raw.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise CheckpointError(f"{folder / CONFIG} has an invalid auto_map: {auto_map!r:.100}.")
    return auto_map | AUTO_MAP


def _write_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Write all files to temporary ones first. Leaving the stack moves them to their places."""
    with ExitStack() as stack:
        for name, content in contents.items():
            staged = stack.enter_context(staged_file(folder / name))
            staged.write_bytes(content)
            flush(staged)
