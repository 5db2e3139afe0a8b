"""Tile sizes and launch options of the KHA kernels, tuned by compiling for Hopper (sm_90).

After you change a row, run ``tools/cross_compile.py`` to check its register spills and shared
memory. This module can be imported without Triton.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kha_megatron.heads.knock import Variant

Kernel = Literal["forward", "backward_input", "backward_weight"]
_TilingVariant = Variant | Literal["float32"]

KERNEL_VARIANTS: tuple[Variant, ...] = ("mlp", "gate")
"""KHA-Linear always uses PyTorch, since cuBLAS is faster (see ``benchmarks/kernels.md``)."""

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims covered by the kernel tests."""

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OLDEST_TRITON = (3, 5)
"""We need host-side tensor descriptors (Triton 3.4) and ``disable_licm`` (3.5)."""

ARCHITECTURE = "sm_90"

SHARED_MEMORY = 227 * 1024
"""Shared memory per program in bytes."""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch options of one kernel."""

    rows: int
    columns: int
    """Padded head dim, or the block size ``J`` if the matrices don't fit into shared memory."""
    warps: int
    stages: int  # depth of software pipelining, which also saves registers; 1 disables it
    spills: int = 0  # maximum bytes of spilled registers per thread
    per_processor: int = 1  # programs that run concurrently on a multiprocessor

    def allows_descriptors(self, variant: Variant, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether we can use TMA. It doesn't work with column blocks."""
        whole = variant == "mlp" or self.columns == padded(head_dim)
        return whole and dtype.itemsize == 2

    def options(self, variant: Variant, head_dim: int) -> dict[str, Any]:
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
    return 1 << (head_dim - 1).bit_length()


def tiling(kernel: Kernel, variant: Variant, head_dim: int, dtype: torch.dtype) -> Tiling:
    kind: _TilingVariant = variant if dtype.itemsize == 2 else "float32"
    return TILINGS[kernel, kind, padded(head_dim)]


TILINGS: dict[tuple[Kernel, _TilingVariant, int], Tiling] = {
    ("forward", "mlp", 64): Tiling(128, 64, 8, 2, per_processor=2),
    ("forward", "mlp", 128): Tiling(128, 128, 8, 2),
    ("forward", "mlp", 256): Tiling(128, 32, 8, 2, spills=8),  # no spills in bfloat16
    ("forward", "gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
    ("forward", "gate", 128): Tiling(128, 128, 8, 2),
    ("forward", "gate", 256): Tiling(128, 256, 8, 1, spills=176),  # no spills with descriptors
    ("backward_input", "mlp", 64): Tiling(128, 64, 8, 2),
    ("backward_input", "mlp", 128): Tiling(128, 64, 8, 2),
    ("backward_input", "mlp", 256): Tiling(64, 32, 4, 2, spills=52),  # 48 with Triton 3.6
    ("backward_input", "gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
    ("backward_input", "gate", 128): Tiling(128, 128, 8, 2),
    ("backward_input", "gate", 256): Tiling(128, 32, 8, 2, spills=32),
    ("backward_weight", "mlp", 64): Tiling(128, 64, 8, 2),
    ("backward_weight", "mlp", 128): Tiling(128, 64, 8, 2),
    ("backward_weight", "mlp", 256): Tiling(64, 32, 8, 2),
    ("backward_weight", "gate", 64): Tiling(128, 64, 8, 2),
    ("backward_weight", "gate", 128): Tiling(128, 128, 8, 2),
    ("backward_weight", "gate", 256): Tiling(128, 64, 8, 2),
    # all variants in float32, where matmuls do not use tensor cores
    ("forward", "float32", 64): Tiling(32, 32, 8, 1),
    ("forward", "float32", 128): Tiling(32, 32, 8, 1),
    ("forward", "float32", 256): Tiling(16, 16, 8, 1),
    ("backward_input", "float32", 64): Tiling(16, 16, 8, 1),
    ("backward_input", "float32", 128): Tiling(16, 16, 8, 1),
    ("backward_input", "float32", 256): Tiling(16, 16, 8, 1, spills=288),
    ("backward_weight", "float32", 64): Tiling(16, 16, 8, 1),
    ("backward_weight", "float32", 128): Tiling(16, 16, 8, 1),
    ("backward_weight", "float32", 256): Tiling(16, 16, 8, 1, spills=712),
}
"""Keys are kernel, variant (``float32`` is for all variants) and padded head dim."""
