"""LoRA with Megatron-Bridge that also trains head mechanisms."""

from dataclasses import dataclass
from typing import Any

from kha_megatron.mcore.compat import bridge_imports

with bridge_imports():
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.utils.instantiate_utils import target_allowlist

    from kha_megatron.mcore.knocking import MechanismWeight


@dataclass
class KHALoRA(LoRA):
    """LoRA that also trains the shared matrices, gates and routers of head mechanisms.

    Bridge's ``LoRA`` freezes them with the base model. Rows that a mechanism adds to ``linear_qkv``
    (e.g. for gates on the output) stay frozen.

    Example::

        cfg.peft = KHALoRA(target_modules=["linear_qkv", "linear_proj"], dim=16)
    """

    def freeze_model(self, model: Any, training: bool = True) -> None:
        super().freeze_model(model, training=training)
        if training:
            self._walk_model(model, _unfreeze_mechanism)


def _unfreeze_mechanism(module: Any) -> Any:
    if isinstance(module, MechanismWeight):
        module.requires_grad_(True)
    return module


target_allowlist.add_exact(f"{KHALoRA.__module__}.{KHALoRA.__name__}")  # for run_config.yaml
