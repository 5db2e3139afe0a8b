"""Build the oracle's twin of one attention layer from the layer's weights."""

from typing import Any

from torch import Tensor

from kha_megatron.heads import CollaborativeHeads, Gate, HeadSizes, MixtureOfHeads, TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.qkv import QKVLayout
from tests import oracle

BASE = 10000.0
LAYERS = 2
LOSS_SCALE = 0.5
Weights = dict[str, Tensor]


def twin(
    kha: HeadsConfig,
    sizes: dict[str, Any],
    hidden: Tensor,
    weights: Weights,
) -> tuple[Tensor, Tensor | float]:
    """Return the output ``[B, S, K]`` for ``hidden`` of the same shape, and the added loss."""
    matrices = {p: list(weights[f"knock_{p}.weight"]) for p in kha.variants}
    if kha.get(MixtureOfHeads):
        return _mixture(kha, sizes, hidden, weights, matrices)
    if kha.attention == "gta":
        return _tied(kha, sizes, hidden, weights, matrices), 0.0
    if sizes.get("multi_latent_attention"):
        return _latent(kha, sizes, hidden, weights, matrices), 0.0
    if kha.get(TalkingHeads) or kha.get(CollaborativeHeads):
        return _mixed(kha, sizes, hidden, weights), 0.0
    return _attention(kha, sizes, hidden, weights, matrices), 0.0


def _norms(sizes, weights, key="k"):
    if not sizes.get("qk_layernorm", True):
        return {}
    return {f"{name}_norm": weights[f"{name}_layernorm.weight"] for name in ("q", key)}


def _attention(kha, sizes, hidden, weights, matrices, weigh=None):
    heads = sizes["num_attention_heads"]
    groups = sizes["num_query_groups"]
    head_dim = sizes["kv_channels"]
    facts = HeadSizes(query_heads=heads, kv_heads=groups, head_dim=head_dim)
    extra = kha.rows(facts)
    layout = QKVLayout(
        groups=groups,
        queries=heads // groups,
        head_dim=head_dim,
        mechanism_rows=extra,
    )
    rows = weights["linear_qkv.weight"].unflatten(0, (groups, -1))
    parts = {name: rows[:, part.rows].flatten(0, 1) for name, part in layout.parts.items()}
    gates = {}
    for row in extra:
        position = row.name.removeprefix("gate_")
        gates[position] = parts[row.name].unflatten(0, (-1, row.features))
    for name, weight in weights.items():
        if name.startswith("gate_"):
            position = name.removeprefix("gate_").removesuffix(".weight")
            gates[position] = weight
    return oracle.attention(
        hidden,
        parts["query"].T,
        parts["key"].T,
        parts["value"].T,
        weights["linear_proj.weight"].T,
        kha,
        matrices,
        num_query_groups=groups,
        head_dim=head_dim,
        rotary_base=BASE,
        weigh=weigh,
        gate=kha.get(Gate),
        gate_weights=gates,
        **_norms(sizes, weights),
    )


def _mixture(kha, sizes, hidden, weights, matrices):
    routing = kha.get(MixtureOfHeads)
    losses = []
    shared = routing.shared
    active = routing.active
    if routing.share:  # 75 % of 8: 6 heads, half of them shared
        shared = 3
        active = 3
    if isinstance(active, tuple):
        active = active[1]  # of the second layer

    router = None
    if routing.router == "learned":
        router = weights["moh_router.weight"]

    def weigh(queries):
        head_weights, loss = oracle.mixture_weights(
            hidden,
            queries,
            router,
            shared=shared,
            active=active,
            scale=routing.scale,
            quantized=routing.quantized,
        )
        losses.append(loss)
        return head_weights

    output = _attention(kha, sizes, hidden, weights, matrices, weigh)
    routed = sizes["num_attention_heads"] - shared
    factor = routed / LAYERS if routing.balance_scale == "code" else 1
    return output, LOSS_SCALE * routing.balance * factor * losses[0]


def _mixed(kha, sizes, hidden, weights):
    groups = sizes["num_query_groups"]
    head_dim = sizes["kv_channels"]
    blocks = weights["linear_qkv.weight"].unflatten(0, (groups, -1, head_dim))
    query = blocks[:, :-2].flatten(0, 2)
    key = blocks[:, -2:-1].flatten(0, 2)
    value = blocks[:, -1:].flatten(0, 2)
    options = {}
    if kha.get(CollaborativeHeads):
        query = weights["collaborative_query.weight"]
        key = weights["collaborative_key.weight"]
        options["mixing"] = weights["collaborative_mixing.weight"]
    talking = kha.get(TalkingHeads)
    if talking:
        for name in talking.mixings:
            options[name] = weights[f"talking_{name}.weight"]
    return oracle.mixed_attention(
        hidden,
        query.T,
        key.T,
        value.T,
        weights["linear_proj.weight"].T,
        num_query_groups=groups,
        rotary_base=BASE,
        rotary_dim=head_dim,
        **options,
        **_norms(sizes, weights),
    )


def _tied(kha, sizes, hidden, weights, matrices):
    groups = sizes["num_query_groups"]
    head_dim = sizes["kv_channels"]
    blocks = weights["linear_qkv.weight"].unflatten(0, (groups, -1, head_dim))
    return oracle.tied_attention(
        hidden,
        blocks[:, :-1].flatten(0, 2).T,
        blocks[:, -1].flatten(0, 1).T,
        weights["linear_k_rope.weight"].T,
        weights["linear_proj.weight"].T,
        kha,
        matrices,
        num_query_groups=groups,
        head_dim=head_dim,
        rotary_base=BASE,
        **_norms(sizes, weights),
    )


def _latent(kha, sizes, hidden, weights, matrices):
    from tests.distributed.models import LATENT

    rank = LATENT["kv_lora_rank"]
    nope = LATENT["qk_head_dim"]
    heads = sizes["num_attention_heads"]
    down = weights["linear_kv_down_proj.weight"].T
    up = weights["linear_kv_up_proj.weight"].unflatten(0, (heads, -1))
    if "linear_q_proj.weight" in weights:
        query = weights["linear_q_proj.weight"].T
        query_latent = None
    else:
        query = weights["linear_q_up_proj.weight"].T
        query_latent = weights["linear_q_down_proj.weight"].T
    return oracle.latent_attention(
        hidden,
        query,
        down[:, :rank],
        up[:, :nope].flatten(0, 1).T,
        up[:, nope:].flatten(0, 1).T,
        down[:, rank:],
        weights["linear_proj.weight"].T,
        kha,
        matrices,
        heads=heads,
        rotary_base=BASE,
        w_query_latent=query_latent,
        gate=kha.get(Gate),
        gate_weights={"output": weights.get("gate_output.weight")},
        **_norms(sizes, weights, "kv"),
    )
