"""Device functions that knock one tile of head rows.

Shape legend: ``M`` rows of a tile, one head of one token each; ``D`` head dim; ``P`` the power of
two from ``D`` up, because Triton's tiles have no other sizes; ``J`` columns of the block that a
product works on. Columns from ``D`` to ``P`` are zero in every tile and matrix.

All heads share the matrices, so a kernel loads them once and passes tile after tile through them.
If they do not fit into shared memory, a kernel processes ``J < P`` columns at a time: hidden
features for ``mlp``, whose blocks each add to all of ``y``; output features for ``gate`` and
``linear``, whose blocks are columns of ``y``.

Products accumulate in float32. What one product passes to the next is rounded to the dtype of the
weights, as cuBLAS would store it.
"""

# ruff: noqa: RET505 (Triton compiles what follows an `if` that returned: it needs the `else`)

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether kernels run in Triton's interpreter, which cannot multiply bfloat16."""


@triton.jit
def dot(a, b):
    """Return ``a @ b`` in float32, without TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, total):
    """Return ``total + a @ b`` in float32, without TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def doubled_sigmoid(x, dtype: tl.constexpr):
    """Return ``2 * sigmoid(x)`` of a float32 ``x``; exactly 1 at 0.

    For bfloat16 products it is ``1 + tanh(x / 2)`` by ``tanh.approx.f32``, whose relative error is
    at most 2**-11 (PTX), an eighth of bfloat16's rounding. The interpreter applies all of it.
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
def offsets(rows, columns, heads, token, head):
    """Return the offsets in elements of ``columns`` in ``rows``.

    Row ``r`` is head ``r % heads`` of token ``r // heads``; ``token`` and ``head`` are strides.
    """
    starts = (rows // heads).to(tl.int64) * token + (rows % heads).to(tl.int64) * head
    return starts[:, None] + columns[None, :]


@triton.jit
def load_rows(
    X, first, count, j, heads, token, head, D: tl.constexpr, M: tl.constexpr, J: tl.constexpr
):
    """Load columns ``j`` to ``j + J`` of ``M`` rows from ``first`` on; zero from ``count`` on."""
    rows = first + tl.arange(0, M)
    columns = j + tl.arange(0, J)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    return tl.load(X + offsets(rows, columns, heads, token, head), mask=inside, other=0.0)


@triton.jit
def store_rows(X, tile, first, count, j, heads, token, head, D: tl.constexpr):
    """Store ``tile`` ``[M, J]`` where :func:`load_rows` loads it, in the dtype of ``X``."""
    rows = first + tl.arange(0, tile.shape[0])
    columns = j + tl.arange(0, tile.shape[1])
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    to = X + offsets(rows, columns, heads, token, head)
    tl.store(to, tile.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(W, rows, columns, D: tl.constexpr):
    """Load ``W[rows, columns]`` of a contiguous ``[D, D]`` matrix; zero beyond ``D``."""
    inside = (rows < D)[:, None] & (columns < D)[None, :]
    return tl.load(W + rows[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_weights(W, j, VARIANT: tl.constexpr, D: tl.constexpr, P: tl.constexpr, J: tl.constexpr):
    """Load the block from column ``j`` of each matrix of the variant.

    Args:
        W: the stacked weight, contiguous ``[n, D, D]``, in the order of ``heads.knock.MATRICES``.
        j: first column of the block, a multiple of ``J``.

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
    """Knock one tile of rows (the equations of ``kha_megatron.heads.knock.knock``).

    Args:
        x: ``[M, P]``, in the dtype of the weights.
        x_j: ``[M, J]``, the block's columns of ``x``, only read by ``gate``; ``x`` if ``J == P``.
        weights: result of :func:`load_weights`.

    Returns:
        float32. ``mlp``: ``[M, P]``, the block's summand of ``y``. ``gate`` and ``linear``:
        ``[M, J]``, the block's columns of ``y``.
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
    """Recompute the gradients before the last product of the input and weight gradients.

    Args:
        x: ``[M, P]``, in the dtype of the weights; ``x_j`` ``[M, J]`` as in :func:`knock_tile`.
        dy: ``[M, P]``, gradient of ``y``, same dtype, read by ``mlp``; ``dy_j`` ``[M, J]`` its
            columns of the block, read by the other variants.
        weights: result of :func:`load_weights`.

    Returns:
        A tuple of ``[M, J]`` in the dtype of ``x``. ``mlp``: the gradients of ``x @ W_up`` and
        ``x @ W_gate``, and the hidden features. ``gate``: the gradient of ``x @ W_gate``, and that
        of ``x_j`` as a factor (float32). ``linear``: ``dy_j``.
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
    """Return ``dx`` ``[M, P]`` (float32) plus the block's summand of the gradient of ``x``.

    Args:
        dx: the sum over the earlier blocks.
        gradients: result of :func:`hidden_gradients`.
        weights: result of :func:`load_weights` for the same block.
        j: first column of the block.
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
        else:  # a tile in registers has no columns: multiply by a block of the identity
            block = (j + tl.arange(0, J))[:, None] == tl.arange(0, P)[None, :]
            place = tl.where(block, 1.0, 0.0).to(weights[0].dtype)
            high = gradients[1].to(place.dtype)
            dx = dot_add(high, place, dx)
            if place.dtype == tl.float32:
                return dx
            else:  # the part that two bytes cannot hold
                return dot_add((gradients[1] - high.to(tl.float32)).to(place.dtype), place, dx)
    else:
        return dot_add(gradients[0], tl.trans(weights[0]), dx)
