"""The description of a model, with the same names and defaults as in Megatron."""

import ast
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self

from kha_megatron.errors import ConfigError, show_value
from kha_megatron.heads import HeadFacts, HeadSizes, HeadTensor
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.fields import (
    MAX_EXPERTS,
    MAX_LAYERS,
    Field,
    as_flag,
    declared_fields,
    flag,
)
from kha_megatron.model.pattern import LayerPattern
from kha_megatron.model.qkv import QKVLayout
from kha_megatron.model.rope import RopeScaling

AttentionType = Literal["gqa", "mla", "gta", "gla"]
FoldedInto = Literal["value", "output"]


def parse_layer_frequency(text: str) -> int | tuple[int, ...]:
    """Parse ``--moe-layer-freq``, e.g. ``2`` or ``[0]*1+[1]*3``.

    Raises:
        ValueError: With the expected format as its message.
    """
    try:
        tree = ast.parse(text, mode="eval")
        frequency = _evaluate_lists(tree.body)
        if isinstance(frequency, int):
            is_valid = frequency != 0
        else:
            frequency = tuple(frequency)
            is_valid = set(frequency) <= {0, 1}
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        is_valid = False
    if not is_valid:
        raise ValueError("a positive integer or lists of 0 and 1 such as [0]*1+[1]*3")
    return frequency


def _evaluate_lists(node: ast.AST) -> Any:
    """Evaluate sums and multiples of lists and integers. Raises ValueError for other syntax."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_evaluate_lists(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate_lists(left) + _evaluate_lists(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(number))):
            if number <= MAX_LAYERS:
                return _evaluate_lists(left) * number
    raise ValueError


def is_moe_layer(frequency: int | Sequence[int], layer: int) -> bool:
    """Whether a layer (from 0) has experts, according to ``--moe-layer-freq``."""
    if isinstance(frequency, int):
        return layer % frequency == 0
    return bool(frequency[layer])


def _format_layer_frequency(frequency: int | Sequence[int]) -> str:
    if isinstance(frequency, int):
        return str(frequency)
    runs = []
    for value, equal_layers in itertools.groupby(frequency):
        count = len(list(equal_layers))
        runs.append(f"[{value}]*{count}")
    return f"({'+'.join(runs)})"


KNOCKED_VALUE = "knock_value"
"""Name of the parameter with the KHA matrices for the values."""

_TRAINING_ONLY_SETTINGS = ("start", "balance", "balance_scale", "anneal")
"""Settings of head mechanisms that do not change the outputs of a trained model."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Config of a decoder-only transformer. Fields are None if they are unknown or do not apply.

    For MLA and GLA, ``kv_channels`` is the value head dim. Layers for multi-token prediction (MTP)
    are counted after the decoder layers.

    Raises:
        ConfigError: If the head mechanisms do not support the model.
    """

    num_layers: int | None = flag(hf="num_hidden_layers", maximum=MAX_LAYERS)
    hidden_size: int = flag(hf="hidden_size")
    ffn_hidden_size: int | None = flag(hf="intermediate_size")
    num_attention_heads: int = flag(hf="num_attention_heads")
    num_query_groups: int = flag(hf="num_key_value_heads")
    """Number of KV heads. For MHA this equals the number of query heads (Megatron ignores its
    argument unless ``group_query_attention`` is set)."""
    group_query_attention: bool = flag(False, attribute=None)
    kv_channels: int = flag(hf="head_dim")
    vocab_size: int | None = flag(None, attribute=None, hf="vocab_size")
    """Without padding."""
    make_vocab_size_divisible_by: int = flag(128, attribute=None)
    padded_vocab_size: int | None = flag(None, attribute=None)
    """Overrides the padded vocab size that we'd compute otherwise."""
    max_position_embeddings: int | None = flag(
        None,
        attribute=None,
        hf="max_position_embeddings",
    )
    position_embedding_type: str = flag("learned_absolute", attribute=None)
    rotary_base: float = flag(10000)
    rotary_percent: float = flag(1.0)
    scaling: RopeScaling | None = None
    """RoPE scaling. Not known from a command line."""
    normalization: str = flag("LayerNorm")
    layernorm_epsilon: float = flag(
        1e-5,
        "--norm-epsilon",
        argument="layernorm_epsilon",
        hf="rms_norm_eps",
    )
    layernorm_zero_centered_gamma: bool = flag(
        False,
        "--apply-layernorm-1p",
        argument="layernorm_zero_centered_gamma",
        hf="zero_centered_norms",
    )
    """Norms multiply by ``1 + weight`` (computed in float32)."""
    qk_layernorm: bool = flag(False, hf="use_qk_norm")
    qk_l2_norm: bool = flag(False)
    swiglu: bool = flag(False, attribute="gated_linear_unit")
    add_bias_linear: bool = flag(
        True,
        "--disable-bias-linear",
        argument="add_bias_linear",
    )
    add_qkv_bias: bool = flag(False, hf="attention_bias")
    attention_output_gate: bool = flag(False)
    untie_embeddings_and_output_weights: bool = flag(False, attribute=None)
    attention_dropout: float = flag(0.1, hf="attention_dropout")
    hidden_dropout: float = flag(0.1)
    init_method_std: float = flag(0.02, hf="initializer_range")

    multi_latent_attention: bool = flag(False)
    q_lora_rank: int | None = flag(None, hf="q_lora_rank")
    kv_lora_rank: int = flag(32, hf="kv_lora_rank")
    """Size of the KV latent (all latent heads together)."""
    qk_head_dim: int = flag(128, hf="qk_nope_head_dim")
    qk_pos_emb_head_dim: int = flag(64, hf="qk_rope_head_dim")
    v_head_dim: int = flag(128, hf="v_head_dim")
    mla_down_proj_fusion: bool = flag(False)
    transformer_impl: str = flag("transformer_engine")

    num_experts: int | None = flag(
        None,
        attribute="num_moe_experts",
        hf="num_experts",
        maximum=MAX_EXPERTS,
    )
    moe_layer_freq: int | tuple[int, ...] = flag(
        1,
        parser=parse_layer_frequency,
        formatter=_format_layer_frequency,
    )
    """Either an interval, or a list with 0 (dense) or 1 (MoE) for each layer. In models that are
    converted, this is always a list. See :attr:`moe_layers`."""
    moe_ffn_hidden_size: int | None = flag(None, hf="moe_intermediate_size")
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        hf="shared_expert_intermediate_size",
    )
    moe_shared_expert_gate: bool = flag(False, hf="shared_expert_gate")
    moe_router_topk: int = flag(2, hf="num_experts_per_tok")
    normalizes_topk: bool = True
    """Whether the top-k router weights sum to 1 (``norm_topk_prob`` in Hugging Face). Not known
    from a command line."""
    moe_router_topk_scaling_factor: float | None = flag(
        None,
        hf="routed_scaling_factor",
    )
    moe_router_num_groups: int | None = flag(None, hf="n_group")
    """Number of expert groups for group-limited routing (DeepSeek-V3)."""
    moe_router_group_topk: int | None = flag(None, hf="topk_group")
    moe_router_score_function: str = flag("softmax", hf="scoring_func")
    moe_router_enable_expert_bias: bool = flag(False)
    moe_router_bias_update_rms: bool = flag(False, attribute=None)
    moe_router_load_balancing_type: tuple[str, ...] = flag(("aux_loss",))
    moe_router_dtype: str | None = flag(None)
    moe_token_dispatcher_type: str = flag("allgather")
    mtp_num_layers: int | None = flag(None, minimum=0, maximum=MAX_LAYERS)
    flash_decode: bool = flag(False)
    hybrid_layer_pattern: str | None = flag(None, attribute=None)
    gpt_model: bool = flag(False, attribute=None)

    fp8: str | None = flag(None, "--fp8-format", argument="fp8")
    fp8_recipe: str = flag("delayed")

    kha: HeadsConfig = field(default_factory=HeadsConfig)
    """Also includes Megatron's own output gate if ``attention_output_gate`` is set."""
    kha_folded: tuple[FoldedInto, ...] = ()
    """Projections that contain matrices of ``mlp`` or ``gate`` on the values, see
    :mod:`kha_megatron.conversion.folding`. Only Hugging Face models can be folded."""

    def __post_init__(self) -> None:
        kha = self.kha.with_output_gate(self.attention_output_gate)
        self._check_layer_frequency()
        # Megatron's own output gate is not available for MLA
        has_stock_gate = kha.has_output_gate and not self.multi_latent_attention
        object.__setattr__(self, "kha", kha)
        object.__setattr__(self, "attention_output_gate", has_stock_gate)
        kha.check(self.head_facts)

    def _check_layer_frequency(self) -> None:
        frequency = self.moe_layer_freq
        values = frequency if isinstance(frequency, tuple) else (frequency,)
        has_integers = all(type(value) is int for value in values)
        if frequency == 0 or not has_integers:
            raise ConfigError(
                "--moe-layer-freq must be a positive integer or a list of 0 and 1, got "
                f"{show_value(frequency)}."
            )
        if not isinstance(frequency, tuple) or not self.num_experts or self.num_layers is None:
            return
        if len(frequency) != self.num_layers:
            raise ConfigError(
                f"--moe-layer-freq has {len(frequency)} values, but the model has "
                f"{self.num_layers} layers. Pass one value for each layer."
            )

    @property
    def attention_type(self) -> AttentionType:
        """``gqa`` also includes MHA and MQA."""
        if self.kha.attention is not None:
            return self.kha.attention
        return "mla" if self.multi_latent_attention else "gqa"

    @property
    def head_dim(self) -> int:
        """Head dim of queries and keys, as seen by KHA (no rotary part in MLA)."""
        return self.qk_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def normed_dim(self) -> int:
        """Head dim of queries and keys in QK-norm."""
        for mechanism in self.kha.mechanisms:
            if "key" in mechanism.own_projections:
                return mechanism.own_projections["key"]
        return self.head_dim

    @property
    def head_sizes(self) -> HeadSizes:
        """Head sizes before they are divided by TP."""
        is_latent = self.multi_latent_attention
        return HeadSizes(
            query_heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads if is_latent else self.num_query_groups,
            head_dim=self.head_dim,
            value_dim=self.v_head_dim if is_latent else None,
            hidden_size=self.hidden_size,
            latent=is_latent,
        )

    @property
    def head_facts(self) -> HeadFacts:
        """What head mechanisms need to know about the model for their own checks."""
        # Megatron ignores --rotary-percent for YaRN
        rotary_fractions = {"rope": self.rotary_percent, "yarn": 1.0}
        rotary_fraction = rotary_fractions.get(self.position_embedding_type, 0.0)
        is_latent = self.multi_latent_attention
        return HeadFacts(
            multi_latent=is_latent,
            attention=self.kha.attention,
            qk_norm=self.qk_layernorm or self.qk_l2_norm,
            flash_decode=self.flash_decode,
            rotary_features=0 if is_latent else int(self.kv_channels * rotary_fraction),
            predictions=self.predictions if self.gpt_model else 0,
            layers=self.num_layers or 0,
            query_heads=self.num_attention_heads,
        )

    @cached_property
    def head_tensors(self) -> tuple[HeadTensor, ...]:
        """Parameters that the head mechanisms add to each layer."""
        parameters: list[HeadTensor] = []
        for parameter in self.kha.tensors(self.head_sizes):
            if self.kha_folded and parameter.name == KNOCKED_VALUE:
                parameters += self._without_folded_matrices(parameter)
            else:
                parameters.append(parameter)
        return tuple(parameters)

    def _without_folded_matrices(self, knock: HeadTensor) -> list[HeadTensor]:
        """Return the parameter with only those matrices of the values that are not folded.

        The first matrices of ``mlp`` and ``gate`` are folded into the value projection, the last
        one of ``mlp`` (``down``) into the output projection.
        """
        has_down_matrix = self.kha.variants.get("value") == "mlp"
        if not has_down_matrix or "output" in self.kha_folded:
            return []
        _, *matrix_shape = knock.shape
        down = replace(
            knock,
            shape=(1, *matrix_shape),
            initial=knock.initial[-1:],
            matrices=knock.matrices[-1:],
        )
        return [down]

    @property
    def latent_heads(self) -> int:
        """Number of latent KV heads (1 unless we use GLA)."""
        return self.kha.latent_heads if self.kha.attention == "gla" else 1

    @property
    def tied_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def norm_parameters(self) -> int:
        """Parameters per feature. LayerNorm has a bias, RMSNorm does not."""
        return 1 if self.normalization == "RMSNorm" else 2

    # The following properties have the values of fields, but are never None.

    @property
    def layers(self) -> int:
        assert self.num_layers is not None
        return self.num_layers

    @property
    def predictions(self) -> int:
        """Number of additional tokens to predict (MTP)."""
        return self.mtp_num_layers or 0

    @property
    def vocabulary(self) -> int:
        """Vocab size without padding."""
        assert self.vocab_size is not None
        return self.vocab_size

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding, i.e. the padded vocab size."""
        assert self.padded_vocab_size is not None
        return self.padded_vocab_size

    @property
    def max_length(self) -> int:
        assert self.max_position_embeddings is not None
        return self.max_position_embeddings

    @property
    def query_rank(self) -> int:
        """Size of compressed queries in MLA, 0 if they are not compressed."""
        return self.q_lora_rank or 0

    @property
    def dense_width(self) -> int:
        """FFN size of dense layers."""
        return self.ffn_hidden_size or 0

    @property
    def experts(self) -> int:
        return self.num_experts or 0

    @property
    def expert_width(self) -> int:
        """FFN size of each routed expert."""
        return self.moe_ffn_hidden_size or 0

    @property
    def shared_width(self) -> int:
        """FFN size of all shared experts together."""
        return self.moe_shared_expert_intermediate_size or 0

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts. MTP layers are like the last layer."""
        if not self.num_experts:
            return False
        if self.num_layers is not None:
            layer = min(layer, self.num_layers - 1)
        return is_moe_layer(self.moe_layer_freq, layer)

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same parameters. GPTModel stacks them in this case."""
        if not self.num_experts:
            return True
        return all(self.moe_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """For each layer, whether it has experts (0 or 1)."""
        return tuple(int(self.is_moe(layer)) for layer in range(self.layers))

    def layer_pattern(self, stages: Iterable[int]) -> LayerPattern:
        """Describe the layers of a hybrid model.

        Args:
            stages: Number of layers in each pipeline stage.
        """
        return LayerPattern(
            moe=self.moe_layers,
            stages=tuple(stages),
            latent=self.multi_latent_attention,
            predictions=self.predictions,
        )

    @property
    def has_dense_layers(self) -> bool:
        if not self.num_experts:
            return True
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            # see is_moe: the first layer always has experts
            return frequency > 1 and self.num_layers != 1
        return not all(frequency)

    @property
    def qkv(self) -> QKVLayout:
        """QKV layout (not for MLA)."""
        return QKVLayout(
            groups=self.num_query_groups,
            queries=self.num_attention_heads // self.num_query_groups,
            head_dim=self.head_dim,
            value_rows=2 * self.head_dim if self.kha_folded else 0,
            mechanism_rows=self.kha.rows(self.head_sizes),
            tied=self.kha.attention == "gta",
            omitted=self.kha.own_projections,
        )

    def padded_vocab(self, tp: int) -> int:
        """Padded vocab size for the given TP size."""
        if self.padded_vocab_size:
            return self.padded_vocab_size
        assert self.vocab_size is not None
        multiple = self.make_vocab_size_divisible_by * tp
        padding = -self.vocab_size % multiple
        return self.vocab_size + padding

    def without_heads(self) -> Self:
        """Return the same model without its head mechanisms."""
        kha = self.kha.without(*map(type, self.kha.mechanisms))
        return replace(
            self,
            kha=kha,
            kha_folded=(),
            attention_output_gate=False,
        )

    def differences(
        self,
        other: "ModelConfig",
        ignored: tuple[str, ...] = (),
    ) -> dict[str, tuple[Any, Any]]:
        """Return ``{name: (ours, theirs)}`` for all settings with different values.

        Does not compare the vocab size, the model class in Megatron, the dtype of the router (stock
        architectures cannot change it), or head mechanism settings that only matter in training.
        """
        ours = self._list_settings(ignored)
        theirs = other._list_settings(ignored)
        differences = {}
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                differences[name] = (ours.get(name), theirs.get(name))
        return differences

    def _list_settings(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        """Return the settings that :meth:`differences` compares, each with a name of its own."""
        not_compared = {
            "vocab_size",
            "padded_vocab_size",
            "kha",
            "moe_router_dtype",
            "gpt_model",
            *ignored,
        }
        settings = {}
        for item in fields(self):
            if item.name not in not_compared:
                settings[item.name] = getattr(self, item.name)
        for name, value in self.kha.to_dict(start=False).items():
            if not isinstance(value, dict):
                settings[f"kha {name}"] = value
                continue
            mechanism = name
            for setting, chosen in value.items():
                if setting not in _TRAINING_ONLY_SETTINGS:
                    settings[f"kha {mechanism}.{setting}"] = chosen
        return settings


MODEL_FIELDS: dict[str, Field] = {item.name: item for item in declared_fields(ModelConfig)}
"""Fields of :class:`ModelConfig` by name."""
HF_KEYS: dict[str, str] = {name: item.hf for name, item in MODEL_FIELDS.items() if item.hf}
"""Keys in ``config.json`` by field name."""


def flag_of(name: str) -> str:
    """Return the flag of a model field, or of another argument of Megatron."""
    field = MODEL_FIELDS.get(name)
    return as_flag(name) if field is None else field.flag


STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
"""Settings that all models with a checkpoint that we can convert have in common."""

LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
"""These fields are only used for latent attention (MLA and GLA)."""
