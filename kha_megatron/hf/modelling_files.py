"""The code of the architecture beside a saved model, for people who choose to trust it.

A folder that holds it loads where this package is not installed, with
``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``, and in serving engines
that build unknown architectures through transformers. The files are this package's own: only their
imports of one another are made relative, so that there is nothing to keep equal.
"""

import re
from pathlib import Path

from kha_megatron import __version__

MODULES = {
    "kha_megatron.errors": "errors_kha",
    "kha_megatron.heads.mechanism": "mechanism_kha",
    "kha_megatron.heads.knock": "knock_kha",
    "kha_megatron.heads": "heads_kha",
    "kha_megatron.config": "knocking_kha",
    "kha_megatron.hf.checks_kha": "checks_kha",
    "kha_megatron.hf.configuration_kha": "configuration_kha",
    "kha_megatron.hf.attention_kha": "attention_kha",
    "kha_megatron.hf.modeling_kha": "modeling_kha",
}
"""The modules that a model needs, and what they are called beside it."""

AUTO_MAP = {
    "AutoConfig": "configuration_kha.KHAModelConfig",
    "AutoModel": "modeling_kha.KHAModel",
    "AutoModelForCausalLM": "modeling_kha.KHAForCausalLM",
}
"""What ``config.json`` says about them. Serving engines build the model by ``AutoModel``."""

_IMPORT = re.compile(r"^from (kha_megatron[\w.]*) import", re.MULTILINE)
_PACKAGES = Path(__file__).parents[2]


def write_modelling_files(folder: str | Path) -> dict[str, str]:
    """Write the modules into an existing folder, over those of an earlier save.

    Saving a ``KHAModelConfig``, and so any model with one, does this by itself.

    Returns:
        The ``auto_map`` that belongs into ``config.json``.
    """
    for module, name in MODULES.items():
        path = _PACKAGES / module.replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        relative = _IMPORT.sub(lambda found: f"from .{MODULES[found[1]]} import", source)
        header = f"# {module} of kha-megatron {__version__} (Apache-2.0)\n"
        (Path(folder) / f"{name}.py").write_text(header + relative)
    return dict(AUTO_MAP)
