"""The oracle: Knocking-Heads Attention, computed head by head as in the paper's equations.

It shares no code with the package and uses no fused or batched form. Shapes: ``S`` sequence, ``B``
batch, ``K`` hidden, ``H`` query heads, ``G`` key/value heads, ``D`` head dim. Weights are
multiplied from the right (``hidden @ w``). Results have the dtype of the inputs; tests pass
float64.

:func:`attention` is MHA, MQA and GQA, :func:`tied_attention` is GTA, and :func:`latent_attention`
is MLA and GLA (Zadouri, Strauss and Dao 2025, arXiv 2505.21487; MLA: DeepSeek-V2, arXiv 2405.04434,
section 2.1). All are causal. Common arguments:

- ``hidden``: ``[B, S, K]``, the shape of the result.
- ``kha`` and ``matrices``: the variants, and the shared matrices of each knocked projection by its
  name (:func:`knock_head`).
- ``num_query_groups``: ``G``, and ``head_dim``: ``D``.
- ``q_norm`` and other norms: the weight of an RMSNorm, or None for no norm. ``eps`` is its epsilon.
- ``rotary_base``: base of the rotary embedding, or None for no position embedding.
- ``gate`` and ``gate_weights``: :func:`gate_head`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kha_megatron.heads import Gate
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import Variant


def knock_head(x: Tensor, matrices: list[Tensor] | None, variant: Variant | None) -> Tensor:
    """Knock one head ``[B, S, D]``: equations 5-7 (linear), 9 (mlp), Table 2 (gate).

    Args:
        matrices: ``[T]``, ``[W_up, W_gate, W_down]`` or ``[W_gate]``, each ``[D, D]``.
        variant: None returns ``x``.
    """

    def sigmoid(z: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-z))

    if variant is None:
        return x
    if variant == "linear":
        (t,) = matrices
        return torch.einsum("bsi,ij->bsj", x, t)
    if variant == "mlp":
        up, gate, down = matrices
        scores = torch.einsum("bsi,ij->bsj", x, gate)
        hidden = torch.einsum("bsi,ij->bsj", x, up) * sigmoid(scores)
        return 2 * torch.einsum("bsi,ij->bsj", hidden, down)
    if variant == "gate":
        (gate,) = matrices
        return 2 * x * sigmoid(torch.einsum("bsi,ij->bsj", x, gate))
    raise AssertionError(variant)


def gate_head(
    x: Tensor,
    hidden: Tensor,
    position: str,
    head: int,
    gate: Gate | None,
    weights: dict,
) -> Tensor:
    """Gate one position of one head, if ``gate`` has this position (arXiv 2505.06708, section 3).

    Args:
        x: ``[B, S, D]``, or ``[B, S, K]`` for ``dense``.
        weights: of each gated position: ``[heads, features, K]`` if each head has its own score,
            ``[features, K]`` for ``shared`` and ``dense``. ``head`` has one feature. A gate that
            reads no input has no ``K``.
    """
    granularity = None if gate is None else getattr(gate, position)
    if granularity is None:
        return x
    weight = weights[position]
    if position != "dense" and granularity != "shared":
        weight = weight[head]
    score = weight
    if gate.reads_input:
        score = torch.einsum("bsk,fk->bsf", hidden, weight)
    sigmoid = 1 / (1 + torch.exp(-score))
    activations = {
        "sigmoid": sigmoid,
        "silu": score * sigmoid,
        "half_sigmoid": 0.5 + 0.5 * sigmoid,
    }
    activated = activations[gate.activation]
    return x * activated if gate.form == "multiply" else x + activated


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x / torch.sqrt(mean_square + eps) * weight


def rotate(x: Tensor, base: float | None) -> Tensor:
    """Rotary position embedding over all ``D`` features of ``[B, S, D]``, halves convention."""
    if base is None:
        return x
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype, device=x.device) / half
    positions = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    angle = positions[:, None] * base ** (-steps)
    first = x[..., :half]
    second = x[..., half:]
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding of neighbouring features ``(x_2i, x_2i+1)``, as in MLA."""
    return rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), base)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal softmax attention of one head: ``[B, S, D]`` each, values of any width."""
    length = query.shape[1]
    future = torch.ones(
        length,
        length,
        dtype=torch.bool,
        device=query.device,
    ).triu(1)
    scores = torch.einsum("bqd,bkd->bqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bqk,bkd->bqd", weights, value)


def attention(
    hidden: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_output: Tensor,
    kha: HeadsConfig,
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
    """Project, knock, gate q, k and v, apply QK-norm and RoPE, attend, gate the output, project,
    and gate the result (``dense``).

    Args:
        w_query: ``[K, H * D]``. ``w_key`` and ``w_value`` are ``[K, G * D]``, ``w_output`` is
            ``[H * D, K]``.
        weigh: maps the knocked queries of all heads, ``[B, S, D]`` each, to the factors of their
            outputs, ``[B, S, H]`` (:func:`mixture_weights`).
    """
    heads = w_query.shape[1] // head_dim

    def gated(x: Tensor, position: str, head: int) -> Tensor:
        return gate_head(x, hidden, position, head, gate, gate_weights or {})

    def project(weight: Tensor, head: int, name: str) -> Tensor:
        x = hidden @ weight[:, head * head_dim : (head + 1) * head_dim]
        knocked = knock_head(x, matrices.get(name), kha.variants.get(name))
        return gated(knocked, name, head)

    outputs = []
    queries = [project(w_query, head, "query") for head in range(heads)]
    for head, query in enumerate(queries):
        group = head // (heads // num_query_groups)
        key = project(w_key, group, "key")
        value = project(w_value, group, "value")
        query = rotate(rms_norm(query, q_norm, eps), rotary_base)
        key = rotate(rms_norm(key, k_norm, eps), rotary_base)
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
    """Return the weights of Mixture-of-Head attention, token by token (arXiv 2410.11842, equations
    5 to 10), ``[B, S, H]``, and the load-balance loss of equation 7.

    The authors' code (SkyworkAI/MoH) differs from equation 5: weights of shared heads are
    multiplied by their number, those of the chosen ones are divided by their sum and multiplied by
    their number, and ``alpha`` is multiplied by 2. Norms of queries are divided by their standard
    deviation.

    Args:
        queries: of each head, ``[B, S, D]``, after the knock and before QK-norm.
        router: ``[H + 2, K]``: ``W_s``, ``W_r`` and ``W_h``, or None for norms of queries.
        shared: number of shared heads, which come first.
        active: number of routed heads of a token.
        scale: ``code`` or ``paper``.
        quantized: whether heads weigh 1, and gradients pass the threshold (equations 9 and 10).
    """
    heads = len(queries)
    routed = heads - shared

    def softmax(scores: list[Tensor]) -> list[Tensor]:
        total = sum(torch.exp(score) for score in scores)
        return [torch.exp(score) / total for score in scores]

    def normalised_norms(b: int, t: int) -> list[Tensor]:
        norms = [query[b, t].pow(2).sum().sqrt() for query in queries[shared:]]
        if scale != "code":
            return norms
        mean = sum(norms) / routed
        variance = sum((norm - mean) ** 2 for norm in norms) / (routed - 1)
        return [norm / variance**0.5 for norm in norms]

    token_weights = []
    probabilities = []
    selections = []
    for b in range(hidden.shape[0]):
        for t in range(hidden.shape[1]):
            alpha = None
            if router is None:
                p = softmax(normalised_norms(b, t))
                shared_weights = [hidden.new_ones(()) for _ in range(shared)]
                routed_weights = p
            else:
                scores = [row @ hidden[b, t] for row in router]
                p = softmax(scores[shared:heads])
                alpha = softmax(scores[heads:])
                shared_weights = [alpha[0] * weight for weight in softmax(scores[:shared])]
                routed_weights = [alpha[1] * weight for weight in p]
            ranked = sorted(range(routed), key=lambda i: -p[i].item())
            chosen = [i in ranked[:active] for i in range(routed)]
            weights = []
            if quantized:
                is_on = [True] * shared + chosen
                real_weights = [*shared_weights, *routed_weights]
                for on, weight in zip(is_on, real_weights, strict=True):
                    weights.append((int(on) - weight).detach() + weight)
            else:
                if scale == "code":
                    factor = active if alpha is None else 2 * active
                    total = sum(p[i] for i in range(routed) if chosen[i])
                    routed_weights = [weight / total * factor for weight in routed_weights]
                    if alpha is not None:
                        shared_weights = [weight * shared * 2 for weight in shared_weights]
                weights += shared_weights
                for is_chosen, weight in zip(chosen, routed_weights, strict=True):
                    weights.append(weight if is_chosen else 0 * weight)
            token_weights.append(torch.stack(weights))
            probabilities.append(torch.stack(p))
            selections.append(chosen)
    tokens = len(token_weights)
    loss = 0
    for i in range(routed):
        probability = sum(p[i] for p in probabilities) / tokens
        load = sum(chosen[i] for chosen in selections) / tokens
        loss += probability * load
    return torch.stack(token_weights).view(*hidden.shape[:2], heads), loss


def tied_attention(
    hidden: Tensor,
    w_query: Tensor,
    w_tied: Tensor,
    w_rotary: Tensor,
    w_output: Tensor,
    kha: HeadsConfig,
    matrices: dict[str, list[Tensor]],
    *,
    num_query_groups: int,
    head_dim: int,
    rotary_base: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute Grouped-Tied Attention: keys and values of a group are one state of ``D`` features.

    The whole state is the value, and its first half is the half of the key without position. The
    other half of the key, with the rotary embedding, is one head of ``D / 2`` features for all
    groups. A query head has both halves. A cache stores the ``G`` states and that one head:
    ``G D + D / 2`` numbers per token. The state is knocked once. QK-norm is applied to whole heads
    before the rotary embedding, as in :func:`attention`.

    Args:
        w_query: ``[K, H * D]``, the rotary half of each head first, as in ``q_norm``.
        w_tied: ``[K, G * D]``.
        w_rotary: ``[K, D / 2]``.
        w_output: ``[H * D, K]``.
        kha: ``value`` is the variant of the tied state.
    """
    heads = w_query.shape[1] // head_dim
    half = head_dim // 2

    def project(weight: Tensor, head: int, name: str) -> Tensor:
        x = hidden @ weight[:, head * head_dim : (head + 1) * head_dim]
        return knock_head(x, matrices.get(name), kha.variants.get(name))

    def normed_and_rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = rms_norm(x, norm, eps)
        rotated = rotate(x[..., :half], rotary_base)
        return torch.cat([rotated, x[..., half:]], dim=-1)

    outputs = []
    for head in range(heads):
        query = project(w_query, head, "query")
        tied = project(w_tied, head // (heads // num_query_groups), "value")
        key = torch.cat([hidden @ w_rotary, tied[..., :half]], dim=-1)
        query = normed_and_rotated(query, q_norm)
        key = normed_and_rotated(key, k_norm)
        outputs.append(attend(query, key, tied))
    return torch.cat(outputs, dim=-1) @ w_output


def latent_attention(
    hidden: Tensor,
    w_query: Tensor,
    w_latent: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    w_rotary: Tensor,
    w_output: Tensor,
    kha: HeadsConfig,
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
    """Compute Multi-head Latent Attention, or Grouped Latent Attention with several latent heads.

    Keys and values of a head are up-projections of a latent without position, and one rotary key of
    ``R`` features is shared by all heads. In GLA the latent has ``kha.latent_heads`` heads. Each is
    normalised separately and gives keys and values to its own group of query heads. A cache stores
    the ``C`` numbers of the latent and the ``R`` of the rotary key per token.

    The parts of queries (``n`` features per head) and keys without position, and values (``v``
    features per head), are knocked after the up-projections. The matrices are linear and fold into
    these.

    Args:
        w_query: ``[K or Q, H * (n + R)]``, the rotary part of each head last.
        w_latent: ``[K, C]``, latent heads outermost.
        w_key: ``[C / latent heads, H * n]``. ``w_value`` is ``[..., H * v]``.
        w_rotary: ``[K, R]``.
        w_output: ``[H * v, K]``.
        heads: ``H``.
        rotary_base: the rotary embedding turns neighbouring features.
        w_query_latent: ``[K, Q]``, or None for queries without a latent.
        q_norm: ``[Q]``. ``kv_norm`` ``[C]`` is for each latent head.
        gate: may only gate the output.
    """
    latent_heads = kha.latent_heads if kha.attention == "gla" else 1
    rotary_dim = w_rotary.shape[1]
    nope = w_key.shape[1] // heads
    value_dim = w_value.shape[1] // heads
    query_source = hidden
    if w_query_latent is not None:
        query_source = rms_norm(hidden @ w_query_latent, q_norm, eps)
    latents = list((hidden @ w_latent).chunk(latent_heads, dim=-1))
    if kv_norm is not None:
        for latent_head, weight in enumerate(kv_norm.chunk(latent_heads)):
            latents[latent_head] = rms_norm(latents[latent_head], weight, eps)
    rotary_key = rotate_pairs(hidden @ w_rotary, rotary_base)

    def knocked(x: Tensor, name: str) -> Tensor:
        return knock_head(x, matrices.get(name), kha.variants.get(name))

    outputs = []
    for head in range(heads):
        latent = latents[head // (heads // latent_heads)]
        query = query_source @ columns_of_head(w_query, head, nope + rotary_dim)
        key = latent @ columns_of_head(w_key, head, nope)
        value = latent @ columns_of_head(w_value, head, value_dim)
        nope_query = knocked(query[..., :nope], "query")
        rotary_query = rotate_pairs(query[..., nope:], rotary_base)
        query = torch.cat([nope_query, rotary_query], dim=-1)
        key = torch.cat([knocked(key, "key"), rotary_key], dim=-1)
        output = attend(query, key, knocked(value, "value"))
        outputs.append(gate_head(output, hidden, "output", head, gate, gate_weights or {}))
    return torch.cat(outputs, dim=-1) @ w_output


def columns_of_head(weight: Tensor, head: int, width: int) -> Tensor:
    return weight[:, head * width : (head + 1) * width]


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
    """Compute talking or collaborative heads.

    Talking heads are described by Shazeer et al. 2020 (arXiv 2003.02436, section 2), collaborative
    heads by Cordonnier et al. 2020 (arXiv 2006.16362, section 3.2).

    Talking heads: the softmax of head ``k`` gets the sum over heads ``h`` of ``pre[h, k]`` times
    the logits of ``h``, and its values get the sum of ``post[h, k]`` times the softmax of ``h``.
    The causal mask is applied after the first sum.

    Collaborative heads: all heads have one query and one key of ``Dk`` features, and head ``i``
    multiplies each feature of the query by its own number. Norms and the rotary embedding follow.

    Args:
        w_query: ``[K, H * D]``, or ``[K, Dk]`` with ``mixing``.
        w_key: ``[K, G * D]``, or ``[K, Dk]`` with ``mixing``.
        w_value: ``[K, G * V]``.
        w_output: ``[H * V, K]``.
        pre: ``[H, H]``, or None for no mixing of logits. ``post`` mixes weights.
        mixing: ``[H, Dk]`` of collaborative heads, or None.
        rotary_dim: number of rotated features, which come first, or None for all.
    """
    value_dim = w_value.shape[1] // num_query_groups
    heads = w_output.shape[0] // value_dim
    length = hidden.shape[1]

    def normed_and_rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = rms_norm(x, norm, eps)
        dim = rotary_dim or x.shape[-1]
        rotated = rotate(x[..., :dim], rotary_base)
        return torch.cat([rotated, x[..., dim:]], dim=-1)

    def project(weight: Tensor, head: int, weight_heads: int) -> Tensor:
        width = weight.shape[1] // weight_heads
        return hidden @ columns_of_head(weight, head, width)

    logits = []
    values = []
    for head in range(heads):
        group = head // (heads // num_query_groups)
        if mixing is not None:
            query = (hidden @ w_query) * mixing[head]
            key = hidden @ w_key
        else:
            query = project(w_query, head, heads)
            key = project(w_key, group, num_query_groups)
        query = normed_and_rotated(query, q_norm)
        key = normed_and_rotated(key, k_norm)
        products = torch.einsum("bqd,bkd->bqk", query, key)
        logits.append(products / math.sqrt(query.shape[-1]))
        values.append(project(w_value, group, num_query_groups))

    def mix(of_heads: list[Tensor], weight: Tensor | None) -> list[Tensor]:
        if weight is None:
            return of_heads
        return [
            torch.stack([weight[h, k] * x for h, x in enumerate(of_heads)]).sum(0)
            for k in range(heads)
        ]

    future = torch.ones(
        length,
        length,
        dtype=torch.bool,
        device=hidden.device,
    ).triu(1)
    weights = [x.masked_fill(future, -torch.inf).softmax(-1) for x in mix(logits, pre)]
    outputs = [
        torch.einsum("bqk,bkd->bqd", weight, value)
        for weight, value in zip(mix(weights, post), values, strict=True)
    ]
    return torch.cat(outputs, dim=-1) @ w_output
