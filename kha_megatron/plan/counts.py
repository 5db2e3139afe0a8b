"""Parameters, key/value cache and FLOPs of a model, in closed form. Nothing is built.

*Active* are the parameters that one token passes through: everything but the experts that it is not
routed to, with the embedding (tied to the output layer) counted once, and the router, the norms and
KHA included. This reading gives what the paper prints: 880M in Table 3, 1.01B in section 4.1.
Heads that a token skips count as active, as the paper on mixture-of-head attention counts them.

KHA here are all mechanisms of heads. What they have in the projection of queries, keys and values
is counted with them, Megatron's own output gate too, and the rows that fill up their groups.

Shapes: ``d`` hidden size, ``n`` query heads, ``g`` key/value heads, ``D`` features of a head.
Multi-head and multi-query attention are grouped-query attention with ``g = n`` and ``g = 1``.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadTensor
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.model.layout import Layout
from kha_megatron.model.model import Model

_CACHE_BYTES = 2  # bf16
_UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer without the tensors and FLOPs of KHA."""

    weights: int
    """Parameters of its linear layers; each costs one multiply-add a token."""
    norms: int
    """Parameters of its norms."""
    pair: int
    """Multiply-adds for one query and one key with its value, over all heads."""
    cache: int
    """Numbers that decoding keeps of one token."""

    @property
    def parameters(self) -> int:
        """Of linear layers and norms."""
        return self.weights + self.norms


def attention_of(model: Model, kha: KHAConfig | None = None) -> Attention:
    """The attention of one layer, around what mechanisms add to it or make in its place."""
    return latent(model) if model.multi_latent_attention else grouped(model, kha or KHAConfig())


def grouped(model: Model, kha: KHAConfig) -> Attention:
    """MHA, MQA and GQA: q, k and v from one projection, ``2 g D`` numbers cached.

    In GTA (Zadouri et al. 2025, section 3.3.1) one state of ``D`` a group is its value and half of
    its key; the rotary half of all keys is one projection of ``D / 2``. Queries and keys that a
    mechanism makes are as wide as its tensors: one head, which all share.
    """
    d, head, sizes = model.hidden_size, model.kv_channels, model.head_sizes
    tied = model.kha_attention == "gta"
    made = {
        tensor.heads: tensor.shape[0]
        for mechanism in kha.mechanisms
        for tensor in mechanism.tensors(sizes)
        if tensor.reads_input and tensor.heads in mechanism.makes
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


def latent(model: Model) -> Attention:
    """MLA, and GLA, each of whose latent heads serves its own share of the query heads (Zadouri et
    al. 2025, section 3.3.2)."""
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
    """How many parameters one rank holds."""

    dense: int
    """All but the experts', KHA's included."""
    experts: int
    kha: int
    """All of the mechanisms, and what fills up their rows."""
    kha_rows: int
    """Those of ``kha`` in the projection of queries, keys and values, which ranks cut."""
    kha_summed: int
    """Those of ``kha`` whose gradient tensor-parallel ranks sum after each microbatch."""
    linear: int
    """Those of linear layers, experts included and KHA's not: what FP8 computes with."""
    embedding: int
    """Those of the embedding and of the projection to logits."""

    @property
    def total(self) -> int:
        """Dense ones and experts."""
        return self.dense + self.experts


def parameters(model: Model, kha: KHAConfig, layout: Layout, stage: int = 0) -> Parameters:
    """Parameters of a rank of pipeline rank ``stage``; equal on all of its ranks.

    Tensor parallelism must leave other attention than grouped-query whole.
    """
    tp, hidden, norm = layout.tp, model.hidden_size, model.norm_parameters
    attention = attention_of(model, kha)
    matrices = 3 if model.swiglu else 2
    tensors = kha.tensors(model.head_sizes)
    rows = sum(row.size(model.head_sizes) for row in kha.rows(model.head_sizes))
    rows = (rows + hidden * filling_rows(model, kha)) // tp
    knocking = sum(t.size // t.ranks(tp) for t in tensors) + rows
    summed = sum(t.size for t in tensors if _is_summed(t, layout))
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


def filling_rows(model: Model, kha: KHAConfig) -> int:
    """Rows of zeros that fill up the groups of the projection of queries, keys and values."""
    if model.multi_latent_attention:
        return 0
    layout = replace(model, kha=kha, attention_output_gate=False).qkv
    return layout.groups * (layout.padding.stop - layout.padding.start)


def _is_summed(tensor: HeadTensor, layout: Layout) -> bool:
    """Whether tensor-parallel ranks have parts of its gradient (``HeadTensor.gradient``)."""
    if layout.tp == tensor.ranks(layout.tp):
        return False
    return layout.sequence_parallel if tensor.reads_input else tensor.gradient == "heads"


def active_parameters(model: Model, kha: KHAConfig) -> int:
    """Parameters that one token passes through: of the experts, those that it is routed to."""
    whole = parameters(model, kha, Layout())
    if not whole.experts:
        return whole.total
    return whole.dense + whole.experts * model.moe_router_topk // model.experts


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters, and what decoding keeps."""

    total: int
    """All parameters, KHA's included."""
    active: int
    """Those that one token passes through, KHA's included."""
    kha: int
    """KHA's own; the paper on it prints its counts without them."""
    mechanisms: Mapping[str, int]
    """What ``kha`` consists of, by mechanism, and ``filling``: rows of zeros that nothing reads."""
    cache_per_layer: int
    """Numbers that one layer keeps of one token (Table 3's cache)."""
    cache_bytes: int
    """Bytes that the whole model keeps of one token, in bf16. KHA adds none."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix-multiplication FLOPs of one sequence in the forward pass, over all layers.

    Backward takes twice as many, training three times. Scores are counted for every pair of
    positions, as in the paper; causal kernels skip half of them.
    """

    projections: int
    scores: int
    mlp: int
    """Dense MLPs, or the experts that a token is routed to, shared ones included."""
    router: int
    kha: int
    """Matrices applied to activations: linear ones that are folded away cost none."""
    logits: int
    spared_projections: int = 0
    """Of ``projections``, what kernels that skip a token's idle heads would save: on paper."""
    spared_scores: int = 0
    """The same of ``scores``."""

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
        """Everything, KHA and the output layer included."""
        return self.layers + self.kha + self.logits

    @property
    def share_of_layers(self) -> float:
        """KHA's addition, relative to the layers without it (the paper's 0.55 %)."""
        return self.kha / self.layers

    @property
    def share_of_attention(self) -> float:
        """KHA's addition, relative to attention without it (the paper's 1.17 %)."""
        return self.kha / self.attention


def counted(model: Model | None) -> Model:
    """The model, if this package can count it.

    Raises:
        ConfigError: naming what it has that is not counted.
    """
    if model is None:
        raise ConfigError(
            "a model without sizes of its own is not counted: give --num-layers, "
            "--hidden-size and --num-attention-heads"
        )
    strange = {
        "--mtp-num-layers": model.mtp_num_layers,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern,
        "linear layers with biases": model.add_bias_linear,
    }
    if found := [what for what, present in strange.items() if present]:
        raise ConfigError(f"the model has {', '.join(found)}, which is not counted")
    return model


def count(model: Model, kha: KHAConfig) -> Counts:
    """Parameters and cache of the whole model."""
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


def flops(model: Model, kha: KHAConfig, length: int) -> Flops:
    """Forward FLOPs of one sequence of ``length`` tokens.

    The paper's equations 10 to 12 for any number of key/value heads, head size, MLP width and
    member of the attention family; with ``g = n``, ``D = d / n`` and a dense MLP of ``3 d`` they
    are the paper's own.
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
    spared = [m.for_layer(layer).spared(sizes) for m in kha.mechanisms for layer in range(layers)]
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
    """A count in the digits of one that the paper prints, and how it came to them.

    ``(14650674944, "14.6B")`` gives ``("14.6B", "cut")``, ``(880275456, "880M")`` gives ``("880M",
    "rounded")``: the paper does both. A count that comes to other digits is rounded, with how far
    off it is.
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
