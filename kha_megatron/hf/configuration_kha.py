"""KHA model configuration"""

import os
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

_KHA_VARIANTS = (None, "linear", "mlp", "gate")
_ALLOWED_VALUES = {
    "kha_query": _KHA_VARIANTS,
    "kha_key": _KHA_VARIANTS,
    "kha_value": _KHA_VARIANTS,
    "kha_init": ("identity", "random"),
    "kha_attention": (None, "gta", "gla"),
    "kha_folded": (None, ["value"], ["value", "output"]),
    "scoring_func": ("softmax", "sigmoid"),
    "router_dtype": ("float32", "auto"),
}


@strict
class KHAModelConfig(PreTrainedConfig):
    """
    This is the configuration class to store the configuration of a [`KHAModel`]. The defaults yield
    a dense decoder without Knocking-Heads Attention (KHA,
    https://huggingface.co/papers/2510.23052).

    Arguments that are not documented here are the same as in [`Glm4MoeConfig`] and
    [`DeepseekV3Config`]. Other head mechanisms are configured with dictionaries, e.g.
    `kha_gate={"output": "element"}`.

    Args:
        head_dim (`int`, *optional*, defaults to 128):
            Dimension of each head (must be even). For MLA and GLA, this is set to
            `qk_rope_head_dim`.
        use_qk_norm (`bool`, *optional*, defaults to `True`):
            Whether to normalize queries and keys between KHA and RoPE. For MLA and GLA, this
            enables the norms of the latents instead.
        zero_centered_norms (`bool`, *optional*, defaults to `False`):
            Whether norms multiply by `1 + weight`, as in Qwen3-Next and with `--apply-layernorm-1p`
            in Megatron. Not supported for GLA.
        kv_lora_rank (`int`, *optional*):
            Rank of the latent for keys and values (total over all latent heads). The model uses
            MLA or GLA if this is set.
        mlp_layer_types (`list[str]`, *optional*):
            MLP type of each layer, `"dense"` or `"sparse"`. Defaults to all sparse if `num_experts`
            is positive, else to all dense.
        shared_expert_intermediate_size (`int`, *optional*, defaults to 0):
            Intermediate size of the shared expert (0 for no shared expert).
        shared_expert_gate (`bool`, *optional*, defaults to `False`):
            Whether to use a sigmoid gate for the output of the shared expert.
        scoring_func (`str`, *optional*, defaults to `"softmax"`):
            Score function of the router, `"softmax"` or `"sigmoid"`. The latter also adds a
            correction bias for selecting the experts (not for weighting them).
        norm_topk_prob (`bool`, *optional*, defaults to `True`):
            Whether to normalize the weights of the selected experts. Set it to `False` for models
            trained with `--moe-router-pre-softmax` in Megatron.
        router_dtype (`str`, *optional*, defaults to `"float32"`):
            `"float32"` to compute the router in float32, as with `--moe-router-dtype fp32` in
            Megatron. `"auto"` to round its logits and weights to the dtype of the model, as in
            Qwen3-MoE.
        kha_query, kha_key, kha_value (`str`, *optional*):
            KHA variant for the query, key and value heads, one of `"linear"`, `"mlp"` and `"gate"`.
            For GTA, use `kha_value` to apply KHA to the tied state.
        kha_folded (`list[str]`, *optional*):
            Projections that contain the matrices of KHA on the values: `["value"]` or
            `["value", "output"]`. Use `kha-megatron convert fold` to get such a model.
        kha_attention (`str`, *optional*):
            Set this to `"gta"` or `"gla"` to use GTA or GLA instead of GQA or MLA.
        kha_latent_heads (`int`, *optional*, defaults to 2):
            Number of latent heads (GLA only).
        kha_init (`str`, *optional*, defaults to `"identity"`):
            How to initialize KHA, `"identity"` or `"random"`.
        kha_providers (`dict[str, str]`, *optional*):
            Package or file of each head mechanism that is not part of kha-megatron.

    Example:

    ```python
    >>> config = KHAModelConfig(num_hidden_layers=2, kha_value="mlp")
    >>> model = KHAForCausalLM(config)
    ```
    """

    model_type = "kha"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    # The expert kernels in transformers use this name.
    attribute_map = {"num_local_experts": "num_experts"}  # noqa: RUF012

    # The plan for attention depends on its type and is added in `KHAModel`.
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
    """Set to `write_modelling_files` by `kha_megatron.hf`. Stays `None` in exported models, because
    transformers copies their files by itself."""

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_qk_norm: bool = True
    zero_centered_norms: bool = False
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True

    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    num_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    mlp_layer_types: list[str] | None = None
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    router_dtype: str = "float32"
    routed_scaling_factor: float | int = 1.0
    n_group: int = 1
    topk_group: int = 1
    output_router_logits: bool = False

    kha_query: str | None = None
    kha_key: str | None = None
    kha_value: str | None = None
    kha_folded: list[str] | None = None
    kha_attention: str | None = None
    kha_latent_heads: int = 2
    kha_init: str = "identity"
    kha_providers: dict[str, str] | None = None

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        # Settings of head mechanisms that have no field of their own.
        for name in list(kwargs):
            if name.startswith("kha_"):
                setattr(self, name, kwargs.pop(name))
        for name, allowed in _ALLOWED_VALUES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}.")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.mlp_layer_types is None:
            mlp_type = "sparse" if self.num_experts else "dense"
            self.mlp_layer_types = [mlp_type] * self.num_hidden_layers
        self._check_attention()
        self._check_experts()
        if self.kv_lora_rank is not None:
            self.head_dim = self.qk_rope_head_dim or 0
        elif self.kha_attention == "gta":
            self.qk_rope_head_dim = self.head_dim // 2
        super().__post_init__(**kwargs)
        self._set_rotary_share()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *args,
        **kwargs,
    ) -> None:
        """Same as the parent method, but also saves the modeling files."""
        if self.write_code is not None:
            os.makedirs(save_directory, exist_ok=True)
            self.auto_map = self.write_code(save_directory, self)
        super().save_pretrained(save_directory, *args, **kwargs)

    @property
    def mechanisms(self) -> dict[str, Any]:
        """Settings of all head mechanisms other than KHA by name, e.g. `{"gate": {...}}`."""
        fields = type(self).__dataclass_fields__
        mechanisms = {}
        for name, settings in vars(self).items():
            is_mechanism = name.startswith("kha_") and name not in fields
            if is_mechanism and settings is not None:
                mechanisms[name.removeprefix("kha_")] = settings
        return mechanisms

    @property
    def is_plain(self) -> bool:
        """Whether the model can use the basic `KHAAttention` class."""
        return not (self.mechanisms or self.kha_attention or self.kv_lora_rank is not None)

    @property
    def qk_head_dim(self) -> int:
        # Needed for MLA in transformers 5.8 to 5.12.
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def num_latent_heads(self) -> int:
        return self.kha_latent_heads if self.kha_attention == "gla" else 1

    def _check_attention(self) -> None:
        is_latent = self.kv_lora_rank is not None
        is_gla = self.kha_attention == "gla"
        if self.kha_attention is not None and is_latent != is_gla:
            raise ValueError(
                "GLA requires `kv_lora_rank` and GTA does not support it, got kha_attention="
                f"{self.kha_attention!r} and kv_lora_rank={self.kv_lora_rank}."
            )
        if self.zero_centered_norms and is_gla:
            raise ValueError("GLA does not support `zero_centered_norms`.")
        if is_latent and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"MLA and GLA require num_key_value_heads={self.num_attention_heads}, as many as "
                f"query heads, got {self.num_key_value_heads}."
            )
        self._check_multiple("num_attention_heads", self.num_key_value_heads)
        if is_gla:
            self._check_multiple("num_attention_heads", self.kha_latent_heads)
            self._check_multiple("kv_lora_rank", self.kha_latent_heads)
        if self.kha_attention == "gta":
            self._check_multiple("head_dim", 4)  # RoPE rotates pairs of the first half
        self._check_folding()

    def _check_multiple(self, name: str, divisor: int | None) -> None:
        value = getattr(self, name)
        if not divisor or value % divisor:
            raise ValueError(f"`{name}` must be a multiple of {divisor}, got {value}.")

    def _check_folding(self) -> None:
        if self.kha_folded is None:
            return
        if self.kv_lora_rank is not None:
            raise ValueError(f"MLA and GLA do not support kha_folded={self.kha_folded}.")
        if self.kha_attention == "gta" and "output" in self.kha_folded:
            raise ValueError(
                f"GTA does not support kha_folded={self.kha_folded}, because keys contain values. "
                "Use kha_folded=['value']."
            )
        variants = {
            "value": ("mlp", "gate"),
            "output": ("mlp",),
        }
        for projection in self.kha_folded:
            if self.kha_value not in variants[projection]:
                raise ValueError(
                    f"kha_folded={self.kha_folded} is not supported with kha_value="
                    f"{self.kha_value!r}, expected one of {variants[projection]}."
                )

    def _check_experts(self) -> None:
        layers = self.num_hidden_layers
        mlp_types = self.mlp_layer_types or []
        if len(mlp_types) != layers or not set(mlp_types) <= {"dense", "sparse"}:
            raise ValueError(
                f"Invalid `mlp_layer_types` for a model with {layers} layers: {mlp_types}."
            )
        if "sparse" not in mlp_types:
            return
        if self.moe_intermediate_size < 1:
            raise ValueError("Models with experts require `moe_intermediate_size`.")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"`num_experts_per_tok` must be between 1 and num_experts={self.num_experts}, got "
                f"{self.num_experts_per_tok}."
            )
        if self.n_group == 1:
            return
        self._check_multiple("num_experts", self.n_group)
        group_size = self.num_experts // self.n_group
        minimum = self.topk_group
        maximum = self.topk_group * group_size
        if not minimum <= self.num_experts_per_tok <= maximum:
            raise ValueError(
                f"`num_experts_per_tok` must be between {minimum} and {maximum} with "
                f"topk_group={self.topk_group} groups of {group_size} experts, got "
                f"{self.num_experts_per_tok}."
            )

    def _set_rotary_share(self) -> None:
        if self.kha_attention != "gta" and self.kv_lora_rank is None:
            return
        share = 0.5 if self.kha_attention == "gta" else 1.0
        # Make a copy, because the dictionary belongs to the caller.
        self.rope_parameters = {"partial_rotary_factor": share} | (self.rope_parameters or {})
        partial_rotary_factor = self.rope_parameters["partial_rotary_factor"]
        if partial_rotary_factor != share:
            raise ValueError(
                f"partial_rotary_factor must be {share} with this attention, got "
                f"{partial_rotary_factor}."
            )


__all__ = ["KHAModelConfig"]
