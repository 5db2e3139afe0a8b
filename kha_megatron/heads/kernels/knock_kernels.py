"""Triton kernels for KHA: forward, input gradient and weight gradients.

See ``tiles`` for the tile sizes. In addition, ``R`` is the number of rows (one row per token and
head) and ``S`` the number of splits. The backward kernels recompute the matmuls instead of saving
intermediate results.

All kernels are persistent, i.e. each program loads the matrices once and then loops over tiles of
``M`` rows. There are two ways to load rows: through pointers (any stride between tokens and heads)
or through a TMA descriptor (needs a uniform stride between rows, but uses fewer registers). A tile
in registers cannot be indexed by column, so we load the columns of a block (``x_j``) a second time.
"""

# ruff: noqa: RET505 (Triton compiles the code after a returning `if`, so `else` is needed)

import triton
import triton.language as tl

from kha_megatron.heads.kernels.tiles import (
    add_input_gradient,
    dot_add,
    hidden_gradients,
    knock_tile,
    load_rows,
    load_weights,
    store_matrix,
    store_rows,
)


@triton.jit
def read_tile(
    X,
    first,
    R,
    heads,
    token,
    head,
    D: tl.constexpr,
    M: tl.constexpr,
    P: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        return X.load([first, 0])
    else:
        return load_rows(X, first, R, 0, heads, token, head, D, M, P)


@triton.jit
def write_tile(
    X,
    tile,
    first,
    R,
    heads,
    token,
    head,
    D: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        X.store([first, 0], tile.to(X.dtype))
    else:
        store_rows(X, tile, first, R, 0, heads, token, head, D)


@triton.jit(do_not_specialize=["R"])
def knock_forward_kernel(
    X,
    x_heads,
    x_token,
    x_head,
    W,
    Y,
    y_heads,
    y_token,
    y_head,
    R,
    VARIANT: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute ``Y = knock(X)``.

    Args:
        X: Input rows. ``x_heads``, ``x_token`` and ``x_head`` are their :class:`Strides`.
        W: Stacked matrices of shape [num_matrices, D, D], contiguous.
        R: Number of rows.
        TMA: Whether ``X`` and ``Y`` are tensor descriptors.
    """
    if J == P:
        weights = load_weights(W, 0, VARIANT, D, P, P)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, M), tl.num_programs(0), disable_licm=True):
        first = tile * M
        x = read_tile(X, first, R, x_heads, x_token, x_head, D, M, P, TMA)
        if J == P:
            y = knock_tile(x, x, weights, VARIANT)
            write_tile(Y, y, first, R, y_heads, y_token, y_head, D, TMA)
        elif VARIANT == "mlp":
            y = tl.zeros((M, P), tl.float32)
            for j in tl.range(0, D, J):
                block = load_weights(W, j, VARIANT, D, P, J)
                y += knock_tile(x, x, block, VARIANT)
            write_tile(Y, y, first, R, y_heads, y_token, y_head, D, TMA)
        else:
            for j in tl.range(0, D, J):
                x_j = load_rows(X, first, R, j, x_heads, x_token, x_head, D, M, J)
                block = load_weights(W, j, VARIANT, D, P, J)
                y_j = knock_tile(x, x_j, block, VARIANT)
                store_rows(Y, y_j, first, R, j, y_heads, y_token, y_head, D)


@triton.jit(do_not_specialize=["R"])
def knock_backward_input_kernel(
    X,
    x_heads,
    x_token,
    x_head,
    DY,
    dy_heads,
    dy_token,
    dy_head,
    W,
    DX,
    dx_heads,
    dx_token,
    dx_head,
    R,
    VARIANT: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute ``DX``, the gradient of the input."""
    if J == P:
        weights = load_weights(W, 0, VARIANT, D, P, P)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, M), tl.num_programs(0), disable_licm=True):
        first = tile * M
        dy = read_tile(DY, first, R, dy_heads, dy_token, dy_head, D, M, P, TMA)
        x = read_tile(X, first, R, x_heads, x_token, x_head, D, M, P, TMA)
        dx = tl.zeros((M, P), tl.float32)
        if J == P:
            gradients = hidden_gradients(x, x, dy, dy, weights, VARIANT)
            dx = add_input_gradient(dx, gradients, weights, 0, VARIANT)
        else:
            for j in tl.range(0, D, J):
                block = load_weights(W, j, VARIANT, D, P, J)
                if VARIANT == "mlp":
                    gradients = hidden_gradients(x, x, dy, dy, block, VARIANT)
                else:
                    x_j = load_rows(X, first, R, j, x_heads, x_token, x_head, D, M, J)
                    dy_j = load_rows(DY, first, R, j, dy_heads, dy_token, dy_head, D, M, J)
                    gradients = hidden_gradients(x, x_j, dy, dy_j, block, VARIANT)
                dx = add_input_gradient(dx, gradients, block, j, VARIANT)
        write_tile(DX, dx, first, R, dx_heads, dx_token, dx_head, D, TMA)


@triton.jit(do_not_specialize=["R"])
def knock_backward_weight_kernel(
    X,
    x_heads,
    x_token,
    x_head,
    DY,
    dy_heads,
    dy_token,
    dy_head,
    W,
    PARTIAL,
    R,
    VARIANT: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute the gradient of the matrices. The rows are split into ``S`` partial sums.

    The grid is ``(S, blocks)``. Each program computes ``J`` columns of every matrix (rows of
    ``down``), so that the accumulators fit into registers and no matmul is done twice. ``PARTIAL``
    is a float32 tensor of shape [S, num_matrices, D, D].
    """
    j = tl.program_id(1) * J
    every = tl.arange(0, P)
    block = j + tl.arange(0, J)
    weights = load_weights(W, j, VARIANT, D, P, J)
    d_first = tl.zeros((P, J), tl.float32)
    if VARIANT == "mlp":
        d_gate = tl.zeros((P, J), tl.float32)
        d_down = tl.zeros((P, J), tl.float32)  # transposed: tensor cores need 64 rows
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, M), tl.num_programs(0), disable_licm=True):
        first = tile * M
        x = read_tile(X, first, R, x_heads, x_token, x_head, D, M, P, TMA)
        dy = read_tile(DY, first, R, dy_heads, dy_token, dy_head, D, M, P, TMA)
        if VARIANT == "mlp" or J == P:
            gradients = hidden_gradients(x, x, dy, dy, weights, VARIANT)
        else:
            x_j = load_rows(X, first, R, j, x_heads, x_token, x_head, D, M, J)
            dy_j = load_rows(DY, first, R, j, dy_heads, dy_token, dy_head, D, M, J)
            gradients = hidden_gradients(x, x_j, dy, dy_j, weights, VARIANT)
        x_columns = tl.trans(x)
        d_first = dot_add(x_columns, gradients[0], d_first)
        if VARIANT == "mlp":
            d_gate = dot_add(x_columns, gradients[1], d_gate)
            d_down = dot_add(tl.trans(dy), gradients[2], d_down)
    if VARIANT == "mlp":
        target = PARTIAL + tl.program_id(0).to(tl.int64) * (3 * D * D)
        store_matrix(target + D * D, every, block, d_gate, D)
        store_matrix(target + 2 * D * D, block, every, tl.trans(d_down), D)
    else:
        target = PARTIAL + tl.program_id(0).to(tl.int64) * (D * D)
    store_matrix(target, every, block, d_first, D)


@triton.jit(do_not_specialize=["S", "N"])
def sum_partials(PARTIAL, DW, S, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``PARTIAL`` over its ``S`` rows in a fixed order. Loads ``SPLITS`` rows at once to hide
    latency."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, S, SPLITS):
        s = first + tl.arange(0, SPLITS)
        inside = (s < S)[:, None] & (i < N)[None, :]
        source = PARTIAL + s[:, None] * N + i[None, :]
        partials = tl.load(source, mask=inside, other=0.0)
        total += tl.sum(partials, 0)
    tl.store(DW + i, total.to(DW.dtype.element_ty), mask=i < N)
