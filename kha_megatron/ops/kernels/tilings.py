"""How the kernels are cut for each architecture: data, found by cross-compiling.

Needs no Triton. ``tests/kernels/test_cross_compile.py`` compiles every row for its architecture and
holds it to its bound of spilled registers and to the architecture's shared memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from kha_megatron.heads.knock import Variant

Kernel = Literal["forward", "backward_input", "backward_weight"]

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims that the kernels are tested for."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OLDEST_TRITON = (3, 5)
"""The first that has all that the kernels ask of it: tensor descriptors made on the host (3.4),
loops that leave what they load where it stands (``disable_licm``, 3.5)."""

SHARED_MEMORY: Mapping[str, int] = MappingProxyType({"sm_90": 227 * 1024})
"""Bytes that one program may take, for each architecture that has tilings."""


@dataclass(frozen=True)
class Tiling:
    """How one kernel is cut (sizes as in ``tiles``)."""

    rows: int
    """``M``."""
    columns: int
    """``J``: the whole padded width where the matrices fit into shared memory, else a block."""
    warps: int
    stages: int
    """Depth of software pipelining; 1 leaves loads where they are written."""
    spills: int = 0
    """Bytes of registers, for each thread, that the compiler may keep in memory."""
    per_processor: int = 1
    """Programs that a multiprocessor runs at once."""

    def allows_descriptors(self, variant: Variant, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether rows may come through TMA descriptors, which describe no blocks of columns."""
        whole = variant == "mlp" or self.columns == padded(head_dim)
        return whole and dtype.itemsize == 2

    def options(self, variant: Variant, head_dim: int) -> dict[str, Any]:
        """The compile-time arguments of a kernel, but for ``TMA``."""
        return {
            "VARIANT": variant,
            "D": head_dim,
            "P": padded(head_dim),
            "M": self.rows,
            "J": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def padded(head_dim: int) -> int:
    """The power of two from ``head_dim`` up."""
    return 1 << (head_dim - 1).bit_length()


# For two-byte dtypes, by variant and padded head dim. A pipelined loop loads asynchronously, which
# frees registers: that, not latency, is what most `stages` are for.
_TWO_BYTES: dict[str, dict[Kernel, dict[tuple[Variant, int], Tiling]]] = {
    "sm_90": {
        "forward": {
            ("mlp", 64): Tiling(128, 64, 8, 2, per_processor=2),
            ("mlp", 128): Tiling(128, 128, 8, 2),
            ("mlp", 256): Tiling(128, 32, 8, 2, spills=8),  # none in bfloat16
            ("gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
            ("gate", 128): Tiling(128, 128, 8, 2),
            ("gate", 256): Tiling(128, 256, 8, 1, spills=176),  # none through descriptors
            ("linear", 64): Tiling(128, 64, 8, 2, per_processor=2),
            ("linear", 128): Tiling(128, 128, 8, 2),
            ("linear", 256): Tiling(64, 256, 4, 2),
        },
        "backward_input": {
            ("mlp", 64): Tiling(128, 64, 8, 2),
            ("mlp", 128): Tiling(128, 64, 8, 2),
            ("mlp", 256): Tiling(64, 32, 4, 2, spills=48),
            ("gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
            ("gate", 128): Tiling(128, 128, 8, 2),
            ("gate", 256): Tiling(128, 32, 8, 2, spills=32),
            ("linear", 64): Tiling(128, 64, 8, 2, per_processor=2),
            ("linear", 128): Tiling(128, 128, 8, 2),
            ("linear", 256): Tiling(64, 256, 4, 2),
        },
        "backward_weight": {
            ("mlp", 64): Tiling(128, 64, 8, 2),
            ("mlp", 128): Tiling(128, 64, 8, 2),
            ("mlp", 256): Tiling(64, 32, 8, 2),
            ("gate", 64): Tiling(128, 64, 8, 2),
            ("gate", 128): Tiling(128, 128, 8, 2),
            ("gate", 256): Tiling(128, 64, 8, 2),
            ("linear", 64): Tiling(128, 64, 8, 2),
            ("linear", 128): Tiling(128, 128, 8, 2),
            ("linear", 256): Tiling(128, 128, 8, 2),
        },
    }
}

# For float32, whose products run on the plain arithmetic units: exact, slow, and for every variant.
_FOUR_BYTES: dict[str, dict[Kernel, dict[int, Tiling]]] = {
    "sm_90": {
        "forward": {
            64: Tiling(32, 32, 8, 1),
            128: Tiling(32, 32, 8, 1),
            256: Tiling(16, 16, 8, 1),  # 32 x 32 of "mlp" spills 12 KB
        },
        "backward_input": {
            64: Tiling(16, 16, 8, 1),
            128: Tiling(16, 16, 8, 1),
            256: Tiling(16, 16, 8, 1, spills=288),
        },
        "backward_weight": {
            64: Tiling(16, 16, 8, 1),
            128: Tiling(16, 16, 8, 1),
            256: Tiling(16, 16, 8, 1, spills=712),
        },
    }
}


def tiling(
    kernel: Kernel, variant: Variant, head_dim: int, dtype: torch.dtype, architecture: str = "sm_90"
) -> Tiling:
    """How a kernel is cut for these sizes; all of :data:`HEAD_DIMS` and :data:`DTYPES` have one."""
    if dtype.itemsize == 2:
        return _TWO_BYTES[architecture][kernel][variant, padded(head_dim)]
    return _FOUR_BYTES[architecture][kernel][padded(head_dim)]
