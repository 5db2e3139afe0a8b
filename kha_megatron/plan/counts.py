"""Parameter counts, FLOPs and KV cache size, computed in closed form.

The definitions are chosen to match the paper (880M in Table 3, 1.01B in section 4.1). For example,
a tied embedding is counted once, and active parameters only include the experts a token uses.

Note: "KHA" refers to all head mechanisms here, and also includes Megatron's own output gate and any
padding rows of the QKV projection.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.layout import Layout
from kha_megatron.model.model_config import ModelConfig

_CACHE_BYTES = 2  # bf16
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Size and cost of one attention layer, excluding KHA."""

    weights: int  # linear layers (parameters, or multiply-adds per token)
    norms: int  # parameters of norms
    pair: int  # multiply-adds per query-key pair
    cache: int  # KV cache elements per token


def count_attention(model: ModelConfig, kha: KHAConfig | None = None) -> Attention:
    """Count an attention layer (for GTA, see section 3.3.1 of https://arxiv.org/abs/2505.21487).

    A mechanism can replace the query and key projections by smaller ones with a single head.
    """
    if model.multi_latent_attention:
        return count_latent_attention(model)
    d, head, sizes = model.hidden_size, model.kv_channels, model.head_sizes
    tied = model.kha_attention == "gta"
    made = {
        tensor.heads: tensor.shape[0]
        for mechanism in (kha or KHAConfig()).mechanisms
        for tensor in mechanism.tensors(sizes)
        if tensor.reads_input and tensor.heads in mechanism.own_projections
    }
    states = [p for p in PROJECTIONS if p not in made and not (tied and p == "key")]
    rows = head * sum(sizes.heads(projection) for projection in states)
    rotary = head // 2 if tied else 0
    normed = sum(made.get(projection, head) for projection in ("query", "key"))
    cached = head * sum(sizes.kv_heads for projection in states if projection != "query")
    return Attention(
        weights=d * (rows + rotary + sizes.query_heads * head),
        norms=normed * model.norm_parameters if model.qk_layernorm else 0,
        pair=2 * sizes.query_heads * head,
        cache=cached + made.get("key", 0) + rotary,
    )


def count_latent_attention(model: ModelConfig) -> Attention:
    """Count MLA or GLA (see section 3.3.2 of https://arxiv.org/abs/2505.21487)."""
    d, n = model.hidden_size, model.num_attention_heads
    query_rank, rank = model.q_lora_rank or 0, model.kv_lora_rank
    key, position, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    queries = n * (key + position)
    weights = query_rank * (d + queries) if query_rank else d * queries
    weights += d * (rank + position)
    weights += rank // model.latent_heads * n * (key + value)  # each latent head serves one group
    weights += n * value * d
    return Attention(
        weights=weights,
        norms=(query_rank + rank) * model.norm_parameters if model.qk_layernorm else 0,
        pair=n * (key + position + value),
        cache=rank + position,
    )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters on one rank."""

    dense: int  # everything but experts, including KHA
    experts: int
    kha: int  # including padding rows
    kha_rows: int  # part of kha that is in the QKV projection
    kha_summed: int  # part of kha with a TP all-reduce in each microbatch
    linear: int  # weights that can be FP8, excluding KHA
    embedding: int  # including the output layer

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_parameters(
    model: ModelConfig, kha: KHAConfig, layout: Layout, stage: int = 0
) -> Parameters:
    """Count the parameters on a rank of the given pipeline stage.

    Note that this doesn't support MLA, GLA or GTA with TP > 1.
    """
    tp, hidden, norm = layout.tp, model.hidden_size, model.norm_parameters
    attention = count_attention(model, kha)
    matrices = 3 if model.swiglu else 2
    tensors = kha.tensors(model.head_sizes)
    rows = sum(row.size(model.head_sizes) for row in kha.rows(model.head_sizes))
    rows = (rows + hidden * count_padding_rows(model, kha)) // tp
    knocking = sum(t.size // t.ranks(tp) for t in tensors) + rows
    summed = sum(
        t.size
        for t in tensors
        if tp != t.ranks(tp)
        and (layout.sequence_parallel if t.reads_input else t.gradient == "heads")
    )
    norms = norm * 2 * hidden + attention.norms

    first, last = stage == 0, stage == layout.pp - 1
    predicting = last * _list_prediction_layers(model)
    linear = len(predicting) * 2 * hidden**2 // tp
    expert = router = count = 0
    for layer in (*itertools.chain(*layout.stage_layers(model.layers, stage)), *predicting):
        count += 1
        linear += attention.weights // tp
        if not model.is_moe(layer):
            linear += matrices * hidden * model.dense_width // tp
            continue
        linear += matrices * hidden * model.shared_width // tp
        router += model.experts * hidden
        local = model.experts // layout.ep
        expert += local * matrices * hidden * model.expert_width // layout.expert_tp

    table = model.padded_vocab(tp) * hidden // tp
    table *= first + (last and not (first and model.tied_embeddings))
    dense = linear + router + count * (norms + knocking) + table
    dense += (last + 3 * len(predicting)) * norm * hidden
    return Parameters(
        dense=dense,
        experts=expert,
        kha=count * knocking,
        kha_rows=count * rows,
        kha_summed=count * summed,
        linear=linear + expert,
        embedding=table,
    )


def _list_prediction_layers(model: ModelConfig) -> list[int]:
    """For each additional token to predict, return the index of a decoder layer of the same type.

    Each prediction also has a projection (of the previous hidden state and the next embedding) and
    three norms.
    """
    return [model.layers - 1] * model.predictions


def count_padding_rows(model: ModelConfig, kha: KHAConfig) -> int:
    if model.multi_latent_attention:
        return 0
    layout = replace(model, kha=kha, attention_output_gate=False).qkv
    return layout.groups * (layout.padding.stop - layout.padding.start)


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
    """Make sure that this module supports the model. Raises ConfigError if it doesn't."""
    if model is None:
        raise ConfigError("Cannot count the parameters of a model without --num-layers.")
    found = "linear layers with biases" if model.add_bias_linear else ""
    if model.num_layers is None:
        found = "other layers than pairs of attention and MLP (such as *-*E)"
    if found:
        raise ConfigError(f"Cannot count a model with {found}.")
    return model


def count_model(model: ModelConfig, kha: KHAConfig) -> Counts:
    whole, cache = count_parameters(model, kha, Layout()), count_attention(model, kha).cache
    sizes = model.head_sizes
    layers = model.layers + len(_list_prediction_layers(model))
    own = {m.name: layers * m.parameters(sizes) for m in kha.mechanisms}
    if filling := whole.kha - sum(own.values()):
        own["filling"] = filling
    return Counts(
        total=whole.total,
        active=whole.dense + whole.experts * model.moe_router_topk // max(1, model.experts),
        kha=whole.kha,
        mechanisms=own,
        cache_per_layer=cache,
        cache_bytes=_CACHE_BYTES * cache * model.layers,
    )


def compute_flops(model: ModelConfig, kha: KHAConfig, length: int) -> Flops:
    """Compute forward FLOPs for a sequence of ``length`` tokens.

    Equations 10 to 12 in the paper are a special case (MHA and a dense MLP).
    """
    attention = count_attention(model, kha)
    hidden, predicting = model.hidden_size, _list_prediction_layers(model)
    indices = [*range(model.layers), *predicting]
    layers = len(indices)
    matrices = 3 if model.swiglu else 2
    width = router = 0
    for layer in indices:
        if not model.is_moe(layer):
            width += model.dense_width
            continue
        width += model.moe_router_topk * model.expert_width
        width += model.shared_width
        router += model.experts
    sizes = model.head_sizes
    costs = kha.costs(sizes)
    a_token = costs.flops + 2 * hidden * count_padding_rows(model, kha)
    of_layers = [m.for_layer(layer).costs(sizes) for m in kha.mechanisms for layer in indices]
    return Flops(
        projections=2 * length * layers * attention.weights,
        scores=2 * length**2 * layers * attention.pair,
        mlp=2 * length * matrices * hidden * width,
        router=2 * length * hidden * router,
        kha=length * layers * (a_token + length * costs.pair_flops),
        logits=2 * length * hidden * model.padded_vocab(1) * (1 + len(predicting)),
        prediction=4 * length * hidden**2 * len(predicting),
        skippable_projections=length * sum(each.skippable_flops for each in of_layers),
        skippable_scores=length**2 * sum(each.skippable_pair_flops for each in of_layers),
    )


def format_like_paper(number: int, example: str) -> tuple[str, str]:
    """Format a parameter count like one in the paper, e.g. ``880M``, and compare the two.

    The paper rounds some counts and truncates others, so we try both.

    Returns:
        The formatted number, and either ``rounded``, ``cut`` or the relative error.
    """
    digits, unit = example[:-1], example[-1]
    scaled, step = Decimal(number) / _UNITS[unit], Decimal(digits)
    rounded = scaled.quantize(step, rounding=ROUND_HALF_UP)
    cut = scaled.quantize(step, rounding=ROUND_DOWN)
    for value, how in ((rounded, "rounded"), (cut, "cut")):
        if f"{value}{unit}" == example:
            return example, how
    return f"{rounded}{unit}", f"{float(scaled / step - 1):+.2%} of the paper's"
