"""Building blocks of the KHA kernels, operating on one tile of rows.

``PADDED_DIM`` is the head dim rounded up to a power of two, which Triton requires. Padding is
filled with zeros.

Usually ``BLOCK_COLUMNS == PADDED_DIM``. If the matrices do not fit into shared memory, we process
blocks of fewer columns:

- ``mlp``: blocks of hidden features. Each block adds to all columns of ``y``.
- ``gate``: blocks of output features, so each block computes some columns of ``y``.

Names of parameters:

- ``first`` and ``j`` are the first row and the first column to process, ``count`` is the number of
  rows in the tensor.
- ``heads``, ``token`` and ``head`` are the layout of rows in memory, see :class:`rows.Strides`.

Matmuls accumulate in float32. Intermediate results are rounded to the dtype of the weights, as they
would be with cuBLAS.
"""

# ruff: noqa: RET505 (Triton compiles the code after a returning `if`, so `else` is needed)

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether kernels run in Triton's interpreter, which does not support bfloat16 matmuls."""


@triton.jit
def dot(a, b):
    """Matmul with float32 output (no TF32)."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(
    a,
    b,
    total,
):
    """Add a matmul to ``total`` (float32)."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def doubled_sigmoid(x, dtype: tl.constexpr):
    """Compute ``2 * sigmoid(x)`` in float32 (exactly 1 at 0).

    If the matmuls are in bfloat16, we use ``1 + tanh(x / 2)`` with ``tanh.approx.f32``. Its
    relative error is at most 2**-11 (see the PTX docs), i.e. 1/8 of bfloat16's rounding error. The
    interpreter always simulates the maximum error.
    """
    if dtype != tl.bfloat16:
        return 2.0 * tl.sigmoid(x)
    elif INTERPRETED:
        tanh = 2.0 * tl.sigmoid(x) - 1.0
        return 1.0 + tanh * (1.0 - 2.0**-11)
    else:
        instruction: tl.constexpr = "tanh.approx.f32 $0, $1;"
        tanh = tl.inline_asm_elementwise(
            instruction,
            "=f,f",
            [0.5 * x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return 1.0 + tanh


@triton.jit
def is_inside(
    rows,
    columns,
    row_count,
    column_count,
):
    """Return a mask of the elements that are not padding, ``[rows, columns]``."""
    has_row = (rows < row_count)[:, None]
    has_column = (columns < column_count)[None, :]
    return has_row & has_column


@triton.jit
def offsets(
    rows,
    columns,
    heads,
    token,
    head,
):
    """Return the offset of each element in memory, ``[rows, columns]``."""
    token_starts = (rows // heads).to(tl.int64) * token
    head_starts = (rows % heads).to(tl.int64) * head
    starts = token_starts + head_starts
    return starts[:, None] + columns[None, :]


@triton.jit
def load_rows(
    X,
    first,
    count,
    j,
    heads,
    token,
    head,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Load a block of columns, starting at ``j``, of a tile. Rows past ``count`` are zero."""
    rows = first + tl.arange(0, TILE_ROWS)
    columns = j + tl.arange(0, BLOCK_COLUMNS)
    inside = is_inside(rows, columns, count, HEAD_DIM)
    source = X + offsets(
        rows,
        columns,
        heads,
        token,
        head,
    )
    return tl.load(source, mask=inside, other=0.0)


@triton.jit
def store_rows(
    X,
    tile,
    first,
    count,
    j,
    heads,
    token,
    head,
    HEAD_DIM: tl.constexpr,
):
    """Store a tile, or a block of its columns that starts at ``j``."""
    TILE_ROWS: tl.constexpr = tile.shape[0]
    BLOCK_COLUMNS: tl.constexpr = tile.shape[1]
    rows = first + tl.arange(0, TILE_ROWS)
    columns = j + tl.arange(0, BLOCK_COLUMNS)
    inside = is_inside(rows, columns, count, HEAD_DIM)
    target = X + offsets(
        rows,
        columns,
        heads,
        token,
        head,
    )
    values = tile.to(X.dtype.element_ty)
    tl.store(target, values, mask=inside)


@triton.jit
def load_matrix(
    W,
    rows,
    columns,
    HEAD_DIM: tl.constexpr,
):
    inside = is_inside(rows, columns, HEAD_DIM, HEAD_DIM)
    source = W + rows[:, None] * HEAD_DIM + columns[None, :]
    return tl.load(source, mask=inside, other=0.0)


@triton.jit
def store_matrix(
    W,
    rows,
    columns,
    value,
    HEAD_DIM: tl.constexpr,
):
    inside = is_inside(rows, columns, HEAD_DIM, HEAD_DIM)
    target = W + rows[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, value, mask=inside)


@triton.jit
def load_weights(
    W,
    j,
    VARIANT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Load the columns of a block from all matrices (rows instead of columns for ``down``)."""
    all_features = tl.arange(0, PADDED_DIM)
    block = j + tl.arange(0, BLOCK_COLUMNS)
    if VARIANT == "mlp":
        size: tl.constexpr = HEAD_DIM * HEAD_DIM
        up = load_matrix(W, all_features, block, HEAD_DIM)
        gate = load_matrix(W + size, all_features, block, HEAD_DIM)
        down = load_matrix(W + 2 * size, block, all_features, HEAD_DIM)
        return up, gate, down
    else:
        return (load_matrix(W, all_features, block, HEAD_DIM),)


@triton.jit
def knock_tile(
    x,
    x_j,
    weights,
    VARIANT: tl.constexpr,
):
    """Apply KHA to a tile of rows (see ``kha_megatron.heads.knock.knock``).

    ``x_j`` contains the columns of ``x`` in the current block (only needed for ``gate``). Returns
    what the block adds to ``y`` for ``mlp``, otherwise the block's columns of ``y``. Both are in
    float32.
    """
    if VARIANT == "mlp":
        up, gate, down = weights
        hidden = dot(x, up)
        logits = dot(x, gate)
        hidden *= doubled_sigmoid(logits, x.dtype)
        return dot(hidden.to(x.dtype), down)
    else:
        x_j = x_j.to(tl.float32)
        logits = dot(x, weights[0])
        return x_j * doubled_sigmoid(logits, x.dtype)


@triton.jit
def hidden_gradients(
    x,
    x_j,
    dy,
    dy_j,
    weights,
    VARIANT: tl.constexpr,
):
    """Recompute what both backward kernels need for their final matmuls.

    Returns:
        A tuple of [TILE_ROWS, BLOCK_COLUMNS] tiles, in the dtype of ``x`` unless noted:

        - ``mlp``: gradients of ``x @ W_up`` and ``x @ W_gate``, and the hidden features
        - ``gate``: gradient of ``x @ W_gate``, and the direct gradient of ``x_j`` (float32)
    """
    if VARIANT == "mlp":
        up, gate, down = weights
        factor = doubled_sigmoid(dot(x, gate), x.dtype)
        d_hidden = dot(dy, tl.trans(down))
        d_up = d_hidden * factor
        hidden = dot(x, up)
        d_gate = d_up * hidden * (1.0 - 0.5 * factor)
        d_up = d_up.to(x.dtype)
        d_gate = d_gate.to(x.dtype)
        hidden = (hidden * factor).to(x.dtype)
        return d_up, d_gate, hidden
    else:
        factor = doubled_sigmoid(dot(x, weights[0]), x.dtype)
        d_x = dy_j.to(tl.float32) * factor
        d_gate = d_x * x_j.to(tl.float32) * (1.0 - 0.5 * factor)
        return d_gate.to(x.dtype), d_x


@triton.jit
def add_input_gradient(
    dx,
    gradients,
    weights,
    j,
    VARIANT: tl.constexpr,
):
    """Add the current block's contribution to ``dx`` (float32)."""
    if VARIANT == "mlp":
        up, gate, _ = weights
        d_up, d_gate, _ = gradients
        dx = dot_add(d_up, tl.trans(up), dx)
        return dot_add(d_gate, tl.trans(gate), dx)
    else:
        gate = weights[0]
        d_gate, d_x = gradients
        dx = dot_add(d_gate, tl.trans(gate), dx)
        BLOCK_COLUMNS: tl.constexpr = d_x.shape[1]
        PADDED_DIM: tl.constexpr = dx.shape[1]
        if BLOCK_COLUMNS == PADDED_DIM:
            return dx + d_x
        else:  # registers cannot be indexed by column, so multiply by a block of the identity
            columns = j + tl.arange(0, BLOCK_COLUMNS)
            is_diagonal = columns[:, None] == tl.arange(0, PADDED_DIM)[None, :]
            identity = tl.where(is_diagonal, 1.0, 0.0).to(gate.dtype)
            high = d_x.to(gate.dtype)
            dx = dot_add(high, identity, dx)
            if gate.dtype == tl.float32:
                return dx
            else:  # the rest that 16 bits cannot represent
                low = d_x - high.to(tl.float32)
                return dot_add(low.to(gate.dtype), identity, dx)
