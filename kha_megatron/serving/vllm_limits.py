"""Check the model config before vLLM starts its workers."""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from kha_megatron.errors import ConfigError
from kha_megatron.hf.modeling_kha import vllm_obstacle


class KHAVerifyConfig(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        if why := vllm_obstacle(model_config.hf_config, by_backend=False):
            raise ConfigError(why)
