"""Configuration of the ``kha`` architecture: dense and mixture-of-experts decoders with
Knocking-Heads Attention (arXiv 2510.23052).

One class supports every model of a Megatron run: dense and sparse layers (``moe_layer_freq``) with
MHA, MQA, GQA, GTA, MLA or GLA. Fields of stock transformers models have their stock names. Further
``kha_*`` fields hold the settings of other head mechanisms.
"""

import os
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

KNOWN = {
    **dict.fromkeys(("kha_query", "kha_key", "kha_value"), (None, "linear", "mlp", "gate")),
    "kha_init": ("identity", "random"),
    "kha_attention": (None, "gta", "gla"),
    "scoring_func": ("softmax", "sigmoid"),
}
"""Allowed values of the fields that are names."""


@strict
class KHAModelConfig(PreTrainedConfig):
    """Configure a decoder with Knocking-Heads Attention. The default is a dense baseline.

    Raises:
        ValueError: if a field has an unknown value or fields contradict each other.
    """

    model_type = "kha"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    # transformers' expert kernels read the number of experts under this name.
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    # A model adds the plan of its attention.
    base_model_tp_plan = {  # noqa: RUF012
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

    write_code: ClassVar[Any] = None
    """Function ``(directory, config)`` that writes the modelling files and returns ``auto_map``.
    ``kha_megatron.hf`` sets it. None in an exported copy, which transformers itself copies."""

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
    """Key/value heads. None: as many as query heads (MHA). 1: MQA."""
    head_dim: int = 128
    """Features of a head, an even number. MLA and GLA set it to ``qk_rope_head_dim``, as DeepSeek's
    configurations do."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs."""
    max_position_embeddings: int = 8192
    """Longest sequence in training."""
    initializer_range: float = 0.02
    """Standard deviation of newly drawn weights."""
    rms_norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    use_qk_norm: bool = True
    """Apply RMSNorm to each query and key head, after the knock and before RoPE. MLA and GLA
    normalise the latents instead."""
    attention_bias: bool = False
    """Biases in the q, k and v projections (``--add-qkv-bias``). ``o_proj`` has none."""
    attention_dropout: float | int = 0.0
    """Dropout of the attention probabilities in training."""
    rope_parameters: dict | None = None
    """``rope_type``, ``rope_theta`` and ``partial_rotary_factor`` (``--rotary-percent``; 0.5 in
    GTA)."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    use_cache: bool = True
    """Return a cache. It holds keys and knocked values; in GTA the tied states and the rotary half
    of the keys; in MLA and GLA the latent and the rotary key."""

    kv_lora_rank: int | None = None
    """Features of the latent of keys and values, over all latent heads. None: no latent (MHA, MQA,
    GQA, GTA)."""
    q_lora_rank: int | None = None
    """Features of the latent of queries. None: queries without a latent."""
    qk_nope_head_dim: int | None = None
    """MLA and GLA: features of a query or key head without position (``--qk-head-dim``)."""
    qk_rope_head_dim: int | None = None
    """Rotary features of a query or key head in MLA and GLA (``--qk-pos-emb-head-dim``). GTA sets
    it to half of ``head_dim``."""
    v_head_dim: int | None = None
    """MLA and GLA: features of a value head."""

    num_experts: int = 0
    """Routed experts of a sparse layer. 0: every layer is dense."""
    num_experts_per_tok: int = 1
    """Experts per token."""
    moe_intermediate_size: int = 0
    """Features inside one routed expert."""
    mlp_layer_types: list[str] | None = None
    """``"dense"`` or ``"sparse"`` for each layer (``moe_layer_freq``). None: sparse if there are
    experts, otherwise dense."""
    shared_expert_intermediate_size: int = 0
    """Features inside the shared expert (``--moe-shared-expert-intermediate-size``). 0: none."""
    shared_expert_gate: bool = False
    """Scale the shared expert by the sigmoid of one linear output."""
    scoring_func: str = "softmax"
    """``softmax``, or ``sigmoid`` with a correction bias that only affects which experts are
    chosen."""
    norm_topk_prob: bool = True
    """Divide a token's expert weights by their sum. In Megatron, True for ``softmax`` unless
    ``moe_router_pre_softmax`` is set, and for ``sigmoid`` unless ``moe_router_topk`` is 1."""
    routed_scaling_factor: float | int = 1.0
    """Factor on the expert weights (``--moe-router-topk-scaling-factor``)."""
    n_group: int = 1
    """Groups of experts, of equal size (``--moe-router-num-groups``). 1: no groups."""
    topk_group: int = 1
    """Groups from which a token's experts are chosen (``--moe-router-group-topk``)."""
    output_router_logits: bool = False
    """Return the router's logits."""

    kha_query: str | None = None
    """KHA variant on the query heads: ``linear``, ``mlp``, ``gate`` or None."""
    kha_key: str | None = None
    """KHA variant on the key heads."""
    kha_value: str | None = None
    """KHA variant on the value heads; in GTA on the tied state."""
    kha_attention: str | None = None
    """``gta``, ``gla`` or None (MHA, MQA and GQA; MLA if ``kv_lora_rank`` is set)."""
    kha_latent_heads: int = 2
    """Heads of the latent in GLA."""
    kha_init: str = "identity"
    """Initial value of new matrices: ``identity`` (a no-op) or ``random``. No effect on loading."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        for name in [name for name in kwargs if name.startswith("kha_")]:
            setattr(self, name, kwargs.pop(name))
        for name, allowed in KNOWN.items():
            if getattr(self, name) not in allowed:
                names = ", ".join(map(str, allowed))
                raise ValueError(f"Expected {name} in ({names}), got {getattr(self, name)!r}.")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.mlp_layer_types is None:
            kind = "sparse" if self.num_experts else "dense"
            self.mlp_layer_types = [kind] * self.num_hidden_layers
        self._check_fields()
        if self.kv_lora_rank is not None:
            self.head_dim = self.qk_rope_head_dim or 0
        elif self.kha_attention == "gta":
            self.qk_rope_head_dim = self.head_dim // 2
        super().__post_init__(**kwargs)
        self._set_rotary_share()

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        """Write ``config.json`` and the modelling files. Saving a model calls this method."""
        if self.write_code is not None:
            os.makedirs(save_directory, exist_ok=True)
            self.auto_map = self.write_code(save_directory, self)
        super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def mechanisms(self) -> dict[str, Any]:
        """Settings of the head mechanisms other than KHA, by name (``gate``, ``moh``, ...)."""
        own = type(self).__dataclass_fields__
        return {
            name.removeprefix("kha_"): settings
            for name, settings in vars(self).items()
            if name.startswith("kha_") and name not in own and settings is not None
        }

    @property
    def is_plain(self) -> bool:
        """Whether attention is MHA, MQA or GQA, and KHA is the only head mechanism."""
        return not (self.mechanisms or self.kha_attention or self.kv_lora_rank is not None)

    @property
    def qk_head_dim(self) -> int:
        """Features of a query or key head in MLA and GLA, for transformers 5.8 to 5.12."""
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def num_latent_heads(self) -> int:
        """Heads of the latent: more than one only in GLA."""
        return self.kha_latent_heads if self.kha_attention == "gla" else 1

    def _check_fields(self) -> None:
        """Raise ValueError for values that would be ignored or give wrong results."""
        latent, kind = self.kv_lora_rank is not None, self.kha_attention
        if kind is not None and latent != (kind == "gla"):
            raise ValueError(
                "Expected kv_lora_rank with kha_attention='gla' and not with 'gta', got "
                f"kha_attention={kind!r} and kv_lora_rank={self.kv_lora_rank}."
            )
        layers, kinds = self.num_hidden_layers, self.mlp_layer_types or []
        if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
            raise ValueError(
                f"Expected 'dense' or 'sparse' for each of {layers} layers, got mlp_layer_types="
                f"{kinds}."
            )
        chosen, of_group = self.topk_group, self.num_experts // self.n_group
        if self.n_group > 1 and not chosen <= self.num_experts_per_tok <= chosen * of_group:
            raise ValueError(
                f"Expected num_experts_per_tok from {chosen} to {chosen * of_group} with "
                f"topk_group={chosen} groups of {of_group} experts, got {self.num_experts_per_tok}."
            )

    def _set_rotary_share(self) -> None:
        """Set ``partial_rotary_factor`` of GTA, MLA and GLA."""
        if self.kha_attention != "gta" and self.kv_lora_rank is None:
            return
        share = 0.5 if self.kha_attention == "gta" else 1.0
        # A new dictionary, because the caller may use the present one.
        self.rope_parameters = {"partial_rotary_factor": share} | (self.rope_parameters or {})
        if (given := self.rope_parameters["partial_rotary_factor"]) != share:
            raise ValueError(
                f"Expected partial_rotary_factor={share} with this attention, got {given}. Omit it."
            )


__all__ = ["KHAModelConfig"]
