"""Model provider for Megatron-Bridge's recipes.

::

    cfg.model = KHAModelProvider(num_layers=18, hidden_size=1536, ..., kha_value="mlp")

or ``AutoBridge.from_hf_pretrained(directory).to_megatron_provider()`` after ``bridge.register()``.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from kha_megatron.bridge.imports import bridge_imports
from kha_megatron.config import KHAConfig, mechanism_types
from kha_megatron.heads import Knock
from kha_megatron.hf import read_kha

with bridge_imports():
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.utils.instantiate_utils import target_allowlist
    from torch.nn.functional import silu

    from kha_megatron.mcore.added_loss import LossScale
    from kha_megatron.mcore.specs import Spec, kha_layer_spec

_KNOCK = tuple(f.name for f in fields(Knock) if f.compare)
_Settings: Any = make_dataclass(
    "_Settings",
    [
        (f"kha_{field.name}", type(field.default) if field.default else str | None, field.default)
        for field in fields(KHAConfig)
        if field.name in _KNOCK
    ]
    + [(f"kha_{name}", dict | None, None) for name in mechanism_types()],
)
"""Fields of ``KHAConfig`` with the prefix ``kha_``: settings of KHA, and a dict for each other
mechanism."""


def knocking_layer_spec(provider: "KHAModelProvider", vp_stage: int | None = None) -> Spec:
    """Return the layer spec of this pipeline stage. Raise ConfigError for unsupported settings."""
    groups = provider._pg_collection
    pp_rank = groups.pp.rank() if groups is not None else None
    return kha_layer_spec(provider, provider.kha, vp_stage, pp_rank)


@dataclass
class KHAModelProvider(_Settings, GPTModelProvider):
    """A ``GPTModelProvider`` with KHA or another head mechanism.

    The defaults are those of the paper's models, except for the sizes. Set ``kha_query``,
    ``kha_key`` and ``kha_value`` to ``linear``, ``mlp``, ``gate`` or None
    (``model.kha_value=mlp`` in recipes), and other mechanisms to a dict of their settings
    (``model.kha_gate={output:element}``). ``attention_output_gate`` is Megatron's own gate.
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

    @property
    def kha(self) -> KHAConfig:
        """Settings of KHA. Raises ConfigError for an unknown value."""
        return read_kha(self)

    def finalize(self) -> None:
        """Check the KHA settings, then run Megatron's checks."""
        _ = self.kha
        super().finalize()


# Bridge builds only listed classes from run_config.yaml. A model with an auxiliary loss has its
# LossScale in the provider.
for target in (KHAModelProvider, knocking_layer_spec, LossScale):
    target_allowlist.add_exact(f"{target.__module__}.{target.__name__}")
