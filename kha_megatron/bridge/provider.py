"""KHA model providers for Megatron-Bridge."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from kha_megatron.bridge.provider_fields import hybrid_pattern, read_heads
from kha_megatron.heads import Knock
from kha_megatron.heads.config import INIT_SEED, HeadsConfig
from kha_megatron.mcore.compat import bridge_imports

with bridge_imports():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
    from megatron.bridge.utils.instantiate_utils import target_allowlist
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch.nn.functional import silu

    from kha_megatron.mcore.added_loss import LossScale
    from kha_megatron.mcore.gpt import Spec, kha_layer_spec
    from kha_megatron.mcore.hybrid import kha_hybrid_stack_spec


def knocking_layer_spec(
    provider: "KHAModelProvider",
    vp_stage: int | None = None,
) -> Spec:
    groups = provider._pg_collection
    pp_rank = groups.pp.rank() if groups is not None else None
    return kha_layer_spec(provider, provider.kha, vp_stage, pp_rank)


def knocking_stack_spec(provider: "KHAHybridModelProvider") -> ModuleSpec:
    return kha_hybrid_stack_spec(provider.kha)


@dataclass
class _HeadSettings:
    """Settings that both providers have. Their defaults follow the paper."""

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
        super().finalize()  # type: ignore[misc]


@dataclass
class KHAModelProvider(_HeadSettings, GPTModelProvider):
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

    def to_hybrid(self) -> "KHAHybridModelProvider":
        """Return a provider for a ``HybridModel`` with the same settings, weights and hooks.

        Must be called before ``finalize``.
        """
        settings = {}
        for field in fields(KHAHybridModelProvider):
            if field.init and field.name in vars(self) and not field.name.startswith("_"):
                settings[field.name] = getattr(self, field.name)
        settings |= {
            "hybrid_layer_pattern": hybrid_pattern(self),
            "num_layers": None,  # derived from the pattern
            "moe_layer_freq": 1,
            "is_hybrid_model": True,
        }
        hybrid = KHAHybridModelProvider(**settings)
        for hooks in ("_pre_wrap_hooks", "_post_wrap_hooks"):
            if hooks in vars(self):
                setattr(hybrid, hooks, list(getattr(self, hooks)))
        return hybrid


@dataclass
class KHAHybridModelProvider(_HeadSettings, HybridModelProvider):
    """Provider for hybrid models with KHA, whose attention and MLP are separate layers.

    Takes the same settings as :class:`KHAModelProvider` and a ``hybrid_layer_pattern`` instead of
    ``num_layers``.

    Example::

        cfg.model = KHAHybridModelProvider(
            hybrid_layer_pattern=18 * "*-", hidden_size=1536, ..., kha_value="mlp"
        )
    """

    hybrid_stack_spec: Callable[["KHAHybridModelProvider"], ModuleSpec] = knocking_stack_spec
    is_hybrid_model: bool = True
    attention_backend: AttnBackend = AttnBackend.auto  # as for GPT models


# Required for loading run_config.yaml. LossScale is only part of it if a mechanism has an auxiliary
# loss.
for target in (
    KHAModelProvider,
    KHAHybridModelProvider,
    knocking_layer_spec,
    knocking_stack_spec,
    LossScale,
):
    target_allowlist.add_exact(f"{target.__module__}.{target.__name__}")
