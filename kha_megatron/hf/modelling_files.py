"""Export the modeling code along with a model.

With `trust_remote_code=True`, exported models can be loaded even if kha-megatron is not installed.
We copy the modules of this package and rewrite their imports. Attention classes and mechanisms
that the model does not use are left out. The file of a mechanism from outside this package is
copied as well.
"""

import hashlib
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kha_megatron import __version__
from kha_megatron.hf.mechanisms_kha import mechanism_types

AUTO_MAP = {
    "AutoConfig": "configuration_kha.KHAModelConfig",
    "AutoModel": "modeling_kha.KHAModel",
    "AutoModelForCausalLM": "modeling_kha.KHAForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_kha.KHAForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_kha.KHAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_kha.KHAForTokenClassification",
}
"""The `auto_map` for `config.json`. Note that vLLM needs the `AutoModel` entry."""

_IMPORT = re.compile(r"^from (kha_megatron[\w.]*) import", re.MULTILINE)
_ROOT = Path(__file__).parents[2]
"""Directory that contains the package."""
_PACKAGE = "kha_megatron"
_MODELING = "kha_megatron.hf.modeling_kha"
_ATTENTION = "kha_megatron.hf.attention_kha"
_REGISTRY = "kha_megatron.hf.mechanisms_kha"
_CONFIGURATION_FILE = "configuration_kha.py"


def write_modelling_files(directory: str | Path, config: Any) -> dict[str, str]:
    """Write the modeling files and return the `auto_map` for `config.json`."""
    for name, source in modelling_files(config).items():
        path = Path(directory) / name
        path.write_text(source)
    return dict(AUTO_MAP)


def modelling_files(config: Any) -> dict[str, str]:
    """Generate the modeling files. Returns a mapping from file names to source code."""
    sources: dict[str, str] = {}
    _collect_sources(_MODELING, config, sources)
    if not config.is_plain:
        _collect_sources(_ATTENTION, config, sources)
        sources[_MODELING] += (
            "\n# Register the attention classes.\n"
            f"from {_ATTENTION} import KHAHeadsAttention as KHAHeadsAttention  # noqa: E402\n"
        )
    files = {}
    for module, source in sources.items():
        file_name = f"{_exported_name(module)}.py"
        first_line = f"# {_describe_origin(module)}"
        code = _IMPORT.sub(_make_relative, source)
        files[file_name] = f"{first_line}\n{code}"
    # transformers shares a config class between models in directories of the same name if its file
    # is the same, and then builds all of them with the modeling code of the first one.
    files[_CONFIGURATION_FILE] += f"# Hash of all modeling files: {_hash_files(files)}\n"
    return files


def _hash_files(files: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n{files[name]}".encode())
    return digest.hexdigest()


def _make_relative(absolute_import: re.Match[str]) -> str:
    module = absolute_import[1]
    return f"from .{_exported_name(module)} import"


def is_modelling_file(path: Path) -> bool:
    """Check for the first line that :func:`modelling_files` writes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first_line = file.readline()
    return first_line.startswith("# ") and "kha-megatron" in first_line


def _collect_sources(
    module: str,
    config: Any,
    sources: dict[str, str],
) -> None:
    """Add `module` and everything it imports from this package to `sources`."""
    if module in sources:
        return
    if module == _REGISTRY:
        source = _generate_registry(config.mechanisms)
    else:
        source = _source_path(module).read_text()
    sources[module] = source
    imported_modules = _IMPORT.findall(source)
    for imported in imported_modules:
        _collect_sources(imported, config, sources)


def _source_path(module: str) -> Path:
    external_type = _external_mechanisms().get(module)
    if external_type is not None:
        external_module = sys.modules[external_type.__module__]
        return Path(external_module.__file__ or "")
    path = _ROOT / module.replace(".", "/")
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")


def _describe_origin(module: str) -> str:
    external_type = _external_mechanisms().get(module)
    if external_type is not None:
        return f"{external_type.__module__}, a head mechanism that is not part of kha-megatron"
    return f"{module} of kha-megatron {__version__} (Apache-2.0)"


def _external_mechanisms() -> dict[str, type]:
    """Return the mechanisms from other packages and files by their :func:`_module_name`."""
    external_types = {}
    for name, mechanism_type in mechanism_types().items():
        if _is_external(mechanism_type):
            external_types[_module_name(name, mechanism_type)] = mechanism_type
    return external_types


def _is_external(mechanism_type: type) -> bool:
    return not mechanism_type.__module__.startswith(f"{_PACKAGE}.")


def _module_name(name: str, mechanism_type: type) -> str:
    """Return the module of a mechanism. External ones are treated like files of this package."""
    if _is_external(mechanism_type):
        return f"{_PACKAGE}.heads.{name}"
    return mechanism_type.__module__


def _exported_name(module: str) -> str:
    """Return the name of a module next to the model, e.g. `heads_gate_kha` or `modeling_kha`."""
    _, _, path = module.partition(".")
    name = path.removeprefix("hf.").replace(".", "_")
    return name.removesuffix("_kha") + "_kha"


def _generate_registry(names: Collection[str]) -> str:
    """Generate a `mechanisms_kha.py` that only imports the given mechanisms."""
    imports = []
    entries = []
    for name, mechanism_type in mechanism_types().items():
        if name in names:
            module = _module_name(name, mechanism_type)
            class_name = mechanism_type.__name__
            imports.append(f"from {module} import {class_name}")
            entries.append(f"{name!r}: {class_name}")
    mapping = ", ".join(entries)
    lines = [
        '"""Head mechanisms of this model, in the order in which they are applied."""',
        "",
        *imports,
        "",
        "",
        "def mechanism_types() -> dict[str, type]:",
        f"    return {{{mapping}}}",
        "",
    ]
    return "\n".join(lines)
