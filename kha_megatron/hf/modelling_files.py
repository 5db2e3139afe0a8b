"""The code of the architecture beside a saved model, for people who choose to trust it.

A folder that holds it loads where this package is not installed, with
``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, and in serving engines
that build unknown architectures through transformers. The files are this package's own: only their
imports of one another are made relative, so that there is nothing to keep equal.
"""

import re
from pathlib import Path

from kha_megatron import __version__

AUTO_MAP = {
    "AutoConfig": "configuration_kha.KHAModelConfig",
    "AutoModel": "modeling_kha.KHAModel",
    "AutoModelForCausalLM": "modeling_kha.KHAForCausalLM",
}
"""What ``config.json`` says about them. Serving engines build the model by ``AutoModel``."""

_IMPORT = re.compile(r"^from (kha_megatron[\w.]*) import", re.MULTILINE)
_PACKAGES = Path(__file__).parents[2]


def _source(module: str) -> str:
    path = _PACKAGES / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def _reached(module: str, found: dict[str, str]) -> dict[str, str]:
    """``found`` and what a module imports of this package, by the names of their files."""
    words = module.split(".")[1:]
    found[module] = "_".join(words[words[0] == "hf" :]).removesuffix("_kha") + "_kha"
    for name in _IMPORT.findall(_source(module)):
        if name not in found:
            _reached(name, found)
    return found


MODULES = _reached("kha_megatron.hf.modeling_kha", {})
"""The modules that a model needs, and what they are called beside it."""


def write_modelling_files(folder: str | Path) -> dict[str, str]:
    """Write the modules into an existing folder, over those of an earlier save.

    Saving a ``KHAModelConfig``, and so any model with one, does this by itself.

    Returns:
        The ``auto_map`` that belongs into ``config.json``.
    """
    for module, name in MODULES.items():
        relative = _IMPORT.sub(lambda found: f"from .{MODULES[found[1]]} import", _source(module))
        header = f"# {module} of kha-megatron {__version__} (Apache-2.0)\n"
        (Path(folder) / f"{name}.py").write_text(header + relative)
    return dict(AUTO_MAP)
