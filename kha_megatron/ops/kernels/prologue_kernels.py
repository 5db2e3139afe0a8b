"""The Triton kernel of the prologue, forward and backward: split, QK-norm, RoPE.

Shape legend: ``T`` tokens (sequence times batch ``b``), ``G`` key/value heads, ``QUERIES`` query
heads of each, ``D`` head dim, ``HALF`` features that turn against as many others, ``REST`` those of
a head that do not turn; ``P``, ``PH`` and ``PR`` their powers of two.

A tile is ``M`` tokens of one group: all its query heads, its key, its value. The angles of a
tile's tokens are read once for all its heads, and their cosines never lie in memory: computing them
takes less than reading them would. A head's row lies in up to three pieces, ``[M, PH]``
twice and ``[M, PR]``, because a program cannot reach columns that it holds elsewhere: the two that
turn against each other then meet in the same registers, and each column is read once.

``XQ``, ``XK`` and ``XV`` are the rows before the kernel: places in the QKV buffer, or elsewhere for
queries and keys that were knocked before. They have strides of their own between sequence, batch
and groups; a group's query heads are neighbours. ``Q``, ``K`` and ``V`` are contiguous.

The kernel waits for memory and for little else, so it is kept small enough for many programs to run
on a multiprocessor at once. That is why values are not knocked in it: three matrices and their
tiles leave room for one program, which cannot keep the memory busy.
"""

# ruff: noqa: RET505, SIM108 (Triton compiles both sides of a conditional expression, and what
# follows an `if` that returned)

import triton
import triton.language as tl

from kha_megatron.ops.kernels.tiles import INTERPRETED


@triton.jit
def row_starts(tokens, b, s_stride, b_stride, offset):
    """Where the rows of these tokens start, in elements: ``[M]``."""
    s = (tokens // b).to(tl.int64)
    return s * s_stride + (tokens % b).to(tl.int64) * b_stride + offset


@triton.jit
def load_piece(X, starts, rows, first, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """``[M, PADDED]`` in float32: ``SIZE`` columns from ``first`` on, and zeros."""
    columns = tl.arange(0, PADDED)
    inside = rows[:, None] & (columns < SIZE)[None, :]
    to = X + starts[:, None] + (first + columns)[None, :]
    return tl.load(to, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_piece(X, piece, starts, rows, first, SIZE: tl.constexpr):
    """Write the first ``SIZE`` columns of ``piece`` ``[M, PADDED]`` to column ``first`` on."""
    columns = tl.arange(0, piece.shape[1])
    inside = rows[:, None] & (columns < SIZE)[None, :]
    to = X + starts[:, None] + (first + columns)[None, :]
    tl.store(to, piece.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_gain(GAIN, first, SIZE: tl.constexpr, PADDED: tl.constexpr, CENTRE: tl.constexpr):
    """``[1, PADDED]`` in float32: what a norm multiplies these columns by, and zeros."""
    columns = tl.arange(0, PADDED)
    gain = tl.load(GAIN + first + columns, mask=columns < SIZE, other=0.0)
    return (gain.to(tl.float32) + CENTRE)[None, :]


@triton.jit
def copy_rows(X, Y, starts, to, rows, D: tl.constexpr, P: tl.constexpr):
    """A head of ``M`` tokens, as it is."""
    columns = tl.arange(0, P)
    inside = rows[:, None] & (columns < D)[None, :]
    x = tl.load(X + starts[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(Y + to[:, None] + columns[None, :], x, mask=inside)


@triton.jit
def load_pieces(
    X, starts, rows,
    HALF: tl.constexpr, PH: tl.constexpr, REST: tl.constexpr, PR: tl.constexpr,
):  # fmt: skip
    """A head of ``M`` tokens. Without ``REST`` the third piece is a column of zeros."""
    a = load_piece(X, starts, rows, 0, HALF, PH)
    b = load_piece(X, starts, rows, HALF, HALF, PH)
    if REST:
        c = load_piece(X, starts, rows, 2 * HALF, REST, PR)
    else:
        c = tl.zeros((a.shape[0], 1), tl.float32)
    return a, b, c


@triton.jit
def store_pieces(X, pieces, starts, rows, HALF: tl.constexpr, REST: tl.constexpr):
    """Write heads from their pieces: two halves that turn, and the rest behind them."""
    store_piece(X, pieces[0], starts, rows, 0, HALF)
    store_piece(X, pieces[1], starts, rows, HALF, HALF)
    if REST:
        store_piece(X, pieces[2], starts, rows, 2 * HALF, REST)


@triton.jit
def load_gains(
    GAIN,
    HALF: tl.constexpr, PH: tl.constexpr, REST: tl.constexpr, PR: tl.constexpr,
    NORM: tl.constexpr, CENTRE: tl.constexpr,
):  # fmt: skip
    """The norm's weight, in the pieces of a head; nothing that is read where there is no norm."""
    if NORM:
        a = load_gain(GAIN, 0, HALF, PH, CENTRE)
        b = load_gain(GAIN, HALF, HALF, PH, CENTRE)
        if REST:
            c = load_gain(GAIN, 2 * HALF, REST, PR, CENTRE)
        else:
            c = tl.zeros((1, 1), tl.float32)
    else:
        a = 0.0
        b = 0.0
        c = 0.0
    return a, b, c


@triton.jit
def inner(x, y):
    """Sum over a head's features of the product of two: ``[M, 1]``."""
    total = tl.sum(x[0] * y[0], axis=1) + tl.sum(x[1] * y[1], axis=1) + tl.sum(x[2] * y[2], axis=1)
    return total[:, None]


@triton.jit
def times(x, y):
    """The products of two heads' elements, in their three pieces ``[M, ...]``."""
    return x[0] * y[0], x[1] * y[1], x[2] * y[2]


@triton.jit
def turned(x, cos, sin):
    """RoPE; with ``-sin`` its inverse, which is its gradient."""
    return x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin, x[2]


@triton.jit
def scale_of(x, eps, D: tl.constexpr):
    """What RMSNorm multiplies each row by: ``[M, 1]``."""
    return tl.rsqrt(inner(x, x) / D + eps)


@triton.jit
def prepared(x, gains, cos, sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr):
    """A query or key: normalised and turned."""
    if NORM:
        scale = scale_of(x, eps, D)
        x = times((x[0] * scale, x[1] * scale, x[2] * scale), gains)
    if TURN:
        x = turned(x, cos, sin)
    return x


@triton.jit
def prepared_gradient(
    x, dy, gains, cos, sin, eps, NORM: tl.constexpr, TURN: tl.constexpr, D: tl.constexpr
):
    """The gradient of ``x`` from that of :func:`prepared`, and each row's of the norm's weight."""
    if TURN:
        dy = turned(dy, cos, -sin)
    if NORM:
        scale = scale_of(x, eps, D)
        unit = (x[0] * scale, x[1] * scale, x[2] * scale)
        d_gains = times(dy, unit)
        dy = times(dy, gains)
        along = inner(dy, unit) / D
        dx = (
            (dy[0] - unit[0] * along) * scale,
            (dy[1] - unit[1] * along) * scale,
            (dy[2] - unit[2] * along) * scale,
        )
    else:
        d_gains = dy
        dx = dy
    return dx, d_gains


@triton.jit
def cosine_and_sine(angle, dtype: tl.constexpr):
    """Of radians in float32, as accurate as ``dtype``, a head's, can tell.

    The whole turns go in float64, which leaves nothing of the rounding that a long sequence's
    angles would suffer. Of the rest the two instructions ``cos.approx`` and ``sin.approx`` are off
    by at most 2**-20.5 (PTX); two bytes are rounded by 2**-12 or more.
    """
    turns = angle.to(tl.float64) * 0.15915494309189535
    rest = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    if INTERPRETED or dtype == tl.float32:
        return tl.cos(rest), tl.sin(rest)
    else:
        cosine: tl.constexpr = "cos.approx.f32 $0, $1;"
        sine: tl.constexpr = "sin.approx.f32 $0, $1;"
        return (
            tl.inline_asm_elementwise(cosine, "=f,f", [rest], tl.float32, is_pure=True, pack=1),
            tl.inline_asm_elementwise(sine, "=f,f", [rest], tl.float32, is_pure=True, pack=1),
        )


@triton.jit
def load_turn(
    ANGLES, tokens, rows, angle_tokens, dtype: tl.constexpr,
    TURN: tl.constexpr, HALF: tl.constexpr, PH: tl.constexpr,
):  # fmt: skip
    """Cosine and sine ``[M, PH]`` of these tokens' angles."""
    if TURN:
        starts = (tokens // angle_tokens).to(tl.int64) * (2 * HALF)
        cos, sin = cosine_and_sine(load_piece(ANGLES, starts, rows, 0, HALF, PH), dtype)
    else:
        cos = 1.0
        sin = 0.0
    return cos, sin


@triton.jit(do_not_specialize=["T"])
def prologue_forward(
    XQ, xq_s, xq_b, xq_group,
    XK, xk_s, xk_b, xk_group,
    XV, xv_s, xv_b, xv_group,
    GAIN_Q, GAIN_K,
    ANGLES, angle_tokens,
    Q, K, V,
    T, b, eps,
    COPY_V: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, CENTRE: tl.constexpr,
    TURN: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    P: tl.constexpr, PH: tl.constexpr, PR: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``Q``, ``K`` and ``V`` as the core attention takes them; a program for each tile.

    Args:
        XQ: the first wanted query head of the first group and token; likewise ``XK`` and ``XV``.
        xq_s, xq_b, xq_group: strides in elements, the last between groups.
        GAIN_Q, GAIN_K: ``[D]``, the norms' weights.
        ANGLES: ``[.., 2 * HALF]`` float32, of which the first half is read; row
            ``t // angle_tokens`` is token ``t``'s.
        Q, K, V: ``[T, G * QUERIES, D]``, ``[T, G, D]``, ``[T, G, D]``.
        COPY_V: whether to copy values; those that are knocked are not there yet.
        CENTRE: what a norm adds to its weight.
    """
    tile = tl.program_id(0)
    group = tl.cast(tile % G, tl.int64)
    tokens = tile // G * M + tl.arange(0, M)
    rows = tokens < T
    if COPY_V:
        starts = row_starts(tokens, b, xv_s, xv_b, group * xv_group)
        to = row_starts(tokens, 1, G * D, 0, group * D)
        copy_rows(XV, V, starts, to, rows, D, P)
    dtype: tl.constexpr = XQ.dtype.element_ty
    cos, sin = load_turn(ANGLES, tokens, rows, angle_tokens, dtype, TURN, HALF, PH)
    gains = load_gains(GAIN_K, HALF, PH, REST, PR, NORM_K, CENTRE)
    starts = row_starts(tokens, b, xk_s, xk_b, group * xk_group)
    x = load_pieces(XK, starts, rows, HALF, PH, REST, PR)
    k = prepared(x, gains, cos, sin, eps, NORM_K, TURN, D)
    store_pieces(K, k, row_starts(tokens, 1, G * D, 0, group * D), rows, HALF, REST)
    gains = load_gains(GAIN_Q, HALF, PH, REST, PR, NORM_Q, CENTRE)
    x_starts = row_starts(tokens, b, xq_s, xq_b, group * xq_group)
    starts = row_starts(tokens, 1, G * QUERIES * D, 0, group * QUERIES * D)
    for head in tl.range(0, QUERIES, num_stages=STAGES):
        x = load_pieces(XQ, x_starts + head * D, rows, HALF, PH, REST, PR)
        q = prepared(x, gains, cos, sin, eps, NORM_Q, TURN, D)
        store_pieces(Q, q, starts + head * D, rows, HALF, REST)


@triton.jit
def plus(x, y):
    """The sums of two heads' elements, in their three pieces ``[M, ...]``."""
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


@triton.jit
def zeros(M: tl.constexpr, PH: tl.constexpr, PR: tl.constexpr):
    """The pieces of ``M`` rows."""
    half = tl.zeros((M, PH), tl.float32)
    return half, half, tl.zeros((M, PR), tl.float32)


@triton.jit
def store_sum(TO, pieces, HALF: tl.constexpr, REST: tl.constexpr):
    """``[D]``, the sum of the rows."""
    first = tl.arange(0, pieces[0].shape[1])
    tl.store(TO + first, tl.sum(pieces[0], axis=0), mask=first < HALF)
    tl.store(TO + HALF + first, tl.sum(pieces[1], axis=0), mask=first < HALF)
    if REST:
        rest = tl.arange(0, pieces[2].shape[1])
        tl.store(TO + 2 * HALF + rest, tl.sum(pieces[2], axis=0), mask=rest < REST)


@triton.jit(do_not_specialize=["T"])
def prologue_backward(
    XQ, xq_s, xq_b, xq_group,
    XK, xk_s, xk_b, xk_group,
    GAIN_Q, GAIN_K,
    ANGLES, angle_tokens,
    DQ, dq_s, dq_b, dq_head,
    DK, dk_s, dk_b, dk_head,
    DV, dv_s, dv_b, dv_head,
    DXQ, dxq_token, dxq_group,
    DXK, dxk_token, dxk_group,
    DXV, dxv_token, dxv_group,
    PARTIAL,
    T, b, eps,
    COPY_V: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, CENTRE: tl.constexpr,
    TURN: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    P: tl.constexpr, PH: tl.constexpr, PR: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of all rows, and of the norms' weights one partial sum for each program.

    Args:
        DQ, DK, DV: gradients of the outputs, with strides between sequence, batch and heads.
        DXQ, DXK, DXV: gradients of the rows, with strides between tokens and groups.
        PARTIAL: ``[programs, 2, D]`` float32, for queries and keys, written where there is a norm.
    """
    dq_head = tl.cast(dq_head, tl.int64)  # like the others; converting it anew takes registers
    if NORM_Q:
        sums_q = zeros(M, PH, PR)
    if NORM_K:
        sums_k = zeros(M, PH, PR)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, M) * G, tl.num_programs(0)):
        group = tl.cast(tile % G, tl.int64)
        tokens = tile // G * M + tl.arange(0, M)
        rows = tokens < T
        if COPY_V:
            starts = row_starts(tokens, b, dv_s, dv_b, group * dv_head)
            to = row_starts(tokens, 1, dxv_token, 0, group * dxv_group)
            copy_rows(DV, DXV, starts, to, rows, D, P)
        dtype: tl.constexpr = XQ.dtype.element_ty
        cos, sin = load_turn(ANGLES, tokens, rows, angle_tokens, dtype, TURN, HALF, PH)
        gains = load_gains(GAIN_K, HALF, PH, REST, PR, NORM_K, CENTRE)
        x_starts = row_starts(tokens, b, xk_s, xk_b, group * xk_group)
        x = load_pieces(XK, x_starts, rows, HALF, PH, REST, PR)
        dy_starts = row_starts(tokens, b, dk_s, dk_b, group * dk_head)
        dy = load_pieces(DK, dy_starts, rows, HALF, PH, REST, PR)
        dx, d_gains = prepared_gradient(x, dy, gains, cos, sin, eps, NORM_K, TURN, D)
        starts = row_starts(tokens, 1, dxk_token, 0, group * dxk_group)
        store_pieces(DXK, dx, starts, rows, HALF, REST)
        if NORM_K:
            sums_k = plus(sums_k, d_gains)
        gains = load_gains(GAIN_Q, HALF, PH, REST, PR, NORM_Q, CENTRE)
        x_starts = row_starts(tokens, b, xq_s, xq_b, group * xq_group)
        dy_starts = row_starts(tokens, b, dq_s, dq_b, group * QUERIES * dq_head)
        starts = row_starts(tokens, 1, dxq_token, 0, group * dxq_group)
        for head in tl.range(0, QUERIES, num_stages=STAGES):
            x = load_pieces(XQ, x_starts + head * D, rows, HALF, PH, REST, PR)
            dy = load_pieces(DQ, dy_starts + head * dq_head, rows, HALF, PH, REST, PR)
            dx, d_gains = prepared_gradient(x, dy, gains, cos, sin, eps, NORM_Q, TURN, D)
            store_pieces(DXQ, dx, starts + head * D, rows, HALF, REST)
            if NORM_Q:
                sums_q = plus(sums_q, d_gains)
    to = PARTIAL + tl.program_id(0) * (2 * D)
    if NORM_Q:
        store_sum(to, sums_q, HALF, REST)
    if NORM_K:
        store_sum(to + D, sums_k, HALF, REST)
