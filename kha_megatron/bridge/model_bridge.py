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
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from kha_megatron.bridge.mappings import HybridMappingRegistry, build_mappings
from kha_megatron.bridge.provider import KHAHybridModelProvider, KHAModelProvider
from kha_megatron.bridge.provider_fields import (
    compare_fields,
    provider_to_hf_config,
    to_provider_fields,
)
from kha_megatron.conversion.hf_configs import from_hf_config
from kha_megatron.errors import CheckpointError

CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"
"""Expert bias of a router. Always float32. Megatron models do not need to have it, in which case we
export zeros."""


class KHABridge(MegatronModelBridge):
    """Converts between ``KHAForCausalLM`` and Megatron's ``GPTModel`` or ``HybridModel`` with KHA.

    Reads the type of the Megatron model before the parameters are mapped.
    """

    builds_hybrid = False
    """Whether Hugging Face models become a ``HybridModel``. Set by :func:`register_bridge`."""
    _is_hybrid = False

    def provider_bridge(self, hf_pretrained: Any) -> KHAModelProvider | KHAHybridModelProvider:
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
        return provider.to_hybrid() if self.builds_hybrid else provider

    @classmethod
    def megatron_to_hf_config(cls, provider: KHAModelProvider) -> dict[str, Any]:
        config = provider_to_hf_config(provider)
        config.dtype = provider.params_dtype
        return config.to_dict()

    def mapping_registry(self) -> MegatronMappingRegistry:
        registry = HybridMappingRegistry if self._is_hybrid else MegatronMappingRegistry
        return registry(*build_mappings(self.hf_config))

    def build_conversion_tasks(
        self,
        hf_pretrained: Any,
        megatron_model: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> list[WeightConversionTask]:
        """Build the tasks and verify that configs and tensor names match."""
        config = self._inspect_model(megatron_model)
        hf_config = getattr(hf_pretrained, "config", hf_pretrained)
        differing = compare_fields(config, hf_config)
        if differing:
            raise CheckpointError(
                "The Megatron model does not match the Hugging Face configuration: "
                f"{', '.join(differing)}."
            )
        tasks = super().build_conversion_tasks(
            hf_pretrained,
            megatron_model,
            *args,
            **kwargs,
        )
        mismatches = []
        for problem, names in self._unmatched_tensors(tasks, config).items():
            if names:
                mismatches.append(f"{problem}: {', '.join(names[:5])}")
        if mismatches:
            raise CheckpointError(
                "The tensors of the Megatron model and the Hugging Face checkpoint do not match. "
                f"{'. '.join(mismatches)}."
            )
        return tasks

    def stream_weights_megatron_to_hf(
        self,
        megatron_model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # another bridge instance may have built the tasks
        self._inspect_model(_as_list(megatron_model))
        return super().stream_weights_megatron_to_hf(
            megatron_model,
            *args,
            **kwargs,
        )

    def build_adapter_conversion_tasks(
        self,
        megatron_model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, list[Any]]:
        models = _as_list(megatron_model)
        config = self._inspect_model(models)
        model = from_hf_config(provider_to_hf_config(config).to_dict())
        parts = list(model.qkv.parts)
        tasks = super().build_adapter_conversion_tasks(models, *args, **kwargs)
        for name in tasks:
            if "linear_qkv" in name and parts != ["query", "key", "value"]:
                raise CheckpointError(
                    f"Adapters on {name} are not supported, because it has additional rows "
                    f"({', '.join(parts)}). Please remove linear_qkv from target_modules."
                )
        return tasks

    def build_export_fp8_tasks(self, hf_pretrained: Any, megatron_model: Any, **kwargs: Any) -> Any:
        self._inspect_model(_as_list(megatron_model))
        return super().build_export_fp8_tasks(hf_pretrained, megatron_model, **kwargs)

    def _inspect_model(self, megatron_model: list[Any]) -> Any:
        """Record the type of a Megatron model and what its routers lack. Returns its config."""
        model = unwrap_model(megatron_model)[0]
        self._is_hybrid = isinstance(model, HybridModel)
        config = model.config
        self._lacks_correction_bias = not config.moe_router_enable_expert_bias
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
        experts = range(megatron_config.num_moe_experts or 0)
        unmatched_names = []
        mapped_keys: set[str] = set()
        for name, task in zip(names, tasks, strict=True):
            if task is None:
                unmatched_names.append(name)
            else:  # With EP, a rank only has tasks for its local experts.
                mapped_keys.update(_hf_names(task, experts))
        unmatched = {"Only in Megatron": unmatched_names}
        state = getattr(self.hf_pretrained, "state", None)
        if state is None:
            return unmatched
        stored_keys = set(state.source.get_all_keys())
        unmapped_keys = []
        nonzero_biases = []
        for key in sorted(stored_keys - mapped_keys):
            if not self._is_omitted(key):
                unmapped_keys.append(key)
            elif state[key].any():
                nonzero_biases.append(key)
        return unmatched | {
            "Missing in the Hugging Face checkpoint": sorted(mapped_keys - stored_keys),
            "Not in Megatron": unmapped_keys,
            "Non-zero, but moe_router_enable_expert_bias is not set": nonzero_biases,
        }

    def _is_omitted(self, key: str) -> bool:
        """Whether ``key`` is a correction bias that only exists in the Hugging Face model."""
        is_sigmoid = self.hf_config.scoring_func == "sigmoid"
        return self._lacks_correction_bias and is_sigmoid and key.endswith(CORRECTION_BIAS)

    def maybe_modify_converted_hf_weight(
        self,
        task: WeightConversionTask,
        converted_weights_dict: dict[str, Tensor],
        hf_state_dict: Any,
    ) -> dict[str, Tensor]:
        """Add the correction bias (zeros) if it is missing in Megatron."""
        for name, weight in tuple(converted_weights_dict.items()):
            if not name.endswith("mlp.gate.weight"):
                continue
            bias_name = name.removesuffix("mlp.gate.weight") + CORRECTION_BIAS
            if self._is_omitted(bias_name):
                bias = torch.zeros_like(weight[:, 0], dtype=torch.float32)
                converted_weights_dict[bias_name] = bias
        return converted_weights_dict

    @staticmethod
    def _cast_export_weight_dtype(
        weights: dict[str, Tensor],
        weight_dtype: torch.dtype | None,
    ) -> dict[str, Tensor]:
        cast_weights = MegatronModelBridge._cast_export_weight_dtype(
            weights,
            weight_dtype,
        )
        for key, weight in weights.items():
            if key.endswith(CORRECTION_BIAS):
                cast_weights[key] = weight
        return cast_weights


# The source has to be a string, because KHAForCausalLM is not part of the transformers package.
for megatron_class in (HybridModel, GPTModel):
    MegatronModelBridge.register_bridge(
        source="KHAForCausalLM",
        target=megatron_class,
        provider=KHAModelProvider,
        model_type="kha",
    )(KHABridge)


def _as_list(megatron_model: Any) -> list[Any]:
    return megatron_model if isinstance(megatron_model, list) else [megatron_model]


def _hf_names(task: WeightConversionTask, experts: range) -> list[str]:
    """List the Hugging Face tensors of a task. Expert tensors are listed for all ``experts``."""
    hf_param = task.mapping.hf_param
    keys = [hf_param] if isinstance(hf_param, str) else hf_param.values()
    names: list[str] = []
    for key in keys:
        match = re.match(r"(.*\.experts\.)\d+(\..*)", key)
        if match is None:
            names.append(key)
            continue
        prefix, suffix = match.groups()
        names += [f"{prefix}{expert}{suffix}" for expert in experts]
    return names
