"""Configuration of the ``kha`` architecture: what Megatron trained, in Hugging Face terms.

One class describes dense and mixture-of-experts decoders with grouped-query attention, because a
Megatron run mixes both in one model (``moe_layer_freq``). Fields that stock transformers models
share keep their stock names, so that other tools read them.
"""

import os
from collections.abc import Callable
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from kha_megatron.config import MATRICES, KHAConfig
from kha_megatron.errors import ConfigError

MLP_LAYER_TYPES = ("dense", "sparse")
SCORE_FUNCTIONS = ("softmax", "sigmoid")

# What all heads share sees only its rank's heads, so its gradient is a partial sum there. As with
# transformers' own norms of q and k, it is right for one backward a step: 5.23 sums what has
# accumulated anew at every further one.
_SHARED_BY_HEADS = "replicated_with_grad_allreduce"


def matrix_name(matrix: str) -> str:
    """Module name of a shared matrix (a word of ``config.MATRICES``): ``up`` is ``up_proj``."""
    return matrix if matrix == "proj" else f"{matrix}_proj"


@strict
class KHAModelConfig(PreTrainedConfig):
    """A decoder with Knocking-Heads Attention; ``KHAModelConfig()`` is a plain dense baseline.

    Raises:
        ConfigError: a KHA field names an unknown variant, or sizes contradict each other.
    """

    model_type = "kha"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers' own convention)
    # The name under which transformers' expert kernels look the number up.
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    # `__post_init__` adds the rules of the matrices that this configuration has.
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": _SHARED_BY_HEADS,
        "layers.*.self_attn.k_norm": _SHARED_BY_HEADS,
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_experts.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_ep_plan = {  # noqa: RUF012
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    write_code: ClassVar[Callable[[str | os.PathLike], dict[str, str]] | None] = None
    """Writes the files that define this architecture into a folder and returns their ``auto_map``.
    ``kha_megatron.hf`` sets it. A copy of this file beside a model has none: transformers itself
    copies on what it loaded from a folder."""

    vocab_size: int = 32000
    """Rows of the embedding."""
    hidden_size: int = 1024
    """Features of the residual stream."""
    intermediate_size: int = 3072
    """Features inside a dense SwiGLU layer."""
    num_hidden_layers: int = 24
    """Decoder layers."""
    num_attention_heads: int = 32
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads; None for as many as query heads (MHA), 1 for MQA."""
    head_dim: int = 128
    """Features of a head; an even number."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs."""
    max_position_embeddings: int = 8192
    """Longest sequence of the training."""
    initializer_range: float = 0.02
    """Standard deviation of newly drawn weights."""
    rms_norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    use_qk_norm: bool = True
    """RMSNorm over each query and key head, after the knock and before RoPE."""
    attention_bias: bool = False
    """Biases in the q, k and v projections (Megatron's ``--add-qkv-bias``); never in ``o_proj``."""
    attention_dropout: float | int = 0.0
    """Dropout of the attention probabilities while training."""
    rope_parameters: dict | None = None
    """``rope_type``, ``rope_theta``, and ``partial_rotary_factor`` (``--rotary-percent``)."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    use_cache: bool = True
    """Whether ``forward`` keeps keys and (knocked) values for decoding."""

    num_experts: int = 0
    """Routed experts of a sparse layer; 0 makes every layer dense."""
    num_experts_per_tok: int = 1
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 0
    """Features inside one routed expert."""
    mlp_layer_types: list[str] | None = None
    """``"dense"`` or ``"sparse"`` for each layer, Megatron's ``moe_layer_freq`` list; None for all
    layers sparse when there are experts, else all dense."""
    shared_expert_intermediate_size: int = 0
    """Features inside the shared expert (``--moe-shared-expert-intermediate-size``); 0 for none."""
    shared_expert_gate: bool = False
    """Whether a sigmoid of one linear output scales the shared expert."""
    scoring_func: str = "softmax"
    """``softmax``, or ``sigmoid`` with a correction bias that moves the choice of experts only."""
    norm_topk_prob: bool = True
    """Whether a token's expert weights are divided by their sum. Megatron: for ``softmax`` True,
    unless ``moe_router_pre_softmax``; for ``sigmoid`` True, unless ``moe_router_topk`` is 1."""
    routed_scaling_factor: float | int = 1.0
    """Factor on the expert weights (``--moe-router-topk-scaling-factor``)."""
    output_router_logits: bool = False
    """Whether ``forward`` returns the router's logits."""

    kha_query: str | None = None
    """Variant on the query heads: ``linear``, ``mlp``, ``gate`` or None."""
    kha_key: str | None = None
    """Variant on the key heads."""
    kha_value: str | None = None
    """Variant on the value heads."""
    kha_init: str = "identity"
    """Start of newly made matrices: ``identity`` (a no-op) or ``random``. No effect on loading."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.mlp_layer_types is None:
            kind = "sparse" if self.num_experts else "dense"
            self.mlp_layer_types = [kind] * self.num_hidden_layers
        self._check()
        self.base_model_tp_plan = type(self).base_model_tp_plan | {
            f"layers.*.self_attn.{projection[0]}_knock.{matrix_name(matrix)}": _SHARED_BY_HEADS
            for projection, variant in self.kha.variants.items()
            for matrix in MATRICES[variant]
        }
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        """``config.json``, and the modelling files beside it. Every model's save comes here."""
        if self.write_code is not None:
            os.makedirs(save_directory, exist_ok=True)
            self.auto_map = self.write_code(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def kha(self) -> KHAConfig:
        """The KHA fields, validated.

        Raises:
            ConfigError: a field holds an unknown word.
        """
        return KHAConfig(
            query=self.kha_query, key=self.kha_key, value=self.kha_value, init=self.kha_init
        )

    def _check(self) -> None:
        """Refuse what no model can be built from, before any tensor is made."""
        _ = self.kha
        problem = self._attention_problem() or self._mlp_problem()
        if problem:
            raise ConfigError(problem)

    def _attention_problem(self) -> str | None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups < 1 or heads % groups:
            return (
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}: "
                "every key/value head must serve the same number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            return f"head_dim={self.head_dim} is not a positive even number, which RoPE needs"
        return None

    def _mlp_problem(self) -> str | None:
        layers, kinds = self.num_hidden_layers, self.mlp_layer_types
        if len(kinds) != layers or not set(kinds) <= set(MLP_LAYER_TYPES):
            return (
                f"mlp_layer_types={kinds} must name 'dense' or 'sparse' for each of the "
                f"{layers} layers"
            )
        if "sparse" not in kinds:
            return None
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            return (
                f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and "
                f"num_experts={self.num_experts}"
            )
        if self.moe_intermediate_size < 1:
            return f"moe_intermediate_size={self.moe_intermediate_size} must be at least 1"
        if self.scoring_func not in SCORE_FUNCTIONS:
            return (
                f"unknown scoring_func {self.scoring_func!r}: "
                f"choose one of {', '.join(SCORE_FUNCTIONS)}"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            return "shared_expert_gate=True needs a shared_expert_intermediate_size above 0"
        return None


__all__ = ["KHAModelConfig", "matrix_name"]
