"""Triton kernels for KHA: forward, input gradient and weight gradients.

See ``tiles`` for the tile sizes. There is one row per token and head. The backward kernels
recompute the matmuls instead of saving intermediate results. A tensor ``X`` of rows has the strides
``x_heads``, ``x_token`` and ``x_head`` (see :class:`rows.Strides`).

All kernels are persistent, i.e. each program loads the matrices once and then loops over tiles of
rows. There are two ways to load rows: through pointers (any stride between tokens and heads) or
through a TMA descriptor (needs a uniform stride between rows, but uses fewer registers). A tile in
registers cannot be indexed by column, so we load the columns of a block (``x_j``) a second time.

If the matrices fit into shared memory (``BLOCK_COLUMNS == PADDED_DIM``), a program keeps all of
them. Otherwise it loads one block of columns after another for each tile. For ``mlp``, a block of
hidden features contributes to all columns of the result, so we add up the blocks. For the other
variants, a block contains some columns of the result, so we store it right away.
"""

# ruff: noqa: RET505 (Triton compiles the code after a returning `if`, so `else` is needed)

import triton
import triton.language as tl

from kha_megatron.heads.kernels.tiles import (
    add_input_gradient,
    dot_add,
    hidden_gradients,
    is_inside,
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
    num_rows,
    heads,
    token,
    head,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        return X.load([first, 0])
    else:
        return load_rows(X, first, num_rows, 0, heads, token, head, HEAD_DIM, TILE_ROWS, PADDED_DIM)


@triton.jit
def write_tile(
    X,
    tile,
    first,
    num_rows,
    heads,
    token,
    head,
    HEAD_DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        X.store([first, 0], tile.to(X.dtype))
    else:
        store_rows(X, tile, first, num_rows, 0, heads, token, head, HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows"])
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
    num_rows,
    VARIANT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute ``Y = knock(X)``.

    Args:
        X: Input rows. ``x_heads``, ``x_token`` and ``x_head`` are their :class:`Strides`.
        W: Stacked matrices of shape [num_matrices, HEAD_DIM, HEAD_DIM], contiguous.
        num_rows: Number of rows.
        TMA: Whether ``X`` and ``Y`` are tensor descriptors.
    """
    if BLOCK_COLUMNS == PADDED_DIM:
        weights = load_weights(W, 0, VARIANT, HEAD_DIM, PADDED_DIM, PADDED_DIM)
    tiles = tl.cdiv(num_rows, TILE_ROWS)
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, programs, disable_licm=True):
        first = tile * TILE_ROWS
        x = read_tile(
            X, first, num_rows, x_heads, x_token, x_head, HEAD_DIM, TILE_ROWS, PADDED_DIM, TMA
        )
        if BLOCK_COLUMNS == PADDED_DIM:
            y = knock_tile(x, x, weights, VARIANT)
            write_tile(Y, y, first, num_rows, y_heads, y_token, y_head, HEAD_DIM, TMA)
        elif VARIANT == "mlp":
            y = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
            for j in tl.range(0, HEAD_DIM, BLOCK_COLUMNS):
                block = load_weights(W, j, VARIANT, HEAD_DIM, PADDED_DIM, BLOCK_COLUMNS)
                y += knock_tile(x, x, block, VARIANT)
            write_tile(Y, y, first, num_rows, y_heads, y_token, y_head, HEAD_DIM, TMA)
        else:
            for j in tl.range(0, HEAD_DIM, BLOCK_COLUMNS):
                x_j = load_rows(
                    X,
                    first,
                    num_rows,
                    j,
                    x_heads,
                    x_token,
                    x_head,
                    HEAD_DIM,
                    TILE_ROWS,
                    BLOCK_COLUMNS,
                )
                block = load_weights(W, j, VARIANT, HEAD_DIM, PADDED_DIM, BLOCK_COLUMNS)
                y_j = knock_tile(x, x_j, block, VARIANT)
                store_rows(Y, y_j, first, num_rows, j, y_heads, y_token, y_head, HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows"])
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
    num_rows,
    VARIANT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute ``DX``, the gradient of the input."""
    if BLOCK_COLUMNS == PADDED_DIM:
        weights = load_weights(W, 0, VARIANT, HEAD_DIM, PADDED_DIM, PADDED_DIM)
    tiles = tl.cdiv(num_rows, TILE_ROWS)
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, programs, disable_licm=True):
        first = tile * TILE_ROWS
        dy = read_tile(
            DY, first, num_rows, dy_heads, dy_token, dy_head, HEAD_DIM, TILE_ROWS, PADDED_DIM, TMA
        )
        x = read_tile(
            X, first, num_rows, x_heads, x_token, x_head, HEAD_DIM, TILE_ROWS, PADDED_DIM, TMA
        )
        dx = tl.zeros((TILE_ROWS, PADDED_DIM), tl.float32)
        if BLOCK_COLUMNS == PADDED_DIM:
            gradients = hidden_gradients(x, x, dy, dy, weights, VARIANT)
            dx = add_input_gradient(dx, gradients, weights, 0, VARIANT)
        else:
            for j in tl.range(0, HEAD_DIM, BLOCK_COLUMNS):
                block = load_weights(W, j, VARIANT, HEAD_DIM, PADDED_DIM, BLOCK_COLUMNS)
                if VARIANT == "mlp":
                    gradients = hidden_gradients(x, x, dy, dy, block, VARIANT)
                else:
                    x_j = load_rows(
                        X,
                        first,
                        num_rows,
                        j,
                        x_heads,
                        x_token,
                        x_head,
                        HEAD_DIM,
                        TILE_ROWS,
                        BLOCK_COLUMNS,
                    )
                    dy_j = load_rows(
                        DY,
                        first,
                        num_rows,
                        j,
                        dy_heads,
                        dy_token,
                        dy_head,
                        HEAD_DIM,
                        TILE_ROWS,
                        BLOCK_COLUMNS,
                    )
                    gradients = hidden_gradients(x, x_j, dy, dy_j, block, VARIANT)
                dx = add_input_gradient(dx, gradients, block, j, VARIANT)
        write_tile(DX, dx, first, num_rows, dx_heads, dx_token, dx_head, HEAD_DIM, TMA)


@triton.jit(do_not_specialize=["num_rows"])
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
    num_rows,
    VARIANT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute the gradient of the matrices. The rows are split into ``num_splits`` partial sums.

    The grid is ``(num_splits, blocks)``. Each program computes one block of columns of every matrix
    (rows of ``down``), so that the accumulators fit into registers and no matmul is done twice.
    ``PARTIAL`` is a float32 tensor of shape [num_splits, num_matrices, HEAD_DIM, HEAD_DIM].
    """
    j = tl.program_id(1) * BLOCK_COLUMNS
    all_features = tl.arange(0, PADDED_DIM)
    block = j + tl.arange(0, BLOCK_COLUMNS)
    weights = load_weights(W, j, VARIANT, HEAD_DIM, PADDED_DIM, BLOCK_COLUMNS)
    d_first = tl.zeros((PADDED_DIM, BLOCK_COLUMNS), tl.float32)
    if VARIANT == "mlp":
        d_gate = tl.zeros((PADDED_DIM, BLOCK_COLUMNS), tl.float32)
        # transposed, because tensor cores need 64 rows
        d_down = tl.zeros((PADDED_DIM, BLOCK_COLUMNS), tl.float32)
    tiles = tl.cdiv(num_rows, TILE_ROWS)
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, programs, disable_licm=True):
        first = tile * TILE_ROWS
        x = read_tile(
            X, first, num_rows, x_heads, x_token, x_head, HEAD_DIM, TILE_ROWS, PADDED_DIM, TMA
        )
        dy = read_tile(
            DY, first, num_rows, dy_heads, dy_token, dy_head, HEAD_DIM, TILE_ROWS, PADDED_DIM, TMA
        )
        if VARIANT == "mlp" or BLOCK_COLUMNS == PADDED_DIM:
            gradients = hidden_gradients(x, x, dy, dy, weights, VARIANT)
        else:
            x_j = load_rows(
                X, first, num_rows, j, x_heads, x_token, x_head, HEAD_DIM, TILE_ROWS, BLOCK_COLUMNS
            )
            dy_j = load_rows(
                DY,
                first,
                num_rows,
                j,
                dy_heads,
                dy_token,
                dy_head,
                HEAD_DIM,
                TILE_ROWS,
                BLOCK_COLUMNS,
            )
            gradients = hidden_gradients(x, x_j, dy, dy_j, weights, VARIANT)
        x_columns = tl.trans(x)
        d_first = dot_add(x_columns, gradients[0], d_first)
        if VARIANT == "mlp":
            d_gate = dot_add(x_columns, gradients[1], d_gate)
            d_down = dot_add(tl.trans(dy), gradients[2], d_down)
    size: tl.constexpr = HEAD_DIM * HEAD_DIM
    if VARIANT == "mlp":
        target = PARTIAL + tl.program_id(0).to(tl.int64) * (3 * size)
        store_matrix(target + size, all_features, block, d_gate, HEAD_DIM)
        store_matrix(target + 2 * size, block, all_features, tl.trans(d_down), HEAD_DIM)
    else:
        target = PARTIAL + tl.program_id(0).to(tl.int64) * size
    store_matrix(target, all_features, block, d_first, HEAD_DIM)


@triton.jit(do_not_specialize=["num_splits", "num_elements"])
def sum_partials(PARTIAL, DW, num_splits, num_elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``PARTIAL`` over its ``num_splits`` rows in a fixed order.

    Loads ``SPLITS`` rows at once to hide latency.
    """
    elements = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        inside = is_inside(splits, elements, num_splits, num_elements)
        source = PARTIAL + splits[:, None] * num_elements + elements[None, :]
        partials = tl.load(source, mask=inside, other=0.0)
        total += tl.sum(partials, 0)
    gradient = total.to(DW.dtype.element_ty)
    tl.store(DW + elements, gradient, mask=elements < num_elements)
