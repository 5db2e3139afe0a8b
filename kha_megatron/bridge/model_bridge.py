"""The bridge that ``AutoBridge`` uses for ``KHAForCausalLM``.

Megatron-Bridge logs a warning when a tensor of one side has no place on the other. This bridge
raises an error.
"""

import re
from collections import Counter
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    WeightConversionTask,
)
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from kha_megatron.bridge.mappings import mappings
from kha_megatron.bridge.provider import KHAModelProvider
from kha_megatron.bridge.provider_fields import check_agreement, hf_config_of, provider_fields
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.errors import CheckpointError

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
"""Stays float32. The architecture always has it, so a model without it is exported with zeros."""


# given by name, because AutoBridge looks for classes in transformers
@MegatronModelBridge.register_bridge(
    source="KHAForCausalLM", target=GPTModel, provider=KHAModelProvider, model_type="kha"
)
class KHABridge(MegatronModelBridge):
    """Converts between ``KHAForCausalLM`` directories and models of :class:`KHAModelProvider`."""

    def provider_bridge(self, hf_pretrained: Any) -> KHAModelProvider:
        """Return a provider of the model that ``hf_pretrained.config`` describes, in its dtype.

        Raises:
            CheckpointError: Megatron-Bridge has no layer for a field.
        """
        config = hf_pretrained.config
        dtype = self.dtype_from_hf(config, default=torch.float32)
        provider = KHAModelProvider(
            **provider_fields(config),
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
        """Return the ``config.json`` of the models that ``provider`` builds.

        Raises:
            CheckpointError: The architecture cannot express a field.
        """
        config = hf_config_of(provider)
        config.dtype = provider.params_dtype
        return config.to_dict()

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the mapping of every tensor."""
        return MegatronMappingRegistry(*mappings(self.hf_config))

    def build_conversion_tasks(
        self,
        hf_pretrained: Any,
        megatron_model: list[Any],
        weight_dtype: torch.dtype | None = None,
    ) -> list[WeightConversionTask]:
        """Build Bridge's tasks, and check that both sides describe the same model.

        Raises:
            CheckpointError: The configurations differ, or the tensors do not map one to one.
        """
        megatron_config = self._look_at(megatron_model)
        check_agreement(megatron_config, getattr(hf_pretrained, "config", hf_pretrained))
        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, weight_dtype)
        self._check_complete(tasks, megatron_config)
        return tasks

    def stream_weights_megatron_to_hf(self, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Export as Bridge does. The tasks may have been built by another instance."""
        self._look_at(megatron_model if isinstance(megatron_model, list) else [megatron_model])
        return super().stream_weights_megatron_to_hf(megatron_model, *args, **kwargs)

    def build_adapter_conversion_tasks(
        self, megatron_model: Any, *args: Any, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Build Bridge's tasks for adapters. Bridge splits query, key and value only.

        Raises:
            CheckpointError: An adapter is on a ``linear_qkv`` with other rows.
        """
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        config = unwrap_model(models)[0].config
        parts = list(from_hf_config(hf_config_of(config).to_dict()).qkv.parts)
        tasks = super().build_adapter_conversion_tasks(models, *args, **kwargs)
        adapted = next((name for name in tasks if "linear_qkv" in name), None)
        if adapted and parts != ["query", "key", "value"]:
            raise CheckpointError(
                f"an adapter on {adapted}, whose rows are {', '.join(parts)}: Megatron-Bridge cuts "
                "adapters of query, key, value only: leave linear_qkv out of its target_modules"
            )
        return tasks

    def _look_at(self, megatron_model: list[Any]) -> Any:
        config = unwrap_model(megatron_model)[0].config
        self._without_bias = not config.moe_router_enable_expert_bias
        return config

    def _check_complete(
        self, tasks: list[WeightConversionTask | None], megatron_config: Any
    ) -> None:
        names = self._cached_param_names
        if self._share_embeddings_and_output_weights(megatron_config):
            names = [name for name in names if "output_layer" not in name]
        places = Counter(key for task in tasks if task for key in _hf_names(task))
        problems = {
            "without a place in the folder": [
                name for name, task in zip(names, tasks, strict=True) if task is None
            ],
            "two of Megatron's for one": [key for key, count in places.items() if count > 1],
        }
        state = getattr(self.hf_pretrained, "state", None)
        if state is not None:
            there = set(state.source.get_all_keys())
            experts = range(megatron_config.num_moe_experts or 0)
            # a rank has tasks for its own experts only
            wanted = {other for key in places for other in _of_all_experts(key, experts)}
            biases = {key for key in there - wanted if self._is_left_out(key)}
            problems["missing in the folder"] = sorted(wanted - there)
            problems["without a place in Megatron"] = sorted(there - wanted - biases)
            problems["of a router without moe_router_enable_expert_bias, and not zero"] = [
                key for key in sorted(biases) if state[key].any()
            ]
        listed = [f"{what}: {_some(keys)}" for what, keys in problems.items() if keys]
        if listed:
            raise CheckpointError(
                f"the Megatron model and the Hugging Face folder do not fit: {'; '.join(listed)}"
            )

    def _is_left_out(self, key: str) -> bool:
        """Return whether a tensor is a correction bias that this Megatron model does not have."""
        return (
            self._without_bias
            and self.hf_config.scoring_func == "sigmoid"
            and key.endswith(CORRECTION_BIAS)
        )

    def maybe_modify_converted_hf_weight(
        self,
        task: WeightConversionTask,
        converted_weights_dict: dict[str, Tensor],
        hf_state_dict: Any,
    ) -> dict[str, Tensor]:
        """Add the correction bias that a sigmoid router without one does not have."""
        for name, weight in tuple(converted_weights_dict.items()):
            bias = name.removesuffix("mlp.gate.weight") + CORRECTION_BIAS
            if name.endswith("mlp.gate.weight") and self._is_left_out(bias):
                converted_weights_dict[bias] = torch.zeros_like(weight[:, 0], dtype=torch.float32)
        return converted_weights_dict

    @staticmethod
    def _cast_export_weight_dtype(
        weights: dict[str, Tensor], weight_dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Cast every tensor except for the correction bias."""
        cast = MegatronModelBridge._cast_export_weight_dtype(weights, weight_dtype)
        return cast | {key: weights[key] for key in weights if key.endswith(CORRECTION_BIAS)}


def _hf_names(task: WeightConversionTask) -> list[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


def _of_all_experts(key: str, experts: range) -> list[str]:
    if (found := re.match(r"(.*\.experts\.)\d+(\..*)", key)) is None:
        return [key]
    return [f"{found[1]}{number}{found[2]}" for number in experts]


def _some(keys: list[str], most: int = 5) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
