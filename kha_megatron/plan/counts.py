"""Calculate parameters, key/value cache and FLOPs of a model without building it.

*Active* parameters are all but those of experts to which a token is not routed, with a tied
embedding counted once. This gives the paper's numbers: 880M in Table 3, 1.01B in section 4.1.
"KHA" means all head mechanisms, including Megatron's output gate and padding rows.

Shapes: ``d`` hidden size, ``n`` query heads, ``g`` key/value heads, ``D`` features of a head.
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
    """Attention of one layer without KHA."""

    weights: int
    """Parameters of linear layers; each costs one multiply-add per token."""
    norms: int
    """Parameters of norms."""
    pair: int
    """Multiply-adds per query-key pair, over all heads."""
    cache: int
    """Numbers in the decoding cache of one token."""


def attention_of(model: ModelConfig, kha: KHAConfig | None = None) -> Attention:
    """Return the attention of one layer, without the rows that mechanisms add."""
    return latent(model) if model.multi_latent_attention else grouped(model, kha or KHAConfig())


def grouped(model: ModelConfig, kha: KHAConfig) -> Attention:
    """Return MHA, MQA, GQA or GTA (Zadouri et al. 2025, section 3.3.1).

    Queries and keys that a mechanism projects itself are one head, as wide as its tensor.
    """
    d, head, sizes = model.hidden_size, model.kv_channels, model.head_sizes
    tied = model.kha_attention == "gta"
    made = {
        tensor.heads: tensor.shape[0]
        for mechanism in kha.mechanisms
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


def latent(model: ModelConfig) -> Attention:
    """Return MLA or GLA (Zadouri et al. 2025, section 3.3.2)."""
    d, n = model.hidden_size, model.num_attention_heads
    query_rank, rank = model.q_lora_rank or 0, model.kv_lora_rank
    key, position, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    queries = n * (key + position)
    weights = query_rank * (d + queries) if query_rank else d * queries
    weights += d * (rank + position)
    weights += rank // model.latent_heads * n * (key + value)  # of its own query heads only
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

    dense: int
    """All parameters but those of experts, including KHA's."""
    experts: int
    kha: int
    """All mechanisms, including padding rows."""
    kha_rows: int
    """Part of ``kha`` in the QKV projection, which is sharded."""
    kha_summed: int
    """Part of ``kha`` whose gradients tensor-parallel ranks sum after each microbatch."""
    linear: int
    """Linear layers and experts without KHA, which FP8 applies to."""
    embedding: int
    """Embedding and output layer."""

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts


def parameters(model: ModelConfig, kha: KHAConfig, layout: Layout, stage: int = 0) -> Parameters:
    """Count the parameters of each rank of pipeline stage ``stage``.

    Attention other than grouped-query must not be split by tensor parallelism.
    """
    tp, hidden, norm = layout.tp, model.hidden_size, model.norm_parameters
    attention = attention_of(model, kha)
    matrices = 3 if model.swiglu else 2
    tensors = kha.tensors(model.head_sizes)
    rows = sum(row.size(model.head_sizes) for row in kha.rows(model.head_sizes))
    rows = (rows + hidden * filling_rows(model, kha)) // tp
    knocking = sum(t.size // t.ranks(tp) for t in tensors) + rows
    summed = sum(
        t.size
        for t in tensors
        if tp != t.ranks(tp)
        and (layout.sequence_parallel if t.reads_input else t.gradient == "heads")
    )
    norms = norm * 2 * hidden + attention.norms

    linear = expert = router = count = 0
    for layer in itertools.chain(*layout.stage_layers(model.layers, stage)):
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
    first, last = stage == 0, stage == layout.pp - 1
    table *= first + (last and not (first and model.tied_embeddings))
    dense = linear + router + count * (norms + knocking) + table + last * norm * hidden
    return Parameters(
        dense=dense,
        experts=expert,
        kha=count * knocking,
        kha_rows=count * rows,
        kha_summed=count * summed,
        linear=linear + expert,
        embedding=table,
    )


def filling_rows(model: ModelConfig, kha: KHAConfig) -> int:
    """Count the padding rows of the QKV projection."""
    if model.multi_latent_attention:
        return 0
    layout = replace(model, kha=kha, attention_output_gate=False).qkv
    return layout.groups * (layout.padding.stop - layout.padding.start)


def active_parameters(model: ModelConfig, kha: KHAConfig) -> int:
    """Count the parameters that one token passes through."""
    whole = parameters(model, kha, Layout())
    if not whole.experts:
        return whole.total
    return whole.dense + whole.experts * model.moe_router_topk // model.experts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters and decoding cache of a whole model."""

    total: int
    """All parameters, including KHA's."""
    active: int
    """Parameters that one token passes through, including KHA's."""
    kha: int
    """Parameters of KHA, which the counts in the KHA paper do not include."""
    mechanisms: Mapping[str, int]
    """``kha`` by mechanism, and ``filling`` for padding rows."""
    cache_per_layer: int
    """Cached numbers per layer and token (Table 3)."""
    cache_bytes: int
    """Cached bytes per token over all layers, in bf16."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix-multiplication FLOPs of the forward pass of one sequence, over all layers.

    Backward takes twice as many. As in the paper, scores include the non-causal half.
    """

    projections: int
    scores: int
    mlp: int
    """Dense MLPs, or routed and shared experts."""
    router: int
    kha: int
    """Unfolded matrices."""
    logits: int
    spared_projections: int = 0
    """Part of ``projections`` that kernels could save by skipping a token's inactive heads."""
    spared_scores: int = 0
    """The same for ``scores``."""

    @property
    def attention(self) -> int:
        """Eq. 10, without KHA."""
        return self.projections + self.scores

    @property
    def layers(self) -> int:
        """Eq. 11, without KHA."""
        return self.attention + self.mlp + self.router

    @property
    def forward(self) -> int:
        """All FLOPs, including KHA and the output layer."""
        return self.layers + self.kha + self.logits

    @property
    def share_of_layers(self) -> float:
        """KHA's FLOPs relative to the layers without it (0.55 % in the paper)."""
        return self.kha / self.layers

    @property
    def share_of_attention(self) -> float:
        """KHA's FLOPs relative to attention without it (1.17 % in the paper)."""
        return self.kha / self.attention


def counted(model: ModelConfig | None) -> ModelConfig:
    """Return the model if it can be counted.

    Raises:
        ConfigError: it has no sizes, or parts that are not counted.
    """
    if model is None:
        raise ConfigError("Expected a model with sizes, got one without --num-layers.")
    unknown = {
        "--mtp-num-layers": model.mtp_num_layers,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern,
        "linear layers with biases": model.add_bias_linear,
    }
    if found := [what for what, present in unknown.items() if present]:
        raise ConfigError(f"Cannot count a model with {', '.join(found)}.")
    return model


def count(model: ModelConfig, kha: KHAConfig) -> Counts:
    """Count parameters and cache of the whole model."""
    whole, cache = parameters(model, kha, Layout()), attention_of(model, kha).cache
    sizes = model.head_sizes
    own = {m.name: model.layers * m.parameters(sizes) for m in kha.mechanisms}
    if filling := whole.kha - sum(own.values()):
        own["filling"] = filling
    return Counts(
        total=whole.total,
        active=active_parameters(model, kha),
        kha=whole.kha,
        mechanisms=own,
        cache_per_layer=cache,
        cache_bytes=_CACHE_BYTES * cache * model.layers,
    )


def flops(model: ModelConfig, kha: KHAConfig, length: int) -> Flops:
    """Count the forward FLOPs of one sequence of ``length`` tokens.

    Generalises the paper's equations 10 to 12, which are the case ``g = n``, ``D = d / n`` and a
    dense MLP of width ``3 d``.
    """
    attention = attention_of(model, kha)
    layers, hidden = model.layers, model.hidden_size
    matrices = 3 if model.swiglu else 2
    width = router = 0
    for layer in range(layers):
        if not model.is_moe(layer):
            width += model.dense_width
            continue
        width += model.moe_router_topk * model.expert_width
        width += model.shared_width
        router += model.experts
    sizes = model.head_sizes
    a_token = kha.flops(sizes) + 2 * hidden * filling_rows(model, kha)
    spared = [
        m.for_layer(layer).skippable_flops(sizes) for m in kha.mechanisms for layer in range(layers)
    ]
    return Flops(
        projections=2 * length * layers * attention.weights,
        scores=2 * length**2 * layers * attention.pair,
        mlp=2 * length * matrices * hidden * width,
        router=2 * length * hidden * router,
        kha=length * layers * (a_token + length * kha.pair_flops(sizes)),
        logits=2 * length * hidden * model.padded_vocab(1),
        spared_projections=length * sum(projections for projections, _ in spared),
        spared_scores=length**2 * sum(scores for _, scores in spared),
    )


def as_printed(number: int, example: str) -> tuple[str, str]:
    """Format a count with the digits of a printed one, and say how they were obtained.

    ``(14650674944, "14.6B")`` gives ``("14.6B", "cut")`` and ``(880275456, "880M")`` gives
    ``("880M", "rounded")``: the paper does both. Other counts are rounded, with the relative error.
    """
    digits, unit = example[:-1], example[-1]
    scaled, step = Decimal(number) / _UNITS[unit], Decimal(digits)
    rounded = scaled.quantize(step, rounding=ROUND_HALF_UP)
    for value, how in (
        (rounded, "rounded"),
        (scaled.quantize(step, rounding=ROUND_DOWN), "cut"),
    ):
        if f"{value}{unit}" == example:
            return example, how
    return f"{rounded}{unit}", f"{float(scaled / step - 1):+.2%} of the paper's"
