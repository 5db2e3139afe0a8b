"""Print the least that each kernel must move and multiply, and the shortest possible time.

    python tools/roofline.py > benchmarks/roofline.md

Arithmetic, and the compiler's report for Hopper: needs no GPU and measures nothing. Shape legend:
``D`` head dim, ``R`` rows of values: tokens times key/value heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from cross_compile import Launch, Report, compile_all
from measuring import markdown_table

from kha_megatron.heads.kernels.tilings import KERNEL_VARIANTS, Kernel
from kha_megatron.heads.knock import MATRICES, Variant

PROCESSORS = 132
BFLOAT16 = 2


class Gpu(NamedTuple):
    """Figures of NVIDIA's data sheet."""

    memory: float
    """Bytes per second."""
    products: float
    """FLOPs per second in bfloat16, dense."""


GPUS = {"H100": Gpu(3.35e12, 989e12), "H200": Gpu(4.8e12, 989e12)}
"""Both with 132 multiprocessors."""


NVLINK = 450e9
"""Bytes per second and direction, of the same data sheets."""
RANKS = 4


class Heads(NamedTuple):
    """The part of an attention that one rank has."""

    tokens: int
    groups: int
    dim: int


SIZES = {
    "8192 tokens": Heads(8192, 4, 128),
    "32768 tokens": Heads(32768, 4, 128),
    "8192 tokens, one of 4 tensor-parallel ranks": Heads(8192, 1, 128),
}
"""The heads of all models of the paper."""


@dataclass(frozen=True)
class Work:
    """The memory traffic and the products of one kernel."""

    name: str
    launch: Launch
    memory: float
    """Bytes that are read or written in the GPU's memory, each once."""
    products: float
    """FLOPs."""
    tiled: float
    """Seconds on an H200 for the tiles of one program, below which no kernel with them can be."""

    def floor(self, gpu: Gpu) -> float:
        """Return the seconds below which no kernel can be."""
        return max(self.memory / gpu.memory, self.products / gpu.products)


PRODUCTS: dict[Variant, dict[Kernel, int]] = {
    "mlp": {"forward": 3, "backward_input": 5, "backward_weight": 6},
    "gate": {"forward": 1, "backward_input": 2, "backward_weight": 2},
}
"""Products of ``[R, D]`` with ``[D, D]``, including what is recomputed."""

TENSORS: dict[Kernel, int] = {
    "forward": 2,
    "backward_input": 3,
    "backward_weight": 2,
}
"""Tensors of the values' size, read or written."""

WORDS: dict[Kernel, str] = {
    "forward": "forward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradients (with reduction)",
}


def knocks(heads: Heads, variant: Variant) -> Iterator[Work]:
    """Yield the work of the kernels that knock values."""
    rows = heads.tokens * heads.groups
    values = rows * heads.dim * BFLOAT16
    h200 = GPUS["H200"]
    for kernel, count in PRODUCTS[variant].items():
        launch = Launch(kernel, variant, heads.dim, torch.bfloat16, tma=True)
        cut = launch.tiling
        tensors = TENSORS[kernel]
        tiles = ceil(rows / cut.rows)
        blocks = ceil(heads.dim / cut.columns)
        splits = min(tiles, PROCESSORS)  # programs, each of which has a multiprocessor
        products = count * 2 * heads.dim**2
        tile_products = cut.rows * products
        if kernel == "backward_weight":
            splits = min(tiles, PROCESSORS // blocks)
            tile_products /= blocks  # the programs of a split share the products of its rows
        # loads before the first product and stores after the last; all programs share the memory
        load = tensors * cut.rows * heads.dim * BFLOAT16 * splits / h200.memory
        turn = max(tile_products * PROCESSORS / h200.products, load)
        yield Work(
            name=f"{variant}: {WORDS[kernel]}",
            launch=launch,
            memory=tensors * values,
            products=products * rows,
            tiled=load + ceil(tiles / splits) * turn,
        )


def all_reduces() -> list[list[str]]:
    """Return a row for the gradients of each variant's matrices in one layer."""
    rows = []
    for variant, names in MATRICES.items():
        size = len(names) * 128**2 * BFLOAT16
        seconds = 2 * (RANKS - 1) / RANKS * size / NVLINK
        rows.append([variant, str(len(names)), f"{size / 1e3:.0f}", f"{1e6 * seconds:.2f}"])
    return rows


HEADER = [
    *("kernel", "memory MB", "GFLOP", "H100 µs", "H200 µs", "bound by", "as tiled, H200"),
    *("registers", "spilled bytes", "programs per SM", "instructions"),
]


def row(work: Work, report: Report) -> list[str]:
    """Return one row of a table."""
    h100, h200 = GPUS.values()
    by_memory = work.memory / h200.memory >= work.products / h200.products
    return [
        work.name,
        f"{work.memory / 1e6:.1f}",
        f"{work.products / 1e9:.2f}",
        f"{1e6 * work.floor(h100):.1f}",
        f"{1e6 * work.floor(h200):.1f}",
        "memory" if by_memory else "compute",
        f"{1e6 * max(work.floor(h200), work.tiled):.1f}",
        str(report.registers),
        str(report.spilled),
        str(report.programs),
        str(report.instructions.total()),
    ]


PAGE = """# Kernel roofline

Before you optimize a kernel, it's useful to know how fast it could be at best. This page contains
such an estimate for each of our kernels and the paper's models (32 query and 4 KV heads of 128,
bfloat16). As you can see, most kernels are limited by the memory bandwidth. Only the gradients of
KHA-MLP are limited by compute. Note that **the numbers are computed, not measured**, so you don't
need a GPU to update them: `python tools/roofline.py > benchmarks/roofline.md`

- *memory* is the number of bytes that the kernel has to read or write.
- *H100* and *H200* are lower bounds for the time. They follow from the memory bandwidth (3.35 and
  4.8 TB/s) and the peak throughput (989 TFLOP/s) in NVIDIA's data sheets.
- *as tiled* is more realistic. It assumes that one program runs on each of the 132
  multiprocessors, and that its first load and last store don't overlap with computation.
- The remaining columns are reported by ptxas for sm_90 ({triton}).

{tables}

## Gradients of the shared matrices, {ranks} tensor-parallel ranks

Each rank has some of the heads, so the gradients of the matrices are summed over the ranks. This is
part of the backward pass: there is one all-reduce in bfloat16 for each layer, microbatch, and
tensor with matrices (queries, keys or values). These are its bytes and the shortest time over
NVLink (450 GB/s in each direction), without latency:

{all_reduces}
"""


def page() -> str:
    """Return ``benchmarks/roofline.md``."""
    import triton

    works: dict[str, list[Work]] = {}
    launches = []
    for name, heads in SIZES.items():
        works[name] = []
        for variant in KERNEL_VARIANTS:
            works[name] += knocks(heads, variant)
        launches += [work.launch for work in works[name]]
    reports = compile_all(list(dict.fromkeys(launches)))
    tables = []
    for name, works_of_size in works.items():
        rows = [row(work, reports[work.launch]) for work in works_of_size]
        tables.append(f"## {name}\n\n{markdown_table(HEADER, rows)}")
    return PAGE.format(
        triton=f"Triton {triton.__version__}",
        tables="\n\n".join(tables),
        ranks=RANKS,
        all_reduces=markdown_table(["variant", "matrices", "KB", "µs"], all_reduces()),
    )


if __name__ == "__main__":
    print(page(), end="")
