"""Tile sizes and launch options of the KHA kernels, chosen by compiling for each architecture.

Only those of Hopper (sm_90) have run on a GPU. After you change a row, run
``tools/cross_compile.py``: no kernel may spill registers or exceed the shared memory. This module
can be imported without Triton.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kha_megatron.heads.knock import Variant

Kernel = Literal["forward", "backward_input", "backward_weight"]
_TilingVariant = Variant | Literal["float32"]

KERNEL_VARIANTS: tuple[Variant, ...] = ("mlp", "gate")
"""KHA-Linear always uses PyTorch, since cuBLAS is faster (see ``benchmarks/kernels.md``)."""

HEAD_DIMS = (64, 96, 128)
"""Larger ones use PyTorch, since cuBLAS is faster (see ``benchmarks/kernels.md``)."""

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OLDEST_TRITON = (3, 5)
"""We need host-side tensor descriptors (Triton 3.4) and ``disable_licm`` (3.5)."""

SHARED_MEMORY = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""The architectures that have tilings, and their shared memory per program in bytes."""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch options of one kernel."""

    rows: int
    columns: int
    """Padded head dim, or the block size ``J`` if the matrices do not fit into shared memory."""
    warps: int
    stages: int  # depth of software pipelining, which also saves registers; 1 disables it
    per_processor: int = 1  # programs that run concurrently on a multiprocessor

    def allows_descriptors(
        self,
        variant: Variant,
        head_dim: int,
        dtype: torch.dtype,
        arch: str,
    ) -> bool:
        """Whether we use TMA. It does not work with column blocks, and sm_120 then spills."""
        loads_all_columns = variant == "mlp" or self.columns == padded(head_dim)
        has_tma = arch in ("sm_90", "sm_100")
        return loads_all_columns and has_tma and dtype.itemsize == 2

    def options(self, variant: Variant, head_dim: int) -> dict[str, Any]:
        return {
            "VARIANT": variant,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded(head_dim),
            "TILE_ROWS": self.rows,
            "BLOCK_COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def padded(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def architecture(device: torch.device) -> str:
    """Return for example ``sm_90``. On a CPU, Triton interprets the kernels as for Hopper."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tiling(
    kernel: Kernel,
    variant: Variant,
    head_dim: int,
    dtype: torch.dtype,
    arch: str,
) -> Tiling:
    tiling_variant: _TilingVariant = variant if dtype.itemsize == 2 else "float32"
    return TILINGS[arch][kernel, tiling_variant, padded(head_dim)]


_HOPPER: dict[tuple[Kernel, _TilingVariant, int], Tiling] = {
    ("forward", "mlp", 64): Tiling(128, 64, 8, 2, per_processor=2),
    # with 2 stages, a tile is loaded after the previous one was stored
    ("forward", "mlp", 128): Tiling(128, 128, 8, 3),
    ("forward", "gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
    ("forward", "gate", 128): Tiling(128, 128, 8, 3),
    ("backward_input", "mlp", 64): Tiling(128, 64, 8, 2),
    ("backward_input", "mlp", 128): Tiling(128, 64, 8, 2),
    ("backward_input", "gate", 64): Tiling(128, 64, 8, 2, per_processor=2),
    ("backward_input", "gate", 128): Tiling(128, 128, 8, 2),
    ("backward_weight", "mlp", 64): Tiling(128, 64, 8, 2),
    ("backward_weight", "mlp", 128): Tiling(128, 64, 8, 2),
    ("backward_weight", "gate", 64): Tiling(128, 64, 8, 2),
    ("backward_weight", "gate", 128): Tiling(128, 128, 8, 2),
    # all variants in float32, where matmuls do not use tensor cores
    ("forward", "float32", 64): Tiling(32, 32, 8, 1),
    ("forward", "float32", 128): Tiling(32, 32, 8, 1),
    ("backward_input", "float32", 64): Tiling(16, 16, 8, 1),
    ("backward_input", "float32", 128): Tiling(16, 16, 8, 1),
    ("backward_weight", "float32", 64): Tiling(16, 16, 8, 1),
    ("backward_weight", "float32", 128): Tiling(16, 16, 8, 1),
}
"""Keys are kernel, variant (``float32`` is for all variants) and padded head dim."""

# matmul instructions of a single warp read their operands from registers
_AMPERE = _HOPPER | {
    ("forward", "mlp", 128): Tiling(64, 64, 8, 2),
    ("forward", "gate", 128): Tiling(128, 128, 8, 1),
    ("backward_input", "mlp", 128): Tiling(64, 64, 8, 2),
    ("backward_input", "gate", 128): Tiling(64, 64, 8, 2),
    ("backward_weight", "mlp", 64): Tiling(128, 32, 8, 2),
    ("backward_weight", "mlp", 128): Tiling(128, 32, 8, 1),
    ("backward_weight", "gate", 128): Tiling(128, 64, 8, 2),
}

# Hopper's tiling would need 288 KB of shared memory here
_BLACKWELL = _HOPPER | {
    ("backward_weight", "mlp", 128): Tiling(64, 64, 8, 2),
}

TILINGS = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_120": _AMPERE,
}
