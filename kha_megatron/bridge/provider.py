"""KHA model provider for Megatron-Bridge."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kha_megatron.bridge.provider_fields import read_heads
from kha_megatron.heads import Knock
from kha_megatron.heads.config import INIT_SEED, HeadsConfig
from kha_megatron.mcore.compat import bridge_imports

with bridge_imports():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.utils.instantiate_utils import target_allowlist
    from torch.nn.functional import silu

    from kha_megatron.mcore.added_loss import LossScale
    from kha_megatron.mcore.gpt import Spec, kha_layer_spec


def knocking_layer_spec(provider: "KHAModelProvider", vp_stage: int | None = None) -> Spec:
    groups = provider._pg_collection
    pp_rank = groups.pp.rank() if groups is not None else None
    return kha_layer_spec(provider, provider.kha, vp_stage, pp_rank)


@dataclass
class KHAModelProvider(GPTModelProvider):
    """Provider for GPT models with KHA.

    Use ``kha_query``, ``kha_key`` and ``kha_value`` to select a KHA variant (``linear``, ``mlp`` or
    ``gate``). Other head mechanisms take a dictionary of settings. All other defaults follow the
    paper.

    Example::

        cfg.model = KHAModelProvider(
            num_layers=18, hidden_size=1536, ..., kha_value="mlp", kha_gate={"output": "element"}
        )
    """

    transformer_layer_spec: Callable[["KHAModelProvider"], Spec] = knocking_layer_spec
    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    activation_func: Callable = silu
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    qk_layernorm: bool = True
    position_embedding_type: str = "rope"
    should_pad_vocab: bool = True

    kha_query: str | None = None
    kha_key: str | None = None
    kha_value: str | None = None
    kha_init: str = Knock.init
    kha_init_seed: int = INIT_SEED
    kha_gate: dict[str, Any] | None = None
    kha_moh: dict[str, Any] | None = None
    kha_talking: dict[str, Any] | None = None
    kha_collaborative: dict[str, Any] | None = None
    kha_others: dict[str, dict[str, Any]] | None = None
    """Settings of head mechanisms from other packages and files by name."""

    @property
    def kha(self) -> HeadsConfig:
        return read_heads(self)

    def finalize(self) -> None:
        _ = self.kha  # raises ConfigError for invalid settings
        super().finalize()


# Required for loading run_config.yaml. LossScale is only part of it if a mechanism has an auxiliary
# loss.
for target in (KHAModelProvider, knocking_layer_spec, LossScale):
    target_allowlist.add_exact(f"{target.__module__}.{target.__name__}")
