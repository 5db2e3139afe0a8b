"""Parameter counts, FLOPs and KV cache size, computed in closed form.

The definitions are chosen to match the paper (880M in Table 3, 1.01B in section 4.1). For example,
a tied embedding is counted once, and active parameters only include the experts a token uses.

Note: "KHA" refers to all head mechanisms here, and also includes Megatron's own output gate and any
padding rows of the QKV projection.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Costs, Projection
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.layout import Layout

_CACHE_ELEMENT_SIZE = 2  # bytes in bf16
_MULTIPLY_ADD = 2  # FLOPs
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Size and cost of one attention layer, excluding KHA."""

    weights: int  # of linear layers; each one is a multiply-add per token
    biases: int  # of the QKV projection
    norms: int  # parameters of norms
    pair_multiply_adds: int  # per query-key pair, in the scores and the weighted sum of values
    cache: int  # KV cache elements per token


def count_attention(model: ModelConfig) -> Attention:
    """Count an attention layer (for GTA, see section 3.3.1 of https://arxiv.org/abs/2505.21487).

    A mechanism can replace the query and key projections by smaller ones with a single head. Their
    weights are part of KHA, so only their norms and cached keys are counted here.
    """
    if model.multi_latent_attention:
        return count_latent_attention(model)
    head_dim = model.kv_channels
    sizes = model.head_sizes
    query_rows = head_dim * sizes.query_heads
    kv_rows = head_dim * sizes.kv_heads
    rows: dict[Projection, int] = {
        "query": query_rows,
        "key": kv_rows,
        "value": kv_rows,
    }
    replacing_rows = _list_replacing_rows(model)
    for projection in replacing_rows:
        rows[projection] = 0
    if model.kha.attention == "gta":
        # half of each key is part of the value, the other half (with RoPE) is shared by all heads
        rows["key"] = head_dim // 2
    norms = 0
    if model.qk_layernorm:
        normed_query_dim = replacing_rows.get("query", head_dim)
        normed_key_dim = replacing_rows.get("key", head_dim)
        normed_dims = normed_query_dim + normed_key_dim
        norms = normed_dims * model.norm_parameters
    input_rows = sum(rows.values())
    input_weights = model.hidden_size * input_rows
    output_weights = model.hidden_size * query_rows
    cached_keys = rows["key"] + replacing_rows.get("key", 0)
    return Attention(
        weights=input_weights + output_weights,
        biases=input_rows if model.add_qkv_bias else 0,
        norms=norms,
        pair_multiply_adds=2 * query_rows,
        cache=cached_keys + rows["value"],
    )


def _list_replacing_rows(model: ModelConfig) -> dict[Projection, int]:
    """Return the projections that mechanisms replace, and the number of rows of the new weights."""
    replacing_rows: dict[Projection, int] = {}
    for mechanism in model.kha.mechanisms:
        replaced = mechanism.own_projections
        for tensor in mechanism.tensors(model.head_sizes):
            if tensor.reads_input and tensor.heads in replaced:
                replacing_rows[tensor.heads] = tensor.shape[0]
    return replacing_rows


def count_latent_attention(model: ModelConfig) -> Attention:
    """Count MLA or GLA (see section 3.3.2 of https://arxiv.org/abs/2505.21487)."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    query_rank = model.query_rank
    kv_rank = model.kv_lora_rank
    key_dim = model.qk_head_dim
    rotary_dim = model.qk_pos_emb_head_dim
    value_dim = model.v_head_dim
    query_dim = key_dim + rotary_dim
    query_rows = heads * query_dim
    if query_rank:
        down_weights = hidden * query_rank
        up_weights = query_rank * query_rows
        query_weights = down_weights + up_weights
    else:
        query_weights = hidden * query_rows
    cached_dim = kv_rank + rotary_dim
    kv_down_weights = hidden * cached_dim
    # each latent head serves one group of heads
    latent_head_rank = kv_rank // model.latent_heads
    kv_up_rows = heads * (key_dim + value_dim)
    kv_up_weights = latent_head_rank * kv_up_rows
    output_weights = heads * value_dim * hidden
    norms = 0
    if model.qk_layernorm:
        normed_dims = query_rank + kv_rank
        norms = normed_dims * model.norm_parameters
    return Attention(
        weights=query_weights + kv_down_weights + kv_up_weights + output_weights,
        biases=0,  # --add-qkv-bias has no effect
        norms=norms,
        pair_multiply_adds=heads * (query_dim + value_dim),
        cache=cached_dim,
    )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters on one rank."""

    dense: int  # everything but experts, including KHA
    experts: int
    kha: int  # including padding rows
    kha_rows: int  # part of kha that is in the QKV projection
    linear: int  # weights of linear layers and experts (which can be FP8), excluding KHA

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_parameters(
    model: ModelConfig,
    layout: Layout,
    stage: int = 0,
) -> Parameters:
    """Count the parameters on a rank of the given pipeline stage.

    Note that this does not support MLA, GLA or GTA with TP > 1.
    """
    is_last_stage = stage == layout.pp - 1
    predictions = _list_prediction_layers(model) if is_last_stage else []
    layers = []
    for virtual_stage_layers in layout.stage_layers(model.layers, stage):
        layers += virtual_stage_layers
    layers += predictions

    linear = _count_linear_weights(model, layers)
    linear += len(predictions) * _count_mtp_projection(model)
    local_linear = linear // layout.tp
    expert_ranks = layout.ep * layout.expert_tp
    local_experts = _count_expert_weights(model, layers) // expert_ranks
    kha_rows_of_layer = _count_kha_rows(model, layout.tp)
    kha_tensors_of_layer = _count_kha_tensors(model, layout.tp)
    kha_rows = len(layers) * kha_rows_of_layer
    kha = kha_rows + len(layers) * kha_tensors_of_layer

    moe_layers = _count_moe_layers(model, layers)
    biases = len(layers) * count_attention(model).biases
    dense = local_linear + biases // layout.tp + kha
    dense += moe_layers * _count_router_weights(model)
    dense += _count_norms(
        model,
        layers=len(layers),
        predictions=len(predictions),
        has_final_norm=is_last_stage,
    )
    dense += _count_embeddings(model, layout, stage)
    return Parameters(
        dense=dense,
        experts=local_experts,
        kha=kha,
        kha_rows=kha_rows,
        linear=local_linear + local_experts,
    )


def _count_moe_layers(model: ModelConfig, layers: Sequence[int]) -> int:
    return sum(model.is_moe(layer) for layer in layers)


def _count_linear_weights(model: ModelConfig, layers: Sequence[int]) -> int:
    """Count the weights of attention, dense MLPs and shared experts before they are sharded."""
    attention = count_attention(model)
    dense_mlp = _count_mlp_weights(model, model.dense_width)
    shared_experts = _count_mlp_weights(model, model.shared_width)
    weights = 0
    for layer in layers:
        weights += attention.weights
        weights += shared_experts if model.is_moe(layer) else dense_mlp
    return weights


def _count_expert_weights(model: ModelConfig, layers: Sequence[int]) -> int:
    """Count the weights of routed experts before they are sharded."""
    expert = _count_mlp_weights(model, model.expert_width)
    experts = model.experts * _count_moe_layers(model, layers)
    return experts * expert


def _count_router_weights(model: ModelConfig) -> int:
    """Count the weights of the router and of the gate of the shared experts."""
    has_gate = model.moe_shared_expert_gate and model.shared_width
    outputs = model.experts + 1 if has_gate else model.experts
    return outputs * model.hidden_size


def _count_mtp_projection(model: ModelConfig) -> int:
    """Count the weights that merge the previous hidden state and the next embedding."""
    return 2 * model.hidden_size**2


def _count_norms(
    model: ModelConfig,
    layers: int,
    predictions: int,
    *,
    has_final_norm: bool,
) -> int:
    """Count the parameters of norms in the given number of layers and MTP modules."""
    norm = model.hidden_size * model.norm_parameters
    attention = count_attention(model)
    layer_norms = 2 * norm + attention.norms
    prediction_norms = 3 * norm  # of the hidden state, the embedding and the output
    parameters = layers * layer_norms
    parameters += predictions * prediction_norms
    if has_final_norm:
        parameters += norm
    return parameters


def _count_mlp_weights(model: ModelConfig, width: int) -> int:
    matrices = 3 if model.swiglu else 2
    return matrices * model.hidden_size * width


def _count_kha_rows(model: ModelConfig, tp: int) -> int:
    """Count the parameters that KHA adds to the QKV projection of one layer, including padding."""
    sizes = model.head_sizes
    padding_rows = count_padding_rows(model)
    weights = model.hidden_size * padding_rows
    for rows in model.kha.rows(sizes):
        weights += rows.size(sizes)
    biases = weights // model.hidden_size if model.add_qkv_bias else 0
    return (weights + biases) // tp


def _count_kha_tensors(model: ModelConfig, tp: int) -> int:
    """Count the other parameters of KHA in one layer."""
    parameters = 0
    for tensor in model.head_tensors:
        parameters += tensor.size // tensor.ranks(tp)
    return parameters


def _count_embeddings(
    model: ModelConfig,
    layout: Layout,
    stage: int,
) -> int:
    """Count the parameters of the embedding and the output layer on a rank of this stage."""
    rows = model.padded_vocab(layout.tp) // layout.tp
    table = rows * model.hidden_size
    is_first = stage == 0
    is_last = stage == layout.pp - 1
    if is_first and is_last and not model.tied_embeddings:
        return 2 * table
    if is_first or is_last:
        return table
    return 0


def _list_prediction_layers(model: ModelConfig) -> list[int]:
    """For each additional token to predict, return the index of a decoder layer of the same type.

    Each prediction also has a projection and three norms, see :func:`_count_mtp_projection` and
    :func:`_count_norms`.
    """
    last_layer = model.layers - 1
    return [last_layer] * model.predictions


def count_padding_rows(model: ModelConfig) -> int:
    if model.multi_latent_attention:
        return 0
    padding = model.qkv.padding
    rows_per_group = padding.stop - padding.start
    return model.qkv.groups * rows_per_group


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters and KV cache size. Unlike in the paper, the totals include KHA."""

    total: int  # including KHA
    active: int  # per token, including KHA
    kha: int
    mechanisms: Mapping[str, int]  # kha by mechanism, plus "filling" for padding rows
    cache_per_layer: int  # in elements per token, see Table 3
    cache_bytes: int  # per token in bf16, for all layers


TRAINING_FACTOR = 3
"""FLOPs of forward and backward pass, relative to the forward pass. Backward takes two thirds."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Forward FLOPs of the matmuls for one sequence. See :attr:`training` for both passes.

    We follow the conventions of the paper: no discount for causal masks, and KHA is not folded into
    the projections. ``skippable_*`` is what a kernel could save by skipping inactive heads (MoH).
    """

    projections: int
    scores: int
    mlp: int
    router: int
    kha: int
    logits: int  # including those of multi-token prediction
    prediction: int = 0  # projections of multi-token prediction
    skippable_projections: int = 0
    skippable_scores: int = 0

    @property
    def attention(self) -> int:
        """Attention FLOPs, excluding KHA (equation 10)."""
        return self.projections + self.scores

    @property
    def layers(self) -> int:
        """FLOPs of all layers, excluding KHA (equation 11)."""
        return self.attention + self.mlp + self.router

    @property
    def forward(self) -> int:
        return self.layers + self.kha + self.logits + self.prediction

    @property
    def training(self) -> int:
        """FLOPs of forward and backward pass."""
        return TRAINING_FACTOR * self.forward

    @property
    def share_of_layers(self) -> float:
        """Relative overhead of KHA (0.55% in the paper)."""
        return self.kha / self.layers

    @property
    def share_of_attention(self) -> float:
        """Overhead of KHA relative to attention alone (1.17% in the paper)."""
        return self.kha / self.attention


ARGUMENTS_NOT_COUNTED: Mapping[str, tuple[str, ...]] = {
    "--experimental-attention-variant": (),
    "--moe-latent-size": (),
    "--mtp-use-repeated-layer": (),
    "--softmax-type": ("vanilla", "off-by-one"),
}
"""Arguments that change the number of parameters, and their values that do not."""
_UNCOUNTED_POSITIONS = "learned_absolute"


def get_countable_model(model: ModelConfig | None, arguments: Mapping[str, Any]) -> ModelConfig:
    """Make sure that this module supports the model. Raises ConfigError if it does not.

    Args:
        arguments: Megatron's arguments, by name or, if we do not know them, by flag.
    """
    if model is None:
        raise ConfigError("Cannot count the parameters of a model without --num-layers.")
    if model.num_layers is None:
        raise ConfigError(
            "Cannot count a model with other layers than pairs of attention and MLP (such as *-*E)."
        )
    if not model.vocab_size and not model.padded_vocab_size:
        raise ConfigError("Cannot count a model without a vocabulary size. Add --vocab-size.")
    if model.add_bias_linear:
        raise ConfigError("Cannot count a model with linear layers with biases.")
    if model.position_embedding_type == _UNCOUNTED_POSITIONS:
        raise ConfigError(
            f"Cannot count a model with --position-embedding-type {_UNCOUNTED_POSITIONS}. Add "
            "--position-embedding-type rope."
        )
    for flag, counted_values in ARGUMENTS_NOT_COUNTED.items():
        value = " ".join(arguments.get(flag, ()))
        if flag in arguments and value not in counted_values:
            argument = f"{flag} {value}".rstrip()
            raise ConfigError(f"Cannot count a model with {argument}. Remove {flag}.")
    if arguments.get("heterogeneous_layers_config_path"):
        raise ConfigError("Cannot count a model with --heterogeneous-layers-config-path.")
    return model


def get_sequence_length(arguments: Mapping[str, Any]) -> int:
    """Return the sequence length in Megatron's arguments. Raises ConfigError without one."""
    length = arguments.get("seq_length")
    if not length:
        raise ConfigError("Cannot count the FLOPs of a run without --seq-length.")
    return length


def count_model(model: ModelConfig) -> Counts:
    parameters = count_parameters(model, Layout())
    cache_per_layer = count_attention(model).cache
    cache_elements = cache_per_layer * model.layers
    predictions = _list_prediction_layers(model)
    layers = model.layers + len(predictions)
    mechanisms = {}
    for mechanism in model.kha.mechanisms:
        layer_parameters = mechanism.parameters(model.head_sizes)
        mechanisms[mechanism.name] = layers * layer_parameters
    filling = parameters.kha - sum(mechanisms.values())
    if filling:
        mechanisms["filling"] = filling
    active_experts = 0
    if model.experts:
        active_experts = parameters.experts * model.moe_router_topk // model.experts
    active = parameters.dense + active_experts
    return Counts(
        total=parameters.total,
        active=active,
        kha=parameters.kha,
        mechanisms=mechanisms,
        cache_per_layer=cache_per_layer,
        cache_bytes=_CACHE_ELEMENT_SIZE * cache_elements,
    )


def compute_flops(model: ModelConfig, length: int) -> Flops:
    """Compute forward FLOPs for a sequence of ``length`` tokens.

    Equations 10 to 12 in the paper are a special case (MHA and a dense MLP).
    """
    predictions = _list_prediction_layers(model)
    layers = [*range(model.layers), *predictions]
    # number of tokens, or query-key pairs, summed over the modules that process them
    layer_tokens = length * len(layers)
    moe_layers = _count_moe_layers(model, layers)
    moe_tokens = length * moe_layers
    dense_tokens = layer_tokens - moe_tokens
    prediction_tokens = length * len(predictions)
    logit_tokens = length + prediction_tokens
    pairs = length * layer_tokens

    # multiply-adds
    attention = count_attention(model)
    projections = layer_tokens * attention.weights
    scores = pairs * attention.pair_multiply_adds
    dense_mlp = _count_mlp_weights(model, model.dense_width)
    expert = _count_mlp_weights(model, model.expert_width)
    shared_experts = _count_mlp_weights(model, model.shared_width)
    active_experts = model.moe_router_topk * expert + shared_experts
    mlp = dense_tokens * dense_mlp
    mlp += moe_tokens * active_experts
    router = moe_tokens * _count_router_weights(model)
    output_layer = model.hidden_size * model.padded_vocab(1)
    logits = logit_tokens * output_layer
    prediction = prediction_tokens * _count_mtp_projection(model)

    costs = _sum_mechanism_costs(model, layers)
    return Flops(
        projections=_MULTIPLY_ADD * projections,
        scores=_MULTIPLY_ADD * scores,
        mlp=_MULTIPLY_ADD * mlp,
        router=_MULTIPLY_ADD * router,
        logits=_MULTIPLY_ADD * logits,
        prediction=_MULTIPLY_ADD * prediction,
        kha=layer_tokens * _count_kha_flops(model, length),
        skippable_projections=length * costs.skippable_flops,
        skippable_scores=length**2 * costs.skippable_pair_flops,
    )


def _count_kha_flops(model: ModelConfig, length: int) -> int:
    """Count the forward FLOPs of KHA in one layer, per token of a sequence with this length."""
    costs = model.kha.costs(model.head_sizes)
    padding_rows = count_padding_rows(model)
    padding_weights = model.hidden_size * padding_rows
    flops = costs.flops
    flops += length * costs.pair_flops
    flops += _MULTIPLY_ADD * padding_weights
    return flops


def _sum_mechanism_costs(model: ModelConfig, layers: Iterable[int]) -> Costs:
    """Sum the costs of all layers. The settings of a mechanism can differ between layers."""
    total = Costs()
    for layer in layers:
        for mechanism in model.kha.mechanisms:
            layer_mechanism = mechanism.for_layer(layer)
            total += layer_mechanism.costs(model.head_sizes)
    return total


def format_like_paper(number: int, example: str) -> tuple[str, str]:
    """Format a parameter count like one in the paper, e.g. ``880M``, and compare the two.

    The paper rounds some counts and truncates others, so we try both.

    Returns:
        The formatted number, and either ``rounded``, ``cut`` or the relative error.
    """
    unit = example[-1]
    published_digits = example.removesuffix(unit)
    published = Decimal(published_digits)
    scaled = Decimal(number) / _UNITS[unit]
    rounded = scaled.quantize(published, rounding=ROUND_HALF_UP)
    truncated = scaled.quantize(published, rounding=ROUND_DOWN)
    if rounded == published:
        return example, "rounded"
    if truncated == published:
        return example, "cut"
    error = float(scaled / published - 1)
    return f"{rounded}{unit}", f"{error:+.2%} of the paper's"
