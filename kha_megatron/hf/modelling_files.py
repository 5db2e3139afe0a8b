"""Export the modeling code along with a model.

With `trust_remote_code=True`, exported models can be loaded even if kha-megatron is not installed.
We copy the modules of this package and rewrite their imports. Attention classes and mechanisms
that the model does not use are left out. The file of a mechanism from outside this package is
copied as well.
"""

import re
import sys
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
_MODELING = "kha_megatron.hf.modeling_kha"
_ATTENTION = "kha_megatron.hf.attention_kha"
_REGISTRY = "kha_megatron.hf.mechanisms_kha"


def write_modelling_files(directory: str | Path, config: Any) -> dict[str, str]:
    """Write the modeling files and return the `auto_map` for `config.json`."""
    for name, source in modelling_files(config).items():
        path = Path(directory) / name
        path.write_text(source)
    return dict(AUTO_MAP)


def modelling_files(config: Any) -> dict[str, str]:
    """Generate the modeling files. Returns a mapping from file names to source code."""
    sources: dict[str, str] = {}
    _collect(_MODELING, config, sources)
    if not config.is_plain:
        _collect(_ATTENTION, config, sources)
        sources[_MODELING] += (
            "\n# Register the attention classes.\n"
            f"from {_ATTENTION} import KHAHeadsAttention as KHAHeadsAttention  # noqa: E402\n"
        )
    files = {}
    for module, source in sources.items():
        file_name = f"{_file_name(module)}.py"
        origin = _origin(module)
        code = _IMPORT.sub(_make_relative, source)
        files[file_name] = f"# {origin}\n{code}"
    return files


def _make_relative(absolute_import: re.Match[str]) -> str:
    module = absolute_import[1]
    return f"from .{_file_name(module)} import"


def is_modelling_file(path: Path) -> bool:
    """Check for the first line that :func:`modelling_files` writes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first_line = file.readline()
    return first_line.startswith("# ") and "kha-megatron" in first_line


def _collect(
    module: str,
    config: Any,
    sources: dict[str, str],
) -> None:
    """Add `module` and everything it imports from this package to `sources`."""
    if module in sources:
        return
    if module == _REGISTRY:
        source = _registry(config.mechanisms)
    else:
        source = _source_path(module).read_text()
    sources[module] = source
    imported_modules = _IMPORT.findall(source)
    for imported in imported_modules:
        _collect(imported, config, sources)


def _source_path(module: str) -> Path:
    outsider = _outsiders().get(module)
    if outsider is not None:
        external_module = sys.modules[outsider.__module__]
        return Path(external_module.__file__ or "")
    path = _ROOT / module.replace(".", "/")
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")


def _origin(module: str) -> str:
    outsider = _outsiders().get(module)
    if outsider is not None:
        return f"{outsider.__module__}, a head mechanism that is not part of kha-megatron"
    return f"{module} of kha-megatron {__version__} (Apache-2.0)"


def _outsiders() -> dict[str, type]:
    """Mechanisms from other packages and files, by module name in this package."""
    package = __package__.partition(".")[0]
    outsiders = {}
    for name, mechanism_type in mechanism_types().items():
        is_ours = mechanism_type.__module__.startswith(f"{package}.")
        if not is_ours:
            outsiders[f"{package}.heads.{name}"] = mechanism_type
    return outsiders


def _file_name(module: str) -> str:
    _, _, path = module.partition(".")
    name = path.removeprefix("hf.").replace(".", "_")
    return name.removesuffix("_kha") + "_kha"


def _registry(names: Any) -> str:
    """Generate a `mechanisms_kha.py` that only imports the given mechanisms."""
    modules_of_outsiders = {}
    for module, outsider in _outsiders().items():
        modules_of_outsiders[outsider] = module
    imports = []
    entries = []
    for name, mechanism_type in mechanism_types().items():
        if name not in names:
            continue
        class_name = mechanism_type.__name__
        defining_module = mechanism_type.__module__
        module = modules_of_outsiders.get(mechanism_type, defining_module)
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
