"""Parameter counts, FLOPs and KV cache size, computed in closed form.

The definitions are chosen to match the paper (880M in Table 3, 1.01B in section 4.1). For example,
a tied embedding is counted once, and active parameters only include the experts a token uses.

Note: "KHA" refers to all head mechanisms here, and also includes Megatron's own output gate and any
padding rows of the QKV projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Costs
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.config import ModelConfig
from kha_megatron.model.layout import Layout

_CACHE_BYTES = 2  # bf16
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Size and cost of one attention layer, excluding KHA."""

    weights: int  # linear layers (parameters, or multiply-adds per token)
    norms: int  # parameters of norms
    pair: int  # multiply-adds per query-key pair
    cache: int  # KV cache elements per token


def count_attention(model: ModelConfig) -> Attention:
    """Count an attention layer (for GTA, see section 3.3.1 of https://arxiv.org/abs/2505.21487).

    A mechanism can replace the query and key projections by smaller ones with a single head.
    """
    if model.multi_latent_attention:
        return count_latent_attention(model)
    hidden = model.hidden_size
    head_dim = model.kv_channels
    sizes = model.head_sizes
    is_tied = model.kha.attention == "gta"
    replaced_dims = _list_replaced_projections(model)
    projected_heads = 0
    cached_heads = 0
    for projection in PROJECTIONS:
        if projection in replaced_dims:
            continue
        if is_tied and projection == "key":
            continue
        heads = sizes.heads(projection)
        projected_heads += heads
        if projection != "query":
            cached_heads += heads
    rotary_dim = head_dim // 2 if is_tied else 0
    rows = head_dim * projected_heads + rotary_dim
    output_columns = head_dim * sizes.query_heads
    cached_key_dim = replaced_dims.get("key", 0)
    cache = head_dim * cached_heads + rotary_dim + cached_key_dim
    norms = 0
    if model.qk_layernorm:
        normed_dim = replaced_dims.get("query", head_dim)
        normed_dim += replaced_dims.get("key", head_dim)
        norms = normed_dim * model.norm_parameters
    return Attention(
        weights=hidden * (rows + output_columns),
        norms=norms,
        pair=2 * output_columns,
        cache=cache,
    )


def _list_replaced_projections(model: ModelConfig) -> dict[str, int]:
    """Return the projections that mechanisms replace, and the size of the new ones."""
    replaced: dict[str, int] = {}
    for mechanism in model.kha.mechanisms:
        for tensor in mechanism.tensors(model.head_sizes):
            if tensor.reads_input and tensor.heads in mechanism.own_projections:
                replaced[tensor.heads] = tensor.shape[0]
    return replaced


def count_latent_attention(model: ModelConfig) -> Attention:
    """Count MLA or GLA (see section 3.3.2 of https://arxiv.org/abs/2505.21487)."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    query_rank = model.query_rank
    rank = model.kv_lora_rank
    key_dim = model.qk_head_dim
    rotary_dim = model.qk_pos_emb_head_dim
    value_dim = model.v_head_dim
    query_rows = heads * (key_dim + rotary_dim)
    weights = query_rank * (hidden + query_rows) if query_rank else hidden * query_rows
    weights += hidden * (rank + rotary_dim)
    head_rank = rank // model.latent_heads  # each latent head serves one group
    up_rows = heads * (key_dim + value_dim)
    weights += head_rank * up_rows
    weights += heads * value_dim * hidden
    norms = 0
    if model.qk_layernorm:
        norms = (query_rank + rank) * model.norm_parameters
    return Attention(
        weights=weights,
        norms=norms,
        pair=heads * (key_dim + rotary_dim + value_dim),
        cache=rank + rotary_dim,
    )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters on one rank."""

    dense: int  # everything but experts, including KHA
    experts: int
    kha: int  # including padding rows
    kha_rows: int  # part of kha that is in the QKV projection
    linear: int  # weights that can be FP8, excluding KHA

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
    hidden = model.hidden_size
    tp = layout.tp
    is_last = stage == layout.pp - 1
    predictions = _list_prediction_layers(model) if is_last else []
    layers = []
    for chunk in layout.stage_layers(model.layers, stage):
        layers += chunk
    layers += predictions
    attention = count_attention(model)

    # weights before they are sharded
    dense = _count_mlp(model, model.dense_width)
    expert = _count_mlp(model, model.expert_width)
    shared = _count_mlp(model, model.shared_width)
    linear = len(predictions) * 2 * hidden**2
    experts = 0
    routers = 0
    for layer in layers:
        linear += attention.weights
        if model.is_moe(layer):
            linear += shared
            experts += model.experts * expert
            routers += model.experts * hidden
        else:
            linear += dense
    linear //= tp
    experts //= layout.ep * layout.expert_tp

    norm = hidden * model.norm_parameters
    layer_norms = 2 * norm + attention.norms
    norms = len(layers) * layer_norms
    norms += len(predictions) * 3 * norm
    if is_last:
        norms += norm
    kha_layer_rows = _count_kha_rows(model, tp)
    kha_layer_tensors = _count_kha_tensors(model, tp)
    kha_rows = len(layers) * kha_layer_rows
    kha_parameters = kha_rows + len(layers) * kha_layer_tensors
    embeddings = _count_embeddings(model, layout, stage)
    return Parameters(
        dense=linear + routers + norms + kha_parameters + embeddings,
        experts=experts,
        kha=kha_parameters,
        kha_rows=kha_rows,
        linear=linear + experts,
    )


def _count_mlp(model: ModelConfig, width: int) -> int:
    matrices = 3 if model.swiglu else 2
    return matrices * model.hidden_size * width


def _count_kha_rows(model: ModelConfig, tp: int) -> int:
    """Count the parameters that KHA adds to the QKV projection of one layer, including padding."""
    sizes = model.head_sizes
    parameters = model.hidden_size * count_padding_rows(model)
    for rows in model.kha.rows(sizes):
        parameters += rows.size(sizes)
    return parameters // tp


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
    if is_first and is_last:
        return table if model.tied_embeddings else 2 * table
    return table if is_first or is_last else 0


def _list_prediction_layers(model: ModelConfig) -> list[int]:
    """For each additional token to predict, return the index of a decoder layer of the same type.

    Each prediction also has a projection (of the previous hidden state and the next embedding) and
    three norms.
    """
    return [model.layers - 1] * model.predictions


def count_padding_rows(model: ModelConfig) -> int:
    if model.multi_latent_attention:
        return 0
    padding = model.qkv.padding
    return model.qkv.groups * (padding.stop - padding.start)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters and KV cache size. Unlike in the paper, the totals include KHA."""

    total: int  # including KHA
    active: int  # per token, including KHA
    kha: int
    mechanisms: Mapping[str, int]  # kha by mechanism, plus "filling" for padding rows
    cache_per_layer: int  # in elements per token, see Table 3
    cache_bytes: int  # per token in bf16


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Forward FLOPs of the matmuls for one sequence. Multiply by 3 to include the backward pass.

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
    def share_of_layers(self) -> float:
        """Relative overhead of KHA (0.55% in the paper)."""
        return self.kha / self.layers

    @property
    def share_of_attention(self) -> float:
        """Overhead of KHA relative to attention alone (1.17% in the paper)."""
        return self.kha / self.attention


def get_countable_model(model: ModelConfig | None) -> ModelConfig:
    """Make sure that this module supports the model. Raises ConfigError if it does not."""
    if model is None:
        raise ConfigError("Cannot count the parameters of a model without --num-layers.")
    if model.num_layers is None:
        raise ConfigError(
            "Cannot count a model with other layers than pairs of attention and MLP (such as *-*E)."
        )
    if model.add_bias_linear:
        raise ConfigError("Cannot count a model with linear layers with biases.")
    return model


def count_model(model: ModelConfig) -> Counts:
    parameters = count_parameters(model, Layout())
    cache = count_attention(model).cache
    layers = model.layers + len(_list_prediction_layers(model))
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
    return Counts(
        total=parameters.total,
        active=parameters.dense + active_experts,
        kha=parameters.kha,
        mechanisms=mechanisms,
        cache_per_layer=cache,
        cache_bytes=_CACHE_BYTES * cache * model.layers,
    )


def compute_flops(model: ModelConfig, length: int) -> Flops:
    """Compute forward FLOPs for a sequence of ``length`` tokens.

    Equations 10 to 12 in the paper are a special case (MHA and a dense MLP).
    """
    hidden = model.hidden_size
    sizes = model.head_sizes
    predictions = _list_prediction_layers(model)
    layers = [*range(model.layers), *predictions]
    dense = _count_mlp(model, model.dense_width)
    expert = _count_mlp(model, model.expert_width)
    shared = _count_mlp(model, model.shared_width)
    mlp = 0
    router = 0
    skippable = Costs()
    for layer in layers:
        if model.is_moe(layer):
            mlp += model.moe_router_topk * expert
            mlp += shared
            router += hidden * model.experts
        else:
            mlp += dense
        for mechanism in model.kha.mechanisms:
            skippable += mechanism.for_layer(layer).costs(sizes)
    attention = count_attention(model)
    costs = model.kha.costs(sizes)
    kha_token_flops = costs.flops
    kha_token_flops += 2 * hidden * count_padding_rows(model)
    kha_token_flops += length * costs.pair_flops
    logits = hidden * model.padded_vocab(1)
    prediction_tokens = length * len(predictions)
    logit_tokens = length + prediction_tokens
    layer_tokens = length * len(layers)
    pairs = layer_tokens * length
    return Flops(
        projections=2 * layer_tokens * attention.weights,
        scores=2 * pairs * attention.pair,
        mlp=2 * length * mlp,
        router=2 * length * router,
        kha=layer_tokens * kha_token_flops,
        logits=2 * logit_tokens * logits,
        prediction=4 * prediction_tokens * hidden**2,
        skippable_projections=length * skippable.skippable_flops,
        skippable_scores=length**2 * skippable.skippable_pair_flops,
    )


def format_like_paper(number: int, example: str) -> tuple[str, str]:
    """Format a parameter count like one in the paper, e.g. ``880M``, and compare the two.

    The paper rounds some counts and truncates others, so we try both.

    Returns:
        The formatted number, and either ``rounded``, ``cut`` or the relative error.
    """
    unit = example[-1]
    published = Decimal(example.removesuffix(unit))
    scaled = Decimal(number) / _UNITS[unit]
    rounded = scaled.quantize(published, rounding=ROUND_HALF_UP)
    if rounded == published:
        return example, "rounded"
    cut = scaled.quantize(published, rounding=ROUND_DOWN)
    if cut == published:
        return example, "cut"
    error = float(scaled / published - 1)
    return f"{rounded}{unit}", f"{error:+.2%} of the paper's"
