"""Knocking-Heads models in Megatron-Bridge's recipes.

::

    cfg.model = KHAModelProvider(num_layers=18, hidden_size=1536, ..., kha_value="mlp")

or ``AutoBridge.from_hf_pretrained(folder).to_megatron_provider()`` after ``bridge.register()``.
"""

from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any

from kha_megatron.bridge.imports import bridge_imports
from kha_megatron.bridge.provider_fields import kha_of
from kha_megatron.config import KHAConfig, mechanism_types

with bridge_imports():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.utils.instantiate_utils import target_allowlist
    from torch.nn.functional import silu

    from kha_megatron.mcore.added_loss import LossScale
    from kha_megatron.mcore.specs import Spec, kha_layer_spec

_Mechanisms: Any = make_dataclass(
    "_Mechanisms", [(f"kha_{name}", dict | None, None) for name in mechanism_types()]
)
"""One field for each mechanism of the heads beside the knock."""


def knocking_layer_spec(provider: "KHAModelProvider", vp_stage: int | None = None) -> Spec:
    """The layers of this pipeline stage; what ``provider.transformer_layer_spec`` is.

    Raises:
        ConfigError: the model cannot carry KHA as configured; the message says why.
    """
    groups = provider._pg_collection
    pp_rank = groups.pp.rank() if groups is not None else None
    return kha_layer_spec(provider, provider.kha, vp_stage, pp_rank)


@dataclass
class KHAModelProvider(_Mechanisms, GPTModelProvider):
    """A ``GPTModelProvider`` whose self-attention knocks, or has another mechanism of the heads.

    The defaults are those of the paper's models; the sizes have none. What is knocked is said in
    plain words, so that recipes can override it (``model.kha_value=mlp``) and ``run_config.yaml``
    holds it. The other mechanisms are objects of their settings, or None: ``kha_gate``, ``kha_moh``
    and so on (``model.kha_gate={output:element}``); Megatron's own output gate is
    ``attention_output_gate``. ``transformer_impl`` chooses Transformer Engine or local modules.

    Raises:
        ConfigError: from :meth:`finalize`, for a word that is no variant.
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
    """Variant on the query heads: ``linear``, ``mlp``, ``gate`` or None."""
    kha_key: str | None = None
    """Variant on the key heads."""
    kha_value: str | None = None
    """Variant on the value heads."""
    kha_init: str = KHAConfig.init
    """How the matrices start: ``identity`` (a no-op) or ``random`` (the paper's ablation)."""
    kha_init_seed: int = KHAConfig.init_seed
    """Seed of ``random``."""

    @property
    def kha(self) -> KHAConfig:
        """The KHA fields, validated."""
        return kha_of(self)

    def finalize(self) -> None:
        """Check the KHA fields, then what Megatron checks."""
        _ = self.kha
        super().finalize()


# Bridge builds what a checkpoint's run_config.yaml names, if it is on this list; the scale of an
# added loss is there because a model with one leaves it in its provider
for target in (KHAModelProvider, knocking_layer_spec, LossScale):
    target_allowlist.add_exact(f"{target.__module__}.{target.__name__}")
