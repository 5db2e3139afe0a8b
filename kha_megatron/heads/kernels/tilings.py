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
"""In float32, all variants have the same tilings."""

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

    rows: int  # that a program processes at a time
    columns: int
    """Padded head dim, or the size of a block of columns if the matrices do not fit into shared
    memory."""
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
        """Whether we use TMA. It does not work with column blocks, and is not used in float32.

        sm_120 has TMA, too, but the kernels would then spill registers.
        """
        loads_all_columns = variant == "mlp" or self.columns == padded(head_dim)
        has_tma = arch in ("sm_90", "sm_100")
        is_16_bit = dtype.itemsize == 2
        return loads_all_columns and has_tma and is_16_bit

    def options(self, variant: Variant, head_dim: int) -> dict[str, Any]:
        """Return the keyword arguments of a kernel launch, except for ``TMA``."""
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
    """Round up to a power of two, which Triton requires for tiles."""
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
    is_16_bit = dtype.itemsize == 2
    tiling_variant: _TilingVariant = variant if is_16_bit else "float32"
    return TILINGS[arch][kernel, tiling_variant, padded(head_dim)]


_HOPPER: dict[tuple[Kernel, _TilingVariant, int], Tiling] = {
    ("forward", "mlp", 64): Tiling(rows=128, columns=64, warps=8, stages=2, per_processor=2),
    # with 2 stages, a tile is loaded after the previous one was stored
    ("forward", "mlp", 128): Tiling(rows=128, columns=128, warps=8, stages=3),
    ("forward", "gate", 64): Tiling(rows=128, columns=64, warps=8, stages=2, per_processor=2),
    ("forward", "gate", 128): Tiling(rows=128, columns=128, warps=8, stages=3),
    ("backward_input", "mlp", 64): Tiling(rows=128, columns=64, warps=8, stages=2),
    ("backward_input", "mlp", 128): Tiling(rows=128, columns=64, warps=8, stages=2),
    ("backward_input", "gate", 64): Tiling(
        rows=128, columns=64, warps=8, stages=2, per_processor=2
    ),
    ("backward_input", "gate", 128): Tiling(rows=128, columns=128, warps=8, stages=2),
    ("backward_weight", "mlp", 64): Tiling(rows=128, columns=64, warps=8, stages=2),
    ("backward_weight", "mlp", 128): Tiling(rows=128, columns=64, warps=8, stages=2),
    ("backward_weight", "gate", 64): Tiling(rows=128, columns=64, warps=8, stages=2),
    ("backward_weight", "gate", 128): Tiling(rows=128, columns=128, warps=8, stages=2),
    # in float32, matmuls do not use tensor cores
    ("forward", "float32", 64): Tiling(rows=32, columns=32, warps=8, stages=1),
    ("forward", "float32", 128): Tiling(rows=32, columns=32, warps=8, stages=1),
    ("backward_input", "float32", 64): Tiling(rows=16, columns=16, warps=8, stages=1),
    ("backward_input", "float32", 128): Tiling(rows=16, columns=16, warps=8, stages=1),
    ("backward_weight", "float32", 64): Tiling(rows=16, columns=16, warps=8, stages=1),
    ("backward_weight", "float32", 128): Tiling(rows=16, columns=16, warps=8, stages=1),
}
"""Keys are kernel, variant and padded head dim."""

# smaller tiles, because matmul instructions of a single warp read their operands from registers
_AMPERE = _HOPPER | {
    ("forward", "mlp", 128): Tiling(rows=64, columns=64, warps=8, stages=2),
    ("forward", "gate", 128): Tiling(rows=128, columns=128, warps=8, stages=1),
    ("backward_input", "mlp", 128): Tiling(rows=64, columns=64, warps=8, stages=2),
    ("backward_input", "gate", 128): Tiling(rows=64, columns=64, warps=8, stages=2),
    ("backward_weight", "mlp", 64): Tiling(rows=128, columns=32, warps=8, stages=2),
    ("backward_weight", "mlp", 128): Tiling(rows=128, columns=32, warps=8, stages=1),
    ("backward_weight", "gate", 128): Tiling(rows=128, columns=64, warps=8, stages=2),
}

# Hopper's tiling would need 288 KB of shared memory here
_BLACKWELL = _HOPPER | {
    ("backward_weight", "mlp", 128): Tiling(rows=64, columns=64, warps=8, stages=2),
}

TILINGS = {
    "sm_80": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_120": _AMPERE,
}
