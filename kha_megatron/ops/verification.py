"""Whether the kernels compute on this machine what the definition computes: the comparison itself.

A case is one way of calling the kernels. It is compared on random numbers, with the definition in
float64 as the truth, on more rows than the programs that run at once take in one turn of their
loop, and with a last tile that is not full. Each row that comes out is judged by itself. Where rows
are summed up, those beyond the first turn and those of the last tile weigh as much as all others,
so that none of the three can be missing unseen.

It takes a few hundred MB for as long as it lasts, at the first forward pass, when activations have
not taken theirs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from kha_megatron.heads.knock import MATRICES, PROJECTIONS, Variant
from kha_megatron.ops.heads import knock as knocking
from kha_megatron.ops.kernels.rows import Strides, strides_of
from kha_megatron.ops.kernels.tilings import Kernel, tiling
from kha_megatron.ops.prologue import PrologueSettings, prologue

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Largest difference of a row or of a matrix, by its norm: several roundings on the way, of half a
unit of the last place each (the interpreter cuts bfloat16 off), and what the worst row of many is
beyond the usual one. What is computed wrongly is off by a part of its own size."""

CHUNK = 4096
"""Rows for which the definition is computed at a time: it needs many tensors in float64."""

LONGEST = 32768
"""Positions of a sequence, in whose range RoPE's angles are drawn."""

_NORMS = ("query norm", "key norm")


@dataclass(frozen=True)
class KnockCase:
    """A variant of knocking, for rows that lie in one way."""

    variant: Variant
    head_dim: int
    dtype: torch.dtype
    strides: Strides
    shift: int
    """Bytes from a multiple of 16 to the first row: kernels load aligned rows in other ways."""
    device: torch.device = field(repr=False)

    def __str__(self) -> str:
        return f"knocking ({self.variant}, head dim {self.head_dim}, {self.dtype})"

    @classmethod
    def of(cls, x: Tensor, variant: Variant) -> "KnockCase":
        """How ``knock(x, weight, variant)`` calls the kernels; they copy what has other strides."""
        strides, shift = strides_of(x), x.data_ptr() % 16
        if strides is None:
            strides, shift = Strides(1, x.shape[-1], 0), 0
        return cls(variant, x.shape[-1], x.dtype, strides, shift, x.device)

    def complaint(self) -> str | None:
        """What the kernels compute wrongly, or None. Raises whatever they raise."""
        from kha_megatron.ops.kernels import knock_launch as kernels

        draw, at_once = _Numbers(self.device), kernels.processors(self.device)
        count = _more_than_a_turn(self.variant, self.head_dim, self.dtype, at_once)
        tokens = -(-count // self.strides.heads) | 1
        x = self._rows(tokens, draw)
        weight = draw.matrices(self.variant, self.head_dim, self.dtype)
        tile = tiling("backward_weight", self.variant, self.head_dim, self.dtype).rows
        weights = _emphasis(x[..., 0].numel(), at_once * tile, tile, self.device)
        dy = (draw(*x.shape) * weights.view(*x.shape[:2], 1)).to(self.dtype)
        _spoil_free_memory(dy, dy, weight)
        y = kernels.knock_forward(x, weight, self.variant)
        dx = kernels.knock_backward_input(x, dy, weight, self.variant)
        dw = kernels.knock_backward_weight(x, dy, weight, self.variant)
        exact = weight.double().requires_grad_()
        want_dw = torch.zeros_like(exact)
        for part in _parts(tokens, self.strides.heads):
            rows = x[part].double().requires_grad_()
            want = knocking.knock(rows, exact, self.variant)
            want_dx, more = torch.autograd.grad(want, (rows, exact), dy[part].double())
            want_dw += more
            for name, got, right in (("result", y, want), ("input's gradient", dx, want_dx)):
                if why := _differ(name, got[part], right, self.dtype):
                    return why
        return _differ("matrices' gradient", dw.flatten(1), want_dw.flatten(1), self.dtype)

    def _rows(self, tokens: int, draw: "_Numbers") -> Tensor:
        """``[tokens, heads, D]`` with these strides; in the gaps and behind the last are NaN."""
        sizes = tokens, self.strides.heads, self.head_dim
        strides = (*self.strides[1:], 1)
        first = self.shift // self.dtype.itemsize
        length = first + sum(size * stride for size, stride in zip(sizes, strides, strict=True))
        if 0 in strides[: 1 + (self.strides.heads > 1)]:  # rows that are one in memory
            buffer = draw(length).to(self.dtype)
        else:
            buffer = torch.full((length,), math.nan, dtype=self.dtype, device=self.device)
            buffer.as_strided(sizes, strides, first).copy_(draw(*sizes))
        return buffer.as_strided(sizes, strides, first)


@dataclass(frozen=True)
class PrologueCase:
    """A way of calling the prologue, for a buffer ``[s, batch, groups, features]``."""

    settings: PrologueSettings
    dtype: torch.dtype
    batch: int
    groups: int
    features: int
    width: int
    """Elements from token to token: more than are there where ranks share a key/value head."""
    norms: tuple[torch.dtype | None, torch.dtype | None]
    """Of the weights of the norms of queries and keys; None for no norm."""
    turning: int
    """``R``; 0 for no RoPE."""
    own_angles: bool
    """Whether each sequence of the batch has its own."""
    device: torch.device = field(repr=False)

    def __str__(self) -> str:
        return f"the fused prologue (head dim {self.settings.head_dim}, {self.dtype})"

    def complaint(self) -> str | None:
        """As :meth:`KnockCase.complaint`."""
        from kha_megatron.ops.kernels.prologue_launch import fused_prologue

        draw, head_dim = _Numbers(self.device), self.settings.head_dim
        length, emphasis = self._tokens()
        leaves, angles = self._inputs(length, draw)
        outputs, used = self._run(fused_prologue, leaves, angles)
        upstream = [(draw(*x.shape) * emphasis).to(self.dtype) for x in outputs]
        gradients: list[dict[str, Tensor]] = []
        for arriving in (upstream, list(map(_batch_outermost, upstream))):
            _spoil_free_memory(leaves["buffer"], *outputs)
            these = torch.autograd.grad(outputs, used, arriving, retain_graph=True)
            gradients.append(dict(zip(leaves, these, strict=True)))
        sums = {n: torch.zeros_like(x, dtype=torch.float64) for n, x in leaves.items()}
        del sums["buffer"]
        for part in _parts(length, leaves["buffer"][0].numel() // head_dim):
            exact = {n: (x[part] if n == "buffer" else x).double() for n, x in leaves.items()}
            want, used = self._run(prologue, exact, None if angles is None else angles[part])
            given = [dy[part].double() for dy in upstream]
            want_buffer, *more = torch.autograd.grad(want, used, given)
            for total, term in zip(sums.values(), more, strict=True):
                total += term
            pairs: list[tuple[str, Tensor, Tensor]]
            pairs = list(zip(PROJECTIONS, [x[part] for x in outputs], want, strict=True))
            heads = want_buffer.unflatten(-1, (-1, head_dim))
            for found in gradients:
                got = found["buffer"][part].view_as(heads)
                pairs.append(("buffer's gradient", got, heads))
            for name, got, right in pairs:
                if why := _differ(name, got, right, self.dtype):
                    return why
        for found in gradients:
            for name, right in sums.items():
                got = found[name]
                if right.dim() == 3:  # each matrix by itself
                    got, right = got.flatten(1), right.flatten(1)
                if why := _differ(f"{name}'s gradient", got, right, self.dtype):
                    return why
        return None

    def _tokens(self) -> tuple[int, Tensor]:
        """The length of the sequences, and what each token's gradient is multiplied by."""
        from kha_megatron.ops.kernels.knock_launch import processors
        from kha_megatron.ops.kernels.prologue_launch import tiling as prologue_tiling

        at_once = processors(self.device)
        cut = prologue_tiling("backward", self.settings.head_dim, self.turning // 2)
        turn = -(-at_once * cut.per_processor // self.groups) * cut.tokens
        tokens = turn + cut.tokens + 1
        for projection, variant in self.settings.variants.items():
            rows = _more_than_a_turn(variant, self.settings.head_dim, self.dtype, at_once)
            first, last = self.settings.heads[projection]
            tokens = max(tokens, -(-rows // (self.groups * (last - first))))
        length = -(-tokens // self.batch) | 1
        emphasis = _emphasis(length * self.batch, turn, cut.tokens, self.device)
        return length, emphasis.view(length, self.batch, 1, 1)

    def _inputs(self, length: int, draw: "_Numbers") -> tuple[dict[str, Tensor], Tensor | None]:
        """What has gradients, by name; and the angles."""
        buffer = draw(length, self.batch, self.width).to(self.dtype)
        buffer = buffer[..., : self.groups * self.features]
        leaves = {"buffer": buffer.unflatten(-1, (self.groups, self.features))}
        for projection, variant in self.settings.variants.items():
            leaves[projection] = draw.matrices(variant, self.settings.head_dim, self.dtype)
        for name, dtype in zip(_NORMS, self.norms, strict=True):
            if dtype is not None:
                leaves[name] = (1 + 0.3 * draw(self.settings.head_dim)).to(dtype)
        if not self.turning:
            return leaves, None
        sequences = self.batch if self.own_angles else 1
        half = draw(length, sequences, 1, self.turning // 2).abs() * LONGEST / 4
        return leaves, torch.cat([half, half], dim=-1)

    def _run(
        self, function: Callable, leaves: dict[str, Tensor], angles: Tensor | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs for these inputs, and the inputs as they have gradients."""
        used = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        weights = {projection: used[projection] for projection in self.settings.variants}
        norms = [used.get(name) for name in _NORMS]
        outputs = function(used["buffer"], weights, *norms, angles, self.settings)
        return outputs, list(used.values())


class _Numbers:
    """Random numbers, the same each time. Their generator is their own: a training's go on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Normal, in float32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def matrices(self, variant: Variant, head_dim: int, dtype: torch.dtype) -> Tensor:
        """``[n, D, D]``, whose products are of the size of their factors."""
        shape = len(MATRICES[variant]), head_dim, head_dim
        return (self(*shape) / head_dim**0.5).to(dtype)


def _more_than_a_turn(variant: Variant, head_dim: int, dtype: torch.dtype, at_once: int) -> int:
    """Rows of which no kernel of knocking takes all in one turn of its loop."""
    cuts = [tiling(kernel, variant, head_dim, dtype) for kernel in get_args(Kernel)]
    turn = max(at_once * cut.per_processor * cut.rows for cut in cuts)
    return turn + max(cut.rows for cut in cuts) + 1


def _emphasis(count: int, turn: int, tile: int, device: torch.device) -> Tensor:
    """What rows are multiplied by, so that those of each part weigh as much in a sum of squares."""
    factors = torch.ones(count, device=device)
    for rest in (count - turn, count % tile):
        if 0 < rest < count:
            factors[-rest:] = math.sqrt((count - rest) / rest)
    return factors


def _parts(tokens: int, rows: int) -> Iterator[slice]:
    step = max(1, CHUNK // rows)
    return (slice(first, first + step) for first in range(0, tokens, step))


def _batch_outermost(x: Tensor) -> Tensor:
    """``[s, b, ...]`` as some attentions give it."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _spoil_free_memory(*like: Tensor) -> None:
    """Let memory that a kernel forgets to write be NaN, not what the one before left there."""
    spoiled = [torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in like]
    del spoiled


def _differ(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> str | None:
    """What to say if a row of ``got`` ``[..., D]`` is too far from ``want`` for this dtype."""
    size = want.norm(dim=-1).clamp_min(1e-30)  # zeros must be zeros
    errors = (got.double() - want).norm(dim=-1) / size
    worst = errors.nan_to_num(nan=math.inf).max().item()
    return f"the {name} is off by {worst:.2g} of its size" if worst > TOLERANCE[dtype] else None
