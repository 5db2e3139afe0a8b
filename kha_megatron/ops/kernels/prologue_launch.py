"""The prologue through Triton kernels, with gradients (``prologue`` says what it computes).

One kernel splits the QKV buffer, normalises queries and keys and turns them; another knocks values
into the place where the core attention wants them. Queries and keys that are knocked (which is
rare: linear matrices are folded into the weight) take one more before, into memory of its own,
because RoPE pairs features that a product leaves in different registers. Backward writes into one
gradient of the whole buffer, where autograd would pad and add up three.

Nothing but the QKV buffer and the parameters is kept for backward, which recomputes the rest.

Needs Triton, and a CUDA device or Triton's interpreter. Shape legend: that of ``prologue``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kha_megatron.heads import Projection
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.ops.kernels import knock_launch
from kha_megatron.ops.kernels.prologue_kernels import prologue_backward, prologue_forward
from kha_megatron.ops.kernels.tiles import INTERPRETED
from kha_megatron.ops.prologue import PrologueSettings


class PrologueTiling(NamedTuple):
    """How a kernel is cut; found by cross-compiling for sm_90, where nothing spills."""

    tokens: int
    """``M``: of a tile."""
    warps: int
    stages: int
    """Heads whose loads are under way at once."""
    per_processor: int = 0
    """Programs that a multiprocessor runs at once, each of which takes several tiles; 0 where a
    program takes one tile and as many run as the compiler's choice of registers allows."""

    def options(self) -> dict[str, int]:
        """What the compiler is told beside :func:`sizes`: it takes no more registers than let
        ``per_processor`` programs run, in the eights that a multiprocessor hands out."""
        options = {"num_warps": self.warps, "num_stages": 1}
        if self.per_processor:
            options["maxnreg"] = REGISTERS // (32 * self.warps * self.per_processor) // 8 * 8
        return options


REGISTERS = 65536
"""Of a multiprocessor."""


def tiling(direction: str, head_dim: int, turned: int) -> PrologueTiling:
    """Of ``forward`` or ``backward``: as many elements for every head dim.

    Args:
        direction: which of the two.
        head_dim: ``D``.
        turned: features that turn against as many others; the rest take registers of their own.
    """
    if INTERPRETED:
        # the interpreter takes its time by the operation, not by the number
        return PrologueTiling(64, 1, 1, 1)
    padded = triton.next_power_of_2(head_dim)
    if direction == "forward":
        return PrologueTiling(2048 // padded, 4, 3)
    many = padded <= 128 and turned in (0, head_dim // 2)
    return PrologueTiling(1024 // padded, 4, 3, per_processor=5 if many else 4)


def fused_prologue(
    qkv: Tensor,
    weights: Mapping[Projection, Tensor],
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    angles: Tensor | None,
    settings: PrologueSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`kha_megatron.ops.prologue.prologue`, whose description holds for all arguments."""
    ordered = [weights.get(p) for p in PROJECTIONS]
    ordered = [None if w is None else w.contiguous() for w in ordered]
    return _Prologue.apply(qkv, *ordered, query_norm, key_norm, angles, settings)


class _Prologue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, settings = inputs
        ctx.save_for_backward(*tensors)
        ctx.settings = settings
        return _Pass(*tensors, settings=settings).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        run = _Pass(*ctx.saved_tensors, settings=ctx.settings)
        return *run.backward(dict(zip(PROJECTIONS, gradients, strict=True))), None, None


class _Pass:
    """One forward or backward pass over a buffer."""

    def __init__(
        self,
        qkv: Tensor,
        w_query: Tensor | None,
        w_key: Tensor | None,
        w_value: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        angles: Tensor | None,
        *,
        settings: PrologueSettings,
    ) -> None:
        self.settings = settings
        self.qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        weights = zip(PROJECTIONS, (w_query, w_key, w_value), strict=True)
        self.weights = {p: weight for p, weight in weights if weight is not None}
        self.norms = query_norm, key_norm
        self.views = self.settings.places(self.qkv)
        # before the kernel: views of the buffer, or what was knocked
        self.rows = dict(self.views)
        for p in self.knocked_before():
            self.rows[p] = self.knocked(p)
        self.angles, self.turned = _contiguous(angles)
        self.tokens_of_an_angle = 1
        if angles is not None and angles.shape[1] == 1:
            self.tokens_of_an_angle = qkv.shape[1]

    def knocked_before(self) -> list[Projection]:
        """Projections that are knocked by a kernel of their own, before this one normalises."""
        return [p for p in ("query", "key") if p in self.settings.variants]

    def knocked(self, projection: Projection) -> Tensor:
        return knock_launch.knock_forward(
            self.views[projection],
            self.weights[projection],
            self.settings.variants[projection],
        )

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        outputs = {
            p: self.knocked("value")
            if p == "value" and p in self.settings.variants
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for p, x in self.rows.items()
        }
        self.launch(prologue_forward, "forward", list(outputs.values()))
        query, key, value = (x.flatten(2, 3) for x in outputs.values())
        return query, key, value

    def backward(self, gradients: dict[Projection, Tensor]) -> list[Tensor | None]:
        """Gradients of the buffer, of each projection's matrices and of both norms' weights."""
        whole = self.settings.are_all_wanted(self.qkv)
        d_qkv = (torch.empty if whole else torch.zeros)(
            self.qkv.shape, dtype=self.qkv.dtype, device=self.qkv.device
        )
        places = self.settings.places(d_qkv)
        d_rows = dict(places)
        for p in self.knocked_before():
            d_rows[p] = torch.empty_like(self.rows[p])
        heads = {p: _as_compared(g) for p, g in gradients.items()}
        partials = self.launch(
            prologue_backward, "backward", list(d_rows.values()), list(heads.values())
        )
        d_weights: dict[Projection, Tensor | None] = dict.fromkeys(PROJECTIONS)
        for p, variant in self.settings.variants.items():
            x, weight = self.views[p], self.weights[p]
            dy = heads[p].unflatten(2, x.shape[2:4]) if p == "value" else d_rows[p]
            knock_launch.knock_backward_input(x, dy, weight, variant, out=places[p])
            d_weights[p] = knock_launch.knock_backward_weight(x, dy, weight, variant)
        assert partials is not None  # of a backward pass
        d_norms = partials.sum(0).unbind(0)
        return [
            d_qkv,
            *d_weights.values(),
            *(
                None if n is None else d.to(n.dtype)
                for n, d in zip(self.norms, d_norms, strict=True)
            ),
        ]

    def launch(
        self,
        kernel: Any,
        direction: str,
        results: list[Tensor],
        gradients: list[Tensor] | None = None,
    ) -> Tensor | None:
        """Start a kernel; backward gives the norms' partial sums ``[programs, 2, D]``."""
        s, b, groups, queries, head_dim = self.rows["query"].shape
        cut = tiling(direction, head_dim, self.turned)
        tiles = triton.cdiv(s * b, cut.tokens) * groups
        programs = tiles
        arguments: list[Any] = []
        for p in PROJECTIONS if direction == "forward" else PROJECTIONS[:2]:
            arguments += [self.rows[p], *self.rows[p].stride()[:3]]
        arguments += [*self.norms, self.angles, self.tokens_of_an_angle]
        partials = None
        if gradients is None:
            arguments += results
        else:
            for g in gradients:
                arguments += [g, *g.stride()[:3]]
            for x in results:
                arguments += [x, *x.stride()[1:3]]
            at_once = knock_launch.processors(self.qkv.device) * cut.per_processor
            programs = min(tiles, at_once)
            partials = torch.empty(
                (programs, 2, head_dim), dtype=torch.float32, device=self.qkv.device
            )
            arguments.append(partials)
        if tiles:
            with torch.cuda.device_of(self.qkv):
                kernel[(programs,)](
                    *arguments,
                    s * b,
                    b,
                    self.settings.eps,
                    COPY_V="value" not in self.settings.variants,
                    NORM_Q=self.norms[0] is not None,
                    NORM_K=self.norms[1] is not None,
                    CENTRE=float(self.settings.zero_centred),
                    G=groups,
                    QUERIES=queries,
                    **sizes(head_dim, self.turned, cut),
                    **cut.options(),
                )
        return partials


def sizes(head_dim: int, turned: int, cut: PrologueTiling) -> dict[str, int]:
    """Compile-time arguments of both kernels; ``turned`` features turn against as many others."""
    half = turned or head_dim // 2
    rest = head_dim - 2 * half
    padded = {"P": head_dim, "PH": half, "PR": max(1, rest)}
    return {
        "TURN": turned > 0,
        "D": head_dim,
        "HALF": half,
        "REST": rest,
        **{name: triton.next_power_of_2(size) for name, size in padded.items()},
        "M": cut.tokens,
        "STAGES": cut.stages,
    }


def _contiguous(angles: Tensor | None) -> tuple[Tensor | None, int]:
    """Megatron's angles as they are, which no step copies, and how many features turn one way."""
    if angles is None:
        return None, 0
    return angles.float().contiguous(), angles.shape[-1] // 2


def _as_compared(x: Tensor) -> Tensor:
    """A gradient ``[s, b, ...]`` in one of the layouts that ``ops/verification.py`` compares."""
    return x if x.is_contiguous() or x.transpose(0, 1).is_contiguous() else x.contiguous()
