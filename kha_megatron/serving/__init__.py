"""vLLM plugin for `kha` models. You do not need `--trust-remote-code` if it is installed."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError

_ARCHITECTURE = "KHAForCausalLM"


def register() -> None:
    """Entry point for `vllm.general_plugins`. vLLM calls this in every process."""
    import transformers
    import vllm

    import kha_megatron.hf as hf
    from kha_megatron.hf.modeling_kha import vllm_obstacle

    # vLLM looks for the class in the transformers package if --model-impl is transformers, or if
    # no class is registered.
    transformers.KHAForCausalLM = hf.KHAForCausalLM
    missing_names = list(_missing_names())
    if missing_names:
        announce(
            f"vLLM {vllm.__version__} does not have {', '.join(missing_names)}. KHA models will "
            "run in vLLM's transformers backend. To use our implementation, install vLLM 0.32 or "
            "0.33.",
            once="vLLM",
        )
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class KHAVerifyConfig(VerifyAndUpdateConfig):
        """Checks the model config before vLLM starts its workers."""

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            obstacle = vllm_obstacle(model_config.hf_config, by_backend=False)
            if obstacle is not None:
                raise ConfigError(obstacle)

    MODELS_CONFIG_MAP[_ARCHITECTURE] = KHAVerifyConfig
    ModelRegistry.register_model(_ARCHITECTURE, f"kha_megatron.serving.vllm_model:{_ARCHITECTURE}")


def _missing_names() -> Iterator[str]:
    """Find names that vLLM does not have. Reads source files, as imports may initialize CUDA."""
    for file in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if not node.module.startswith("vllm"):
                continue
            source = _read_source(node.module)
            for imported in node.names:
                if imported.name not in source:
                    yield f"{node.module}.{imported.name}"


def _read_source(module: str) -> str:
    """Return the source code of a module, or an empty string if there is no such module."""
    try:
        spec = find_spec(module)
    except ImportError:  # the parent package is missing
        return ""
    if spec is None or not spec.origin:
        return ""
    return Path(spec.origin).read_text()
