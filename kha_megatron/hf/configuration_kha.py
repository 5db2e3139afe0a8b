"""Configuration of the ``kha`` architecture: what Megatron trained, in Hugging Face terms.

One class describes dense and mixture-of-experts decoders, because a Megatron run mixes both in one
model (``moe_layer_freq``), with any attention of the family: MHA, MQA and GQA; GTA; MLA and GLA.
Fields that stock transformers models share keep their stock names, so that other tools read them.
"""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from kha_megatron.config import KHAConfig, mechanism_types
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadFacts, HeadSizes

SCORE_FUNCTIONS = ("softmax", "sigmoid")

# What all heads share sees only its rank's heads, so its gradient is a partial sum there. As with
# transformers' own norms of q and k, it is right for one backward a step: 5.23 sums what has
# accumulated anew at every further one.
_SHARED_BY_HEADS = "replicated_with_grad_allreduce"

# Of its output, what is rotary (here all of it for GTA) goes to the heads of every rank.
_SHARED_KEY = "mla_kv_a_proj"

_TP_PLANS = {
    "gqa": {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "q_norm": _SHARED_BY_HEADS,
        "k_norm": _SHARED_BY_HEADS,
        "o_proj": "rowwise",
    },
    "gta": {
        "q_proj": "colwise",
        "kv_proj": "colwise",
        "k_rope_proj": _SHARED_KEY,
        "q_norm": _SHARED_BY_HEADS,
        "k_norm": _SHARED_BY_HEADS,
        "o_proj": "rowwise",
    },
    "mla": {
        "q_proj": "colwise",
        "q_b_proj": "colwise",
        "kv_a_proj_with_mqa": _SHARED_KEY,
        "kv_b_proj": "colwise",
        "o_proj": "rowwise",
    },
    # a rank's queries would need those rows of one latent head that transformers cannot cut out
    "gla": {},
}
"""How the attention of each kind is split over tensor-parallel ranks by transformers."""


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

    # `__post_init__` adds the rules of the attention and the matrices that this configuration has.
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

    write_code: ClassVar[Any] = None  # a static function of a folder
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
    """Features of a head; an even number. In MLA and GLA it is ``qk_rope_head_dim``, as in
    DeepSeek's configurations, whatever is given here."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs."""
    max_position_embeddings: int = 8192
    """Longest sequence of the training."""
    initializer_range: float = 0.02
    """Standard deviation of newly drawn weights."""
    rms_norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    use_qk_norm: bool = True
    """RMSNorm over each query and key head, after the knock and before RoPE. In MLA and GLA over
    the latents instead, before they are expanded."""
    attention_bias: bool = False
    """Biases in the q, k and v projections (Megatron's ``--add-qkv-bias``); never in ``o_proj``."""
    attention_dropout: float | int = 0.0
    """Dropout of the attention probabilities while training."""
    rope_parameters: dict | None = None
    """``rope_type``, ``rope_theta``, and ``partial_rotary_factor`` (``--rotary-percent``), which is
    0.5 in GTA."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    use_cache: bool = True
    """Whether ``forward`` keeps for decoding what the attention needs of each token: keys and
    (knocked) values; in GTA the tied states and the rotary half of the keys; in MLA and GLA the
    latent and the rotary key."""

    kv_lora_rank: int | None = None
    """Features of the latent that keys and values are expanded from, of all latent heads together;
    None for attention without a latent (MHA, MQA, GQA, GTA)."""
    q_lora_rank: int | None = None
    """Features of the latent that queries are expanded from; None for queries without one."""
    qk_nope_head_dim: int | None = None
    """In MLA and GLA, features of a query or key head without position (``--qk-head-dim``)."""
    qk_rope_head_dim: int | None = None
    """Rotary features of a query or key head in MLA and GLA (``--qk-pos-emb-head-dim``); in GTA it
    is half of ``head_dim``."""
    v_head_dim: int | None = None
    """In MLA and GLA, features of a value head."""

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
    n_group: int = 1
    """Equal groups of experts (``--moe-router-num-groups``); 1 for no groups."""
    topk_group: int = 1
    """Groups that a token's experts come from (``--moe-router-group-topk``)."""
    output_router_logits: bool = False
    """Whether ``forward`` returns the router's logits."""

    kha_query: str | None = None
    """Variant on the query heads: ``linear``, ``mlp``, ``gate`` or None."""
    kha_key: str | None = None
    """Variant on the key heads."""
    kha_value: str | None = None
    """Variant on the value heads; in GTA on the tied state."""
    kha_attention: str | None = None
    """``gta`` or ``gla``; None for MHA, MQA and GQA, and with ``kv_lora_rank`` for MLA."""
    kha_latent_heads: int = KHAConfig.latent_heads
    """Heads of the latent in GLA."""
    kha_init: str = KHAConfig.init
    """Start of newly made matrices: ``identity`` (a no-op) or ``random``. No effect on loading."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        mechanisms = {f"kha_{name}" for name in mechanism_types()}
        for name in [name for name in kwargs if name.startswith("kha_")]:
            if name not in mechanisms:
                raise ConfigError(f"{name}={kwargs[name]!r} is of another version of kha-megatron")
            setattr(self, name, kwargs.pop(name))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.mlp_layer_types is None:
            kind = "sparse" if self.num_experts else "dense"
            self.mlp_layer_types = [kind] * self.num_hidden_layers
        for mechanism in self.kha.others:  # which refuses unknown words
            setattr(self, f"kha_{mechanism.name}", mechanism.to_dict())
        if problem := next(_problems(self), None):
            raise ConfigError(problem)
        if self.kv_lora_rank is not None:
            self.head_dim = self.qk_rope_head_dim or 0
        elif self.kha_attention == "gta":
            self.qk_rope_head_dim = self.head_dim // 2
        self.base_model_tp_plan = type(self).base_model_tp_plan | self._attention_tp_plan()
        super().__post_init__(**kwargs)
        self._settle_rotary_share()

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
        return KHAConfig.recorded(vars(self)) or KHAConfig()

    @property
    def head_sizes(self) -> HeadSizes:
        """What the head mechanisms act on."""
        latent = self.kv_lora_rank is not None
        return HeadSizes(
            query_heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=(latent and self.qk_nope_head_dim) or self.head_dim,
            value_dim=self.v_head_dim if latent else None,
            hidden_size=self.hidden_size,
            latent=latent,
        )

    @property
    def qk_head_dim(self) -> int:
        """Features of a query or key head in MLA and GLA, which the parent of their attention asks
        for in transformers 5.8 to 5.12."""
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def num_latent_heads(self) -> int:
        """Heads of the latent: more than one in GLA only."""
        return self.kha_latent_heads if self.kha_attention == "gla" else 1

    def _attention_tp_plan(self) -> dict[str, str]:
        kind = self.kha_attention or ("gqa" if self.kv_lora_rank is None else "mla")
        rules = dict(_TP_PLANS[kind])
        kha, sizes = self.kha, self.head_sizes
        if kind == "mla":
            del rules["q_proj" if self.q_lora_rank is not None else "q_b_proj"]
        for made in (projection for mechanism in kha.others for projection in mechanism.makes):
            del rules[f"{made[0]}_proj"]
        if kha.talking is not None:  # which need the logits of all heads
            rules.clear()
        if rules:  # else every rank has all heads
            rules |= {row.hf: "colwise" for row in kha.rows(sizes)}
            for tensor in kha.tensors(sizes):
                rule = _SHARED_BY_HEADS
                if tensor.reads_input:  # `_read_input` sums the gradient of what heads share
                    rule = "colwise" if tensor.per_head else "replicate"
                for name in tensor.hf_names:
                    rules[name.removeprefix("self_attn.").removesuffix(".weight")] = rule
        return {f"layers.*.self_attn.{name}": rule for name, rule in rules.items()}

    def _settle_rotary_share(self) -> None:
        """Fill in the one share of a head that GTA rotates; refuse another, and any in MLA."""
        if self.kha_attention != "gta" and self.kv_lora_rank is None:
            return
        whole = 0.5 if self.kha_attention == "gta" else 1.0
        # a new one, because this one may be the caller's
        self.rope_parameters = {"partial_rotary_factor": whole} | (self.rope_parameters or {})
        share = self.rope_parameters["partial_rotary_factor"]
        if share != whole:
            raise ConfigError(
                f"partial_rotary_factor={share} with kha_attention={self.kha_attention!r} and "
                f"kv_lora_rank={self.kv_lora_rank}, whose share is {whole}: leave it out"
            )


def _problems(config: Any) -> Iterator[str]:
    """Why no model can be built from a ``KHAModelConfig``, before any tensor is made: sizes and
    switches that contradict, each in one line with the fields.

    Raises:
        ConfigError: a mechanism that the attention cannot carry.
    """
    kind = _attention_problems if config.kv_lora_rank is None else _latent_problems
    yield from kind(config)
    layers, kinds = config.num_hidden_layers, config.mlp_layer_types
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        yield (
            f"mlp_layer_types={kinds} must name 'dense' or 'sparse' for each of the {layers} layers"
        )
    if "sparse" in kinds:
        yield from _expert_problems(config)


def _attention_problems(config: Any) -> Iterator[str]:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if groups < 1 or heads % groups:
        yield (
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}: "
            "every key/value head must serve the same number of query heads"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        yield f"head_dim={config.head_dim} is not a positive even number, which RoPE needs"
    if config.kha_attention == "gla":
        yield "kha_attention='gla' expands a latent: give kv_lora_rank"
    if config.q_lora_rank is not None:
        yield f"q_lora_rank={config.q_lora_rank} without kv_lora_rank: give both or none"
    if config.kha_attention == "gta" and config.head_dim % 4:
        yield (
            f"head_dim={config.head_dim} is no multiple of 4: grouped-tied attention rotates "
            "half of a head"
        )
    if config.kha_attention == "gta" and config.attention_bias:
        yield "attention_bias=True with kha_attention='gta', which has no biases: remove one"
    turned = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) * config.head_dim
    facts = HeadFacts(
        qk_norm=config.use_qk_norm,
        query_heads=heads,
        layers=config.num_hidden_layers,
        rotary_features=int(turned),
    )
    config.kha.check(facts)
    if config.kha.collaborative is not None and config.attention_bias:
        yield "attention_bias=True with collaborative heads, which have no biases: remove one"


def _latent_problems(config: Any) -> Iterator[str]:
    heads, groups = config.num_attention_heads, config.num_latent_heads
    if config.kha_attention == "gta":
        yield "kha_attention='gta' with kv_lora_rank are two kinds of attention: remove one"
    config.kha.check(
        HeadFacts(multi_latent=True, query_heads=heads, layers=config.num_hidden_layers)
    )
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if (getattr(config, name) or 0) < 1:
            yield f"{name}={getattr(config, name)} with kv_lora_rank: it must be at least 1"
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        yield f"q_lora_rank={config.q_lora_rank}: it must be at least 1, or None"
    if config.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim={config.qk_rope_head_dim} is odd, and RoPE turns pairs"
    if config.num_key_value_heads != heads:
        yield (
            f"num_key_value_heads={config.num_key_value_heads} with kv_lora_rank: every one of "
            f"the {heads} query heads has a key: leave it out"
        )
    if config.kv_lora_rank % groups or heads % groups:
        yield (
            f"kha_latent_heads={groups} divides kv_lora_rank={config.kv_lora_rank} and "
            f"num_attention_heads={heads} into no equal parts"
        )
    if config.attention_bias:
        yield "attention_bias=True with kv_lora_rank: remove one"


def _expert_problems(config: Any) -> Iterator[str]:
    experts, taken = config.num_experts, config.num_experts_per_tok
    if not 1 <= taken <= experts:
        yield f"num_experts_per_tok={taken} must lie between 1 and num_experts={experts}"
    groups, chosen = config.n_group, config.topk_group
    if not 1 <= chosen <= groups or experts % groups:
        yield (
            f"n_group={groups} and topk_group={chosen} with num_experts={experts}: groups must be "
            "equal, and a token's among them"
        )
    most = chosen * (experts // groups)
    if groups > 1 and not chosen <= taken <= most:
        yield (
            f"num_experts_per_tok={taken} must lie between topk_group={chosen} and the experts of "
            f"so many groups, {most}"
        )
    if config.moe_intermediate_size < 1:
        yield f"moe_intermediate_size={config.moe_intermediate_size} must be at least 1"
    if config.scoring_func not in SCORE_FUNCTIONS:
        yield (
            f"unknown scoring_func {config.scoring_func!r}: "
            f"choose one of {', '.join(SCORE_FUNCTIONS)}"
        )
    if config.shared_expert_gate and not config.shared_expert_intermediate_size:
        yield "shared_expert_gate=True needs a shared_expert_intermediate_size above 0"


__all__ = ["KHAModelConfig"]
