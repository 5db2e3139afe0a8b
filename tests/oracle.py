"""The oracle: Knocking-Heads Attention written head by head, as slowly as the paper states it.

Every test compares with this file, so it shares no code with the package and uses no fused or
batched form. Shape legend: ``S`` sequence, ``B`` batch, ``K`` hidden, ``H`` query heads, ``G``
key/value heads, ``D`` head dim. Weights are applied from the right (``hidden @ w``). Everything is
computed in the dtype of the inputs; tests pass float64.

:func:`attention` is MHA, MQA and GQA; :func:`tied_attention` and :func:`latent_attention` are GTA,
and MLA and GLA (Zadouri, Strauss and Dao 2025, arXiv 2505.21487; MLA: DeepSeek-V2, arXiv
2405.04434, section 2.1).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.heads.knock import Variant


def knock_head(x: Tensor, matrices: list[Tensor], variant: Variant) -> Tensor:
    """One head through the shared matrices: equations 5-7 (linear), 9 (mlp), Table 2 (gate).

    Args:
        x: ``[B, S, D]``, one head.
        matrices: ``[T]``, ``[W_up, W_gate, W_down]`` or ``[W_gate]``, each ``[D, D]``.
    """

    def sigmoid(z: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-z))

    if variant == "linear":
        (t,) = matrices
        return torch.einsum("bsi,ij->bsj", x, t)
    if variant == "mlp":
        up, gate, down = matrices
        hidden = torch.einsum("bsi,ij->bsj", x, up) * sigmoid(torch.einsum("bsi,ij->bsj", x, gate))
        return 2 * torch.einsum("bsi,ij->bsj", hidden, down)
    if variant == "gate":
        (gate,) = matrices
        return 2 * x * sigmoid(torch.einsum("bsi,ij->bsj", x, gate))
    raise AssertionError(variant)


def gate_head(
    x: Tensor, hidden: Tensor, position: str, head: int, gate: Gate | None, weights: dict
) -> Tensor:
    """What is at one position of one head, gated if the position is (arXiv 2505.06708, section 3).

    Args:
        x: ``[B, S, D]``, or ``[B, S, K]`` for ``dense``.
        hidden: ``[B, S, K]``, the input of the attention.
        gate: which positions are gated, how, and of what granularity.
        weights: of each gated position, ``[heads, features, K]`` where every head has a score of
            its own, ``[features, K]`` for ``shared`` and ``dense``; one feature for ``head``.
            Without ``K`` where the gate reads no input.
    """
    granularity = None if gate is None else getattr(gate, position)
    if granularity is None:
        return x
    weight = weights[position]
    if position != "dense" and granularity != "shared":
        weight = weight[head]
    score = torch.einsum("bsk,fk->bsf", hidden, weight) if gate.reads_input else weight
    sigmoid = 1 / (1 + torch.exp(-score))
    score = {"sigmoid": sigmoid, "silu": score * sigmoid, "half_sigmoid": 0.5 + 0.5 * sigmoid}[
        gate.activation
    ]
    return x * score if gate.form == "multiply" else x + score


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding over all ``D`` features of ``[B, S, D]``, halves convention."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype, device=x.device) / half
    angle = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * base ** (-steps)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """The same over neighbouring features, as MLA has it: ``(x_2i, x_2i+1)`` turn together."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), base)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention of one head: ``[B, S, D]`` each, values of any width."""
    length = query.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = torch.einsum("bqd,bkd->bqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bqk,bkd->bqd", weights, value)


def attention(
    hidden: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_output: Tensor,
    kha: KHAConfig,
    matrices: dict[str, list[Tensor]],
    *,
    num_query_groups: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
    rotary_base: float | None = None,
    weigh: Callable[[list[Tensor]], Tensor] | None = None,
    gate: Gate | None = None,
    gate_weights: dict[str, Tensor] | None = None,
) -> Tensor:
    """Causal grouped-query attention with knocking: project, knock, gate q, k and v, QK-norm, RoPE,
    attend, gate the output, project, gate what comes out.

    Args:
        hidden: ``[B, S, K]``.
        w_query: ``[K, H * D]`` (row-vector convention: ``hidden @ w``), likewise ``w_key`` and
            ``w_value`` ``[K, G * D]`` and ``w_output`` ``[H * D, K]``.
        kha: what is knocked.
        matrices: the shared matrices of each knocked projection, by its name.
        num_query_groups: ``G``.
        head_dim: ``D``.
        q_norm: ``[D]`` weight of the query RMSNorm, or None for no norm; likewise ``k_norm``.
        rotary_base: base of the rotary embedding, or None for no position embedding.
        weigh: from the knocked queries of all heads, ``[B, S, D]`` each, what their outputs are
            multiplied by, ``[B, S, H]`` (:func:`mixture_weights`).
        gate: what is gated; its weights are ``gate_weights`` (:func:`gate_head`).

    Returns:
        ``[B, S, K]``.
    """
    heads = w_query.shape[1] // head_dim

    def gated(x: Tensor, position: str, head: int) -> Tensor:
        return gate_head(x, hidden, position, head, gate, gate_weights or {})

    def project(weight: Tensor, head: int, name: str) -> Tensor:
        x = hidden @ weight[:, head * head_dim : (head + 1) * head_dim]
        variant = getattr(kha, name)
        x = x if variant is None else knock_head(x, matrices[name], variant)
        return gated(x, name, head)

    outputs = []
    queries = [project(w_query, head, "query") for head in range(heads)]
    for head, query in enumerate(queries):
        group = head // (heads // num_query_groups)
        key = project(w_key, group, "key")
        value = project(w_value, group, "value")
        if q_norm is not None:
            query = rms_norm(query, q_norm, eps)
        if k_norm is not None:
            key = rms_norm(key, k_norm, eps)
        if rotary_base is not None:
            query, key = rotate(query, rotary_base), rotate(key, rotary_base)
        outputs.append(gated(attend(query, key, value), "output", head))
    if weigh is not None:
        weights = weigh(queries)
        outputs = [weights[..., head, None] * output for head, output in enumerate(outputs)]
    return gated(torch.cat(outputs, dim=-1) @ w_output, "dense", 0)


def mixture_weights(
    hidden: Tensor,
    queries: list[Tensor],
    router: Tensor | None,
    *,
    shared: int,
    active: int,
    scale: str = "code",
    quantized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mixture-of-Head attention, token by token (arXiv 2410.11842, equations 5 to 10).

    Where the authors' code (SkyworkAI/MoH) differs from equation 5: weights of shared heads are
    multiplied by their number, those of the chosen ones divided by their sum and multiplied by
    their number, ``alpha`` by 2; norms of queries are divided by their standard deviation.

    Args:
        hidden: ``[B, S, K]``.
        queries: of each head, ``[B, S, D]``, after the knock and before QK-norm.
        router: ``[H + 2, K]``: ``W_s``, ``W_r`` and ``W_h``; None for norms of queries.
        shared: the first heads of the layer, which all tokens have.
        active: routed heads that a token has.
        scale: ``code`` or ``paper``.
        quantized: whether heads weigh 1, and gradients pass the threshold (equations 9 and 10).

    Returns:
        ``[B, S, H]``, and the load-balance loss of equation 7.
    """
    heads = len(queries)
    routed = heads - shared

    def softmax(scores: list[Tensor]) -> list[Tensor]:
        total = sum(torch.exp(score) for score in scores)
        return [torch.exp(score) / total for score in scores]

    rows, probabilities, selections = [], [], []
    for b in range(hidden.shape[0]):
        for t in range(hidden.shape[1]):
            if router is None:
                norms = [query[b, t].pow(2).sum().sqrt() for query in queries[shared:]]
                if scale == "code":
                    mean = sum(norms) / routed
                    spread = (sum((n - mean) ** 2 for n in norms) / (routed - 1)) ** 0.5
                    norms = [n / spread for n in norms]
                p = softmax(norms)
                of_shared, alpha = [hidden.new_ones(()) for _ in range(shared)], None
            else:
                scores = [row @ hidden[b, t] for row in router]
                p = softmax(scores[shared:heads])
                alpha = softmax(scores[heads:])
                of_shared = [alpha[0] * g for g in softmax(scores[:shared])]
            ranked = sorted(range(routed), key=lambda i: -p[i].item())
            chosen = [i in ranked[:active] for i in range(routed)]
            of_routed = [x if alpha is None else alpha[1] * x for x in p]
            if quantized:
                real = [*of_shared, *of_routed]
                on = [True] * shared + chosen
                weights = [(int(c) - g).detach() + g for c, g in zip(on, real, strict=True)]
            else:
                if scale == "code":
                    both = 1 if alpha is None else 2
                    total = sum(x for x, c in zip(p, chosen, strict=True) if c)
                    of_routed = [x / total * active * both for x in of_routed]
                    if alpha is not None:
                        of_shared = [g * shared * 2 for g in of_shared]
                of_routed = [x if c else 0 * x for x, c in zip(of_routed, chosen, strict=True)]
                weights = [*of_shared, *of_routed]
            rows.append(torch.stack(weights))
            probabilities.append(torch.stack(p))
            selections.append(chosen)
    tokens = len(rows)
    loss = sum(
        sum(p[i] for p in probabilities) / tokens * (sum(c[i] for c in selections) / tokens)
        for i in range(routed)
    )
    return torch.stack(rows).view(*hidden.shape[:2], heads), loss


def tied_attention(
    hidden: Tensor,
    w_query: Tensor,
    w_tied: Tensor,
    w_rotary: Tensor,
    w_output: Tensor,
    kha: KHAConfig,
    matrices: dict[str, list[Tensor]],
    *,
    num_query_groups: int,
    head_dim: int,
    rotary_base: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Causal Grouped-Tied Attention: keys and values of a group are one state of ``D`` features.

    All of the state is the value; its first half is the half of the key without position. The
    other half of the key, to which the rotary embedding is applied, is one head of ``D / 2``
    features for all groups. A query head has both halves. A cache needs the ``G`` states and that
    one head: ``G D + D / 2`` numbers for each token.

    The state is knocked, once, before it is used as either. QK-norm sees whole heads and comes
    before the rotary embedding, as in :func:`attention`.

    Args:
        hidden: ``[B, S, K]``.
        w_query: ``[K, H * D]``, of each head the rotary half first.
        w_tied: ``[K, G * D]``.
        w_rotary: ``[K, D / 2]``.
        w_output: ``[H * D, K]``.
        kha: what is knocked: ``value`` stands for the tied state.
        matrices: the shared matrices of each knocked projection, by its name.
        num_query_groups: ``G``.
        head_dim: ``D``.
        rotary_base: base of the rotary embedding.
        q_norm: ``[D]`` weight of the query RMSNorm, the rotary half first, or None for no norm;
            likewise ``k_norm``.

    Returns:
        ``[B, S, K]``.
    """
    heads, half = w_query.shape[1] // head_dim, head_dim // 2

    def project(weight: Tensor, head: int, name: str) -> Tensor:
        x = hidden @ weight[:, head * head_dim : (head + 1) * head_dim]
        variant = getattr(kha, name)
        return x if variant is None else knock_head(x, matrices[name], variant)

    def rotate_first_half(x: Tensor) -> Tensor:
        return torch.cat([rotate(x[..., :half], rotary_base), x[..., half:]], dim=-1)

    outputs = []
    for head in range(heads):
        query = project(w_query, head, "query")
        tied = project(w_tied, head // (heads // num_query_groups), "value")
        key = torch.cat([hidden @ w_rotary, tied[..., :half]], dim=-1)
        if q_norm is not None:
            query = rms_norm(query, q_norm, eps)
        if k_norm is not None:
            key = rms_norm(key, k_norm, eps)
        outputs.append(attend(rotate_first_half(query), rotate_first_half(key), tied))
    return torch.cat(outputs, dim=-1) @ w_output


def latent_attention(
    hidden: Tensor,
    w_query: Tensor,
    w_latent: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_rotary: Tensor,
    w_output: Tensor,
    kha: KHAConfig,
    matrices: dict[str, list[Tensor]],
    *,
    heads: int,
    rotary_base: float,
    w_query_latent: Tensor | None = None,
    q_norm: Tensor | None = None,
    kv_norm: Tensor | None = None,
    eps: float = 1e-5,
    gate: Gate | None = None,
    gate_weights: dict[str, Tensor] | None = None,
) -> Tensor:
    """Causal Multi-head Latent Attention; with several latent heads, Grouped Latent Attention.

    Keys and values of a head are up-projections of a latent, without position, and one rotary key
    of ``R`` features is shared by all heads. In GLA the latent is cut into ``kha.latent_heads``
    heads, each normalised by itself, each giving keys and values to its own group of query heads.
    A cache needs the ``C`` numbers of the latent and the ``R`` of the rotary key for each token.

    Knocked are the parts without position of queries (``n`` features a head) and keys, and values
    (``v`` features a head), after the up-projections: being linear, the matrices fold into these.

    Args:
        hidden: ``[B, S, K]``.
        w_query: ``[K or Q, H * (n + R)]``, of each head the rotary part last.
        w_latent: ``[K, C]``, latent heads outermost.
        w_key: ``[C / latent heads, H * n]``, likewise ``w_value`` ``[..., H * v]``.
        w_rotary: ``[K, R]``.
        w_output: ``[H * v, K]``.
        kha: what is knocked, and the number of latent heads.
        matrices: the shared matrices of each knocked projection, by its name.
        heads: ``H``.
        rotary_base: base of the rotary embedding, which turns neighbouring features.
        w_query_latent: ``[K, Q]``, or None for queries without a latent.
        q_norm: ``[Q]`` weight of the query latent's RMSNorm, or None for no norm.
        kv_norm: ``[C]`` weight of the RMSNorm of each latent head, or None for no norm.
        gate: on the output, if any; its weight is in ``gate_weights`` (:func:`gate_head`).

    Returns:
        ``[B, S, K]``.
    """
    latent_heads = kha.latent_heads if kha.attention == "gla" else 1
    rotary_dim, nope = w_rotary.shape[1], w_key.shape[1] // heads
    value_dim = w_value.shape[1] // heads
    query_source = hidden
    if w_query_latent is not None:
        query_source = hidden @ w_query_latent
        if q_norm is not None:
            query_source = rms_norm(query_source, q_norm, eps)
    latents = list((hidden @ w_latent).chunk(latent_heads, dim=-1))
    if kv_norm is not None:
        weights = kv_norm.chunk(latent_heads)
        latents = [rms_norm(x, w, eps) for x, w in zip(latents, weights, strict=True)]
    rotary_key = rotate_pairs(hidden @ w_rotary, rotary_base)

    def knocked(x: Tensor, name: str) -> Tensor:
        variant = getattr(kha, name)
        return x if variant is None else knock_head(x, matrices[name], variant)

    outputs = []
    for head in range(heads):
        latent = latents[head // (heads // latent_heads)]
        query = query_source @ w_query[:, head * (nope + rotary_dim) :][:, : nope + rotary_dim]
        key = latent @ w_key[:, head * nope : (head + 1) * nope]
        value = latent @ w_value[:, head * value_dim : (head + 1) * value_dim]
        query = torch.cat(
            [knocked(query[..., :nope], "query"), rotate_pairs(query[..., nope:], rotary_base)], -1
        )
        key = torch.cat([knocked(key, "key"), rotary_key], dim=-1)
        output = attend(query, key, knocked(value, "value"))
        outputs.append(gate_head(output, hidden, "output", head, gate, gate_weights or {}))
    return torch.cat(outputs, dim=-1) @ w_output


def mixed_attention(
    hidden: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_output: Tensor,
    *,
    num_query_groups: int,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    mixing: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
    rotary_base: float | None = None,
    rotary_dim: int | None = None,
) -> Tensor:
    """Causal attention with talking heads (Shazeer et al. 2020, arXiv 2003.02436, section 2) and
    with collaborative ones (Cordonnier et al. 2020, arXiv 2006.16362, section 3.2).

    Talking heads: head ``k`` gives the softmax the sum over heads ``h`` of ``pre[h, k]`` times the
    logits of ``h``, and the values the sum of ``post[h, k]`` times the softmax of ``h``. What a
    query may not see is hidden from the softmax, after the first sum.

    Collaborative heads: one query and one key of ``Dk`` features for all heads, of which head ``i``
    multiplies each feature of the query by its own number. Norms and the rotary embedding see what
    a head has then; the rotary embedding turns the first ``rotary_dim`` features.

    Args:
        hidden: ``[B, S, K]``.
        w_query: ``[K, H * D]``, or ``[K, Dk]`` with ``mixing``.
        w_key: ``[K, G * D]``, or ``[K, Dk]`` with ``mixing``.
        w_value: ``[K, G * V]``.
        w_output: ``[H * V, K]``.
        num_query_groups: ``G``.
        pre: ``[H, H]``, or None for no mixing of logits; likewise ``post`` of weights.
        mixing: ``[H, Dk]`` of collaborative heads, or None.
        q_norm: weight of the query RMSNorm, or None for no norm; likewise ``k_norm``.
        rotary_base: base of the rotary embedding, or None for no position embedding.
        rotary_dim: features of a head that it turns; None for all.

    Returns:
        ``[B, S, K]``.
    """
    value_dim = w_value.shape[1] // num_query_groups
    heads = w_output.shape[0] // value_dim
    length = hidden.shape[1]

    def place(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm, eps)
        if rotary_base is None:
            return x
        turned = rotary_dim or x.shape[-1]
        return torch.cat([rotate(x[..., :turned], rotary_base), x[..., turned:]], dim=-1)

    def columns(weight: Tensor, head: int, of: int) -> Tensor:
        width = weight.shape[1] // of
        return hidden @ weight[:, head * width : (head + 1) * width]

    logits, values = [], []
    for head in range(heads):
        group = head // (heads // num_query_groups)
        if mixing is not None:
            query, key = (hidden @ w_query) * mixing[head], hidden @ w_key
        else:
            query, key = columns(w_query, head, heads), columns(w_key, group, num_query_groups)
        query, key = place(query, q_norm), place(key, k_norm)
        logits.append(torch.einsum("bqd,bkd->bqk", query, key) / math.sqrt(query.shape[-1]))
        values.append(columns(w_value, group, num_query_groups))

    def mix(of_heads: list[Tensor], weight: Tensor | None) -> list[Tensor]:
        if weight is None:
            return of_heads
        return [
            torch.stack([weight[h, k] * x for h, x in enumerate(of_heads)]).sum(0)
            for k in range(heads)
        ]

    future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    weights = [x.masked_fill(future, -torch.inf).softmax(-1) for x in mix(logits, pre)]
    outputs = [
        torch.einsum("bqk,bkd->bqd", weight, value)
        for weight, value in zip(mix(weights, post), values, strict=True)
    ]
    return torch.cat(outputs, dim=-1) @ w_output
