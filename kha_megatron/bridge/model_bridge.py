"""Megatron Bridge for KHA models.

Other bridges log a warning if a tensor cannot be matched. This one fails instead, because
the converted model would be incomplete.
"""

import re
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, WeightConversionTask
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from kha_megatron.bridge.mappings import build_mappings
from kha_megatron.bridge.provider import KHAModelProvider
from kha_megatron.bridge.provider_fields import (
    compare_fields,
    provider_to_hf_config,
    to_provider_fields,
)
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.errors import CheckpointError

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
"""Always float32. Megatron models do not need to have it, in which case we export zeros."""


# The source has to be a string, because KHAForCausalLM is not part of the transformers package.
@MegatronModelBridge.register_bridge(
    source="KHAForCausalLM",
    target=GPTModel,
    provider=KHAModelProvider,
    model_type="kha",
)
class KHABridge(MegatronModelBridge):
    """Converts between ``KHAForCausalLM`` and Megatron's ``GPTModel`` with KHA."""

    def provider_bridge(self, hf_pretrained: Any) -> KHAModelProvider:
        config = hf_pretrained.config
        dtype = self.dtype_from_hf(config, default=torch.float32)
        provider = KHAModelProvider(
            **to_provider_fields(config),
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by(config.vocab_size),
            params_dtype=dtype,
            fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16,
        )
        if provider.num_moe_experts:
            provider.moe_grouped_gemm = True
            provider.moe_token_dispatcher_type = "alltoall"
            if provider.moe_router_score_function == "sigmoid":
                provider.moe_router_load_balancing_type = "none"
        return provider

    @classmethod
    def megatron_to_hf_config(cls, provider: KHAModelProvider) -> dict[str, Any]:
        config = provider_to_hf_config(provider)
        config.dtype = provider.params_dtype
        return config.to_dict()

    def mapping_registry(self) -> MegatronMappingRegistry:
        return MegatronMappingRegistry(*build_mappings(self.hf_config))

    def build_conversion_tasks(
        self,
        hf_pretrained: Any,
        megatron_model: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[WeightConversionTask]:
        """Build the tasks and verify that configs and tensor names match."""
        config = self._read_config(megatron_model)
        if differing := compare_fields(config, getattr(hf_pretrained, "config", hf_pretrained)):
            raise CheckpointError(
                "The Megatron model does not match the Hugging Face configuration: "
                f"{', '.join(differing)}."
            )
        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, *args, **kwargs)
        unmatched = self._unmatched_tensors(tasks, config).items()
        if found := [f"{what}: {', '.join(names[:5])}" for what, names in unmatched if names]:
            raise CheckpointError(
                "The tensors of the Megatron model and the Hugging Face checkpoint do not match. "
                f"{'. '.join(found)}."
            )
        return tasks

    def stream_weights_megatron_to_hf(self, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        # Read the config again, because another bridge instance may have built the tasks.
        self._read_config(megatron_model if isinstance(megatron_model, list) else [megatron_model])
        return super().stream_weights_megatron_to_hf(megatron_model, *args, **kwargs)

    def build_adapter_conversion_tasks(
        self,
        megatron_model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, list[Any]]:
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        config = unwrap_model(models)[0].config
        parts = list(from_hf_config(provider_to_hf_config(config).to_dict()).qkv.parts)
        tasks = super().build_adapter_conversion_tasks(models, *args, **kwargs)
        adapted = next((name for name in tasks if "linear_qkv" in name), None)
        if adapted and parts != ["query", "key", "value"]:
            raise CheckpointError(
                f"Adapters on {adapted} are not supported, because it has additional rows "
                f"({', '.join(parts)}). Please remove linear_qkv from target_modules."
            )
        return tasks

    def _read_config(self, megatron_model: list[Any]) -> Any:
        config = unwrap_model(megatron_model)[0].config
        self._without_bias = not config.moe_router_enable_expert_bias
        return config

    def _unmatched_tensors(
        self,
        tasks: list[WeightConversionTask | None],
        megatron_config: Any,
    ) -> dict[str, list[str]]:
        """Find tensors without a counterpart and group them by error message."""
        names = self._cached_param_names
        if self._share_embeddings_and_output_weights(megatron_config):
            names = [name for name in names if "output_layer" not in name]
        unmatched = [name for name, task in zip(names, tasks, strict=True) if task is None]
        found = {"Only in Megatron": unmatched}
        state = getattr(self.hf_pretrained, "state", None)
        if state is None:
            return found
        experts = range(megatron_config.num_moe_experts or 0)
        # With EP, a rank only has tasks for its local experts.
        mapped = {key for task in tasks if task for key in _hf_names(task, experts)}
        stored = set(state.source.get_all_keys())
        biases = {key for key in stored - mapped if self._is_omitted(key)}
        return found | {
            "Missing in the Hugging Face checkpoint": sorted(mapped - stored),
            "Not in Megatron": sorted(stored - mapped - biases),
            "Non-zero, but moe_router_enable_expert_bias is not set": [
                key for key in sorted(biases) if state[key].any()
            ],
        }

    def _is_omitted(self, key: str) -> bool:
        """Whether ``key`` is a correction bias that only exists in the Hugging Face model."""
        is_sigmoid = self.hf_config.scoring_func == "sigmoid"
        return self._without_bias and is_sigmoid and key.endswith(CORRECTION_BIAS)

    def maybe_modify_converted_hf_weight(
        self,
        task: WeightConversionTask,
        converted_weights_dict: dict[str, Tensor],
        hf_state_dict: Any,
    ) -> dict[str, Tensor]:
        """Add the correction bias (zeros) if it is missing in Megatron."""
        for name, weight in tuple(converted_weights_dict.items()):
            bias = name.removesuffix("mlp.gate.weight") + CORRECTION_BIAS
            if name.endswith("mlp.gate.weight") and self._is_omitted(bias):
                converted_weights_dict[bias] = torch.zeros_like(weight[:, 0], dtype=torch.float32)
        return converted_weights_dict

    @staticmethod
    def _cast_export_weight_dtype(
        weights: dict[str, Tensor],
        weight_dtype: torch.dtype | None,
    ) -> dict[str, Tensor]:
        cast = MegatronModelBridge._cast_export_weight_dtype(weights, weight_dtype)
        return cast | {key: weights[key] for key in weights if key.endswith(CORRECTION_BIAS)}


def _hf_names(task: WeightConversionTask, experts: range) -> list[str]:
    """List the Hugging Face tensors of a task. Expert tensors are listed for all ``experts``."""
    names = task.mapping.hf_param
    found: list[str] = []
    for key in [names] if isinstance(names, str) else names.values():
        match = re.match(r"(.*\.experts\.)\d+(\..*)", key)
        found += [f"{match[1]}{i}{match[2]}" for i in experts] if match else [key]
    return found
