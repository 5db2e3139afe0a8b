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
_MODELING, _ATTENTION, _REGISTRY = (
    f"kha_megatron.hf.{name}_kha" for name in ("modeling", "attention", "mechanisms")
)


def write_modelling_files(directory: str | Path, config: Any) -> dict[str, str]:
    """Write the modeling files and return the `auto_map` for `config.json`."""
    for name, source in modelling_files(config).items():
        (Path(directory) / name).write_text(source)
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
    return {
        f"{_file_name(module)}.py": f"# {_origin(module)}\n"
        + _IMPORT.sub(lambda found: f"from .{_file_name(found[1])} import", source)
        for module, source in sources.items()
    }


def is_modelling_file(path: Path) -> bool:
    """Check for the first line that :func:`modelling_files` writes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first_line = file.readline()
    return first_line.startswith("# ") and "kha-megatron" in first_line


def _collect(module: str, config: Any, sources: dict[str, str]) -> None:
    """Add `module` and everything it imports from this package to `sources`."""
    if module in sources:
        return
    path = _ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if kind := _outsiders().get(module):
        path = Path(sys.modules[kind.__module__].__file__ or "")
    sources[module] = _registry(config.mechanisms) if module == _REGISTRY else path.read_text()
    for imported in _IMPORT.findall(sources[module]):
        _collect(imported, config, sources)


def _origin(module: str) -> str:
    if kind := _outsiders().get(module):
        return f"{kind.__module__}, a head mechanism that is not part of kha-megatron"
    return f"{module} of kha-megatron {__version__} (Apache-2.0)"


def _outsiders() -> dict[str, type]:
    """Mechanisms from other packages and files, by module name in this package."""
    own = f"{__package__.partition('.')[0]}."
    return {
        f"{own}heads.{name}": kind
        for name, kind in mechanism_types().items()
        if not kind.__module__.startswith(own)
    }


def _file_name(module: str) -> str:
    parts = module.split(".")[1:]
    return "_".join(parts[parts[0] == "hf" :]).removesuffix("_kha") + "_kha"


def _registry(names: Any) -> str:
    """Generate a `mechanisms_kha.py` that only imports the given mechanisms."""
    modules = {kind: module for module, kind in _outsiders().items()}
    kinds = [kind for name, kind in mechanism_types().items() if name in names]
    imports = [f"from {modules.get(k, k.__module__)} import {k.__name__}" for k in kinds]
    entries = ", ".join(f"{kind.name!r}: {kind.__name__}" for kind in kinds)
    doc = '"""Head mechanisms of this model, in the order in which they are applied."""'
    function = ["def mechanism_types() -> dict[str, type]:", f"    return {{{entries}}}"]
    return "\n".join([doc, "", *imports, "", "", *function, ""])
