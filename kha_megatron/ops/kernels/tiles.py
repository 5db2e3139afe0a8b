"""Device functions that knock one tile of head rows, for any Triton kernel to build on.

Shape legend: ``M`` rows of a tile, a row being one head of one token; ``D`` head dim; ``P`` the
power of two from ``D`` up, since Triton's tiles have no other sizes; ``J`` columns of the block
that a product works on. Columns from ``D`` up to ``P`` are zero in every tile and matrix: a caller
loads its rows that way, and stores ``D`` columns.

A head's row goes through matrices that all heads share, so a kernel loads them once and then passes
tile after tile::

    weights = load_weights(W, 0, VARIANT, D, P, P)
    for ...:
        x = ...                                        # [M, P], the dtype of W
        y = knock_tile(x, x, weights, VARIANT)         # [M, P], float32

Where they do not fit into shared memory, a kernel takes ``J < P`` columns after another: the
hidden features of ``mlp``, whose blocks give sums over all of ``y``; the output features of
``gate`` and ``linear``, whose blocks give columns of ``y``::

    for j in tl.static_range(0, D, J):
        weights = load_weights(W, j, VARIANT, D, P, J)
        part = knock_tile(x, x_j, weights, VARIANT)    # mlp: y += part; else y[:, j:j+J] = part

Products accumulate in float32. What one product hands to the next is rounded to the dtype of the
weights, as cuBLAS would store it.
"""

# ruff: noqa: RET505 (Triton compiles what follows an `if` that returned: it needs the `else`)

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether kernels run in Triton's interpreter, which multiplies bfloat16 as if it were integers."""


@triton.jit
def dot(a, b):
    """``a @ b`` in float32; float32 factors are not rounded to TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, total):
    """``total + a @ b`` in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def doubled_sigmoid(x, dtype: tl.constexpr):
    """``2 * sigmoid(x)`` of float32, which is exactly 1 at 0.

    As accurate as float32, but for products of bfloat16. These take ``1 + tanh(x / 2)`` by the one
    instruction ``tanh.approx.f32``, whose relative error PTX bounds by 2**-11: at most an eighth of
    what rounding the factor to bfloat16 would do. The interpreter then errs by all of that bound.
    """
    if dtype != tl.bfloat16:
        return 2.0 * tl.sigmoid(x)
    elif INTERPRETED:
        return 1.0 + (2.0 * tl.sigmoid(x) - 1.0) * (1.0 - 2.0**-11)
    else:
        instruction: tl.constexpr = "tanh.approx.f32 $0, $1;"
        return 1.0 + tl.inline_asm_elementwise(
            instruction, "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_rows(
    X,
    first,
    count,
    j,
    heads,
    token_stride,
    head_stride,
    D: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
):
    """Columns ``j`` to ``j + J`` of ``M`` rows, zero beyond the last row and column.

    Row ``r`` is head ``r % heads`` of token ``r // heads``. ``first`` and the numbers after it
    count rows and elements; ``X`` points to the first row.
    """
    rows = first + tl.arange(0, M)
    columns = j + tl.arange(0, J)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    starts = (rows // heads).to(tl.int64) * token_stride + (rows % heads).to(tl.int64) * head_stride
    return tl.load(X + starts[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    X,
    tile,
    first,
    count,
    j,
    heads,
    token_stride,
    head_stride,
    D: tl.constexpr,
):
    """Write ``tile`` ``[M, J]``, rounded to the dtype of ``X``, to where :func:`load_rows` reads.

    What lies beyond the last row and column is not written.
    """
    M: tl.constexpr = tile.shape[0]
    J: tl.constexpr = tile.shape[1]
    rows = first + tl.arange(0, M)
    columns = j + tl.arange(0, J)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    starts = (rows // heads).to(tl.int64) * token_stride + (rows % heads).to(tl.int64) * head_stride
    to = X + starts[:, None] + columns[None, :]
    tl.store(to, tile.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(W, rows, columns, D: tl.constexpr):
    """``W[rows, columns]`` of a contiguous ``[D, D]`` matrix, zero beyond ``D``."""
    inside = (rows < D)[:, None] & (columns < D)[None, :]
    return tl.load(W + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_weights(W, j, VARIANT: tl.constexpr, D: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """The block from column ``j`` of each matrix of the variant, as a tuple.

    Args:
        W: pointer to the stacked weight, contiguous ``[n, D, D]``, in the order of
            ``kha_megatron.heads.knock.MATRICES``.
        j: the block's first column, a multiple of ``J``.

    Returns:
        ``mlp``: up ``[P, J]``, gate ``[P, J]`` and rows of down ``[J, P]``. ``gate`` and
        ``linear``: their matrix ``[P, J]``.
    """
    every = tl.arange(0, P)
    block = j + tl.arange(0, J)
    if VARIANT == "mlp":
        up = load_matrix(W, every, block, D)
        gate = load_matrix(W + D * D, every, block, D)
        down = load_matrix(W + 2 * D * D, block, every, D)
        return up, gate, down
    else:
        return (load_matrix(W, every, block, D),)


@triton.jit
def knock_tile(x, x_j, weights, VARIANT: tl.constexpr):
    """Knock one tile of rows (the equations of ``kha_megatron.ops.heads.knock.knock``).

    Args:
        x: ``[M, P]``, in the dtype of the weights.
        x_j: ``[M, J]``, the block's columns of ``x``; ``x`` itself where ``J == P``. Only ``gate``
            reads it.
        weights: what :func:`load_weights` gave.

    Returns:
        float32. ``mlp``: ``[M, P]``, the block's part of the sum that is ``y``. ``gate`` and
        ``linear``: ``[M, J]``, the block's columns of ``y``.
    """
    if VARIANT == "mlp":
        up, gate, down = weights
        hidden = dot(x, up) * doubled_sigmoid(dot(x, gate), x.dtype)
        return dot(hidden.to(x.dtype), down)
    elif VARIANT == "gate":
        return x_j.to(tl.float32) * doubled_sigmoid(dot(x, weights[0]), x.dtype)
    else:
        return dot(x, weights[0])


@triton.jit
def hidden_gradients(x, x_j, dy, dy_j, weights, VARIANT: tl.constexpr):
    """What both the input gradient and the weight gradients are products of, recomputed from ``x``.

    Args:
        x: ``[M, P]``, in the dtype of the weights; ``x_j`` ``[M, J]`` as in :func:`knock_tile`.
        dy: ``[M, P]``, gradient of ``y``, same dtype; ``dy_j`` ``[M, J]`` its block's columns.
            ``mlp`` reads ``dy``, the others ``dy_j``.
        weights: what :func:`load_weights` gave.

    Returns:
        A tuple of ``[M, J]``, all but the last of ``gate`` in the dtype of ``x``: ``mlp`` the
        gradients of ``x @ W_up`` and ``x @ W_gate``, and the hidden features; ``gate`` the gradient
        of ``x @ W_gate``, and that of ``x_j`` as a factor (float32); ``linear`` ``dy_j``.
    """
    if VARIANT == "mlp":
        up, gate, down = weights
        factor = doubled_sigmoid(dot(x, gate), x.dtype)
        d_up = dot(dy, tl.trans(down)) * factor
        hidden = dot(x, up)
        d_gate = d_up * hidden * (1.0 - 0.5 * factor)
        return d_up.to(x.dtype), d_gate.to(x.dtype), (hidden * factor).to(x.dtype)
    elif VARIANT == "gate":
        factor = doubled_sigmoid(dot(x, weights[0]), x.dtype)
        d_x = dy_j.to(tl.float32) * factor
        d_gate = d_x * x_j.to(tl.float32) * (1.0 - 0.5 * factor)
        return d_gate.to(x.dtype), d_x
    else:
        return (dy_j,)


@triton.jit
def add_input_gradient(dx, gradients, weights, j, VARIANT: tl.constexpr):
    """``dx`` plus the block's part of the gradient of ``x``.

    Args:
        dx: ``[M, P]`` float32, the sum over the blocks before.
        gradients: what :func:`hidden_gradients` gave.
        weights: what :func:`load_weights` gave, for the same block.
        j: the block's first column.
    """
    if VARIANT == "mlp":
        dx = dot_add(gradients[0], tl.trans(weights[0]), dx)
        return dot_add(gradients[1], tl.trans(weights[1]), dx)
    elif VARIANT == "gate":
        dx = dot_add(gradients[0], tl.trans(weights[0]), dx)
        J: tl.constexpr = gradients[1].shape[1]
        P: tl.constexpr = dx.shape[1]
        if J == P:
            return dx + gradients[1]
        else:  # registers have no columns to add to: a block of the identity puts them in place
            block = (j + tl.arange(0, J))[:, None] == tl.arange(0, P)[None, :]
            place = tl.where(block, 1.0, 0.0).to(weights[0].dtype)
            high = gradients[1].to(place.dtype)
            dx = dot_add(high, place, dx)
            if place.dtype == tl.float32:
                return dx
            else:  # the half that two bytes could not hold
                return dot_add((gradients[1] - high.to(tl.float32)).to(place.dtype), place, dx)
    else:
        return dot_add(gradients[0], tl.trans(weights[0]), dx)
