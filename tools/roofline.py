"""The least that each kernel must move and multiply, and the time below which it cannot be.

    python tools/roofline.py > benchmarks/roofline.md

Arithmetic, and what the compiler says of the kernels for Hopper: no GPU is asked, and nothing is
measured. Shape legend: ``T`` tokens, ``G`` key/value heads, ``H`` query heads, ``D`` head dim,
``R = T * G`` rows of values, ``K`` hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from bench_kernels import COPY_RATIO
from bench_layer import TARGETS
from cross_compile import (
    Launch,
    PrologueLaunch,
    Report,
    compile_all,
    compile_prologue,
)
from measuring import markdown_table
from shapes import SHAPES

from kha_megatron.config import KHAConfig
from kha_megatron.heads.knock import MATRICES, Variant
from kha_megatron.ops.kernels.tilings import Kernel, Tiling
from kha_megatron.plan.counts import flops
from kha_megatron.recipes import get_recipe

PROCESSORS = 132
BFLOAT16 = 2
FLOAT32 = 4


class Gpu(NamedTuple):
    """What NVIDIA's data sheet says of one."""

    memory: float
    """Bytes in a second."""
    products: float
    """FLOPs in a second: bfloat16, dense."""


GPUS = {"H100": Gpu(3.35e12, 989e12), "H200": Gpu(4.8e12, 989e12)}
"""Both with 132 multiprocessors."""


class Heads(NamedTuple):
    """What one rank has of an attention."""

    tokens: int
    groups: int
    queries: int
    dim: int

    @property
    def values(self) -> int:
        """Bytes of the values, or of the keys."""
        return self.tokens * self.groups * self.dim * BFLOAT16

    @property
    def turned(self) -> int:
        """Bytes of queries and keys."""
        return self.tokens * (self.groups + self.queries) * self.dim * BFLOAT16


SIZES = {
    "8192 tokens": Heads(8192, 4, 32, 128),
    "32768 tokens": Heads(32768, 4, 32, 128),
    "8192 tokens, one of 4 tensor-parallel ranks": Heads(8192, 1, 8, 128),
}
"""All models of the paper have these heads."""


class Chain(NamedTuple):
    """What programs do that have a multiprocessor each, one thing after another."""

    programs: int
    edges: float
    """Bytes that one program loads before its first product and stores after its last."""
    turns: int
    """Tiles that it takes, at most."""
    products: float
    """FLOPs of a turn."""
    moved: float
    """Bytes of a turn, under way while it multiplies."""

    def seconds(self, gpu: Gpu) -> float:
        """Of the whole, at the least; all programs share the memory."""
        share = gpu.memory / self.programs
        a_turn = max(self.products * PROCESSORS / gpu.products, self.moved / share)
        return self.edges / share + self.turns * a_turn


@dataclass(frozen=True)
class Work:
    """What one kernel does, or several that do one thing."""

    name: str
    memory: float
    """Bytes that are read or written in the GPU's memory, each once."""
    products: float = 0.0
    """FLOPs."""
    cache: float = 0.0
    """Bytes that go between the L2 cache and the multiprocessors, as the kernel is cut."""
    launches: int = 1
    launch: Launch | PrologueLaunch | None = None
    chain: Chain | None = None
    """None where so many programs run at once that one's wait is another's work."""

    def floor(self, gpu: Gpu) -> float:
        """Seconds below which no kernel can be."""
        return max(self.memory / gpu.memory, self.products / gpu.products)

    def chained(self, gpu: Gpu) -> float:
        """Seconds below which one that is cut like ours cannot be."""
        return max(self.floor(gpu), self.chain.seconds(gpu) if self.chain else 0.0)


PRODUCTS: dict[Variant, dict[Kernel, int]] = {
    "mlp": {"forward": 3, "backward_input": 5, "backward_weight": 6},
    "gate": {"forward": 1, "backward_input": 2, "backward_weight": 2},
    "linear": {"forward": 1, "backward_input": 1, "backward_weight": 1},
}
"""Of ``[R, D]`` with ``[D, D]``, what is recomputed included."""

TENSORS: dict[Kernel, int] = {"forward": 2, "backward_input": 3, "backward_weight": 2}
"""Of the values' size, read or written; one less for the input gradient of ``linear``."""


def knocks(heads: Heads, variant: Variant) -> Iterator[Work]:
    """The kernels that knock values."""
    rows = heads.tokens * heads.groups
    matrices = len(MATRICES[variant]) * heads.dim**2
    for kernel, count in PRODUCTS[variant].items():
        launch = Launch(kernel, variant, heads.dim, torch.bfloat16, tma=True)
        cut: Tiling = launch.tiling
        tensors = TENSORS[kernel] - (kernel == "backward_input" and variant == "linear")
        tiles, blocks = ceil(rows / cut.rows), ceil(heads.dim / cut.columns)
        splits = min(tiles, PROCESSORS)
        moved, a_tile = tensors * heads.values, tensors * cut.rows * heads.dim * BFLOAT16
        products = count * 2 * heads.dim**2
        if kernel == "backward_weight":
            splits = min(tiles, PROCESSORS // blocks)
            cache = blocks * moved + FLOAT32 * matrices * splits
            # the programs of a split wait for the same rows, and share its products
            a_turn = cut.rows * products / blocks
        else:
            # matrices in blocks are read anew for every tile
            cache = moved + BFLOAT16 * matrices * (splits if blocks == 1 else tiles)
            a_turn = cut.rows * products
        yield Work(
            f"{variant}: {WORDS[kernel]}",
            moved,
            products * rows,
            cache,
            2 if kernel == "backward_weight" else 1,
            launch,
            Chain(splits, a_tile, ceil(tiles / splits), a_turn, a_tile),
        )


WORDS: dict[Kernel, str] = {
    "forward": "forward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradients and their sum",
}


def prologues(heads: Heads) -> Iterator[Work]:
    """Ours, with knocked values elsewhere, beside what stock Megatron runs in its place."""
    angles = heads.tokens * heads.dim // 2 * FLOAT32
    whole = heads.turned + 2 * heads.values
    for direction, times, launches in (("forward", 2, 1), ("backward", 3, 4)):
        launch = PrologueLaunch(direction, heads.dim, torch.bfloat16, heads.dim, False)
        moved = times * heads.turned + angles
        cache = moved + (heads.groups - 1) * angles
        yield Work(f"prologue: {direction}", moved, 0, cache, launches, launch)
    yield Work("stock: two norms, two rotations", 4 * heads.turned, launches=4)
    moved = 5 * heads.turned + 2 * (whole - heads.values)
    yield Work("stock: their backward, and joining three gradients", moved, launches=7)


def folding(heads: Heads, hidden: int) -> Work:
    """``T^T W`` for every head, its two gradients, and none of the activations."""
    rows = heads.queries * heads.dim + 2 * heads.groups * heads.dim
    weight = rows * hidden * BFLOAT16
    return Work("folding", 5 * weight, 3 * 2 * rows * hidden * heads.dim)


def layer_floor(shape: str, tokens: int, gpu: Gpu) -> float:
    """Seconds of a stock layer's products alone, forward and backward, in bfloat16; sequences of
    8192, the scores of later positions left out."""
    model = get_recipe(SHAPES[shape][0]).run.model
    assert model is not None  # the paper's recipes have one
    counted = flops(model, KHAConfig(), 8192)
    of_a_layer = (counted.layers - counted.scores / 2) / model.layers
    return 3 * of_a_layer * tokens / 8192 / gpu.products


def work_of(heads: Heads) -> list[Work]:
    """All rows of one table."""
    return [*(work for variant in MATRICES for work in knocks(heads, variant)), *prologues(heads)]


def all_launches() -> list[Launch | PrologueLaunch]:
    """What the tables tell the compiler's words about."""
    found = [work.launch for heads in SIZES.values() for work in work_of(heads)]
    return list(dict.fromkeys(launch for launch in found if launch is not None))


def compiled(launches: list[Any]) -> dict[Any, Report]:
    """What the compiler says of each."""
    prologue = [launch for launch in launches if isinstance(launch, PrologueLaunch)]
    reports = compile_all([launch for launch in launches if launch not in prologue])
    return reports | {launch: compile_prologue(launch) for launch in prologue}


HEADER = [
    *("kernel", "memory MB", "L2 MB", "GFLOP", "H100 µs", "H200 µs", "bound by", "as cut, H200 µs"),
    *("registers", "spilled bytes", "programs of a multiprocessor", "instructions", "launches"),
]


def row(work: Work, reports: Mapping[Any, Report]) -> list[str]:
    """Of a table."""
    h100, h200 = GPUS.values()
    bound = "memory" if work.memory / h200.memory >= work.products / h200.products else "products"
    said = ["-"] * 4
    if work.launch is not None:
        report = reports[work.launch]
        instructions = str(sum(report.instructions.values()))
        said = [str(report.registers), str(report.spilled), str(report.programs), instructions]
    return [
        work.name,
        f"{work.memory / 1e6:.1f}",
        f"{work.cache / 1e6:.1f}" if work.cache else "-",
        f"{work.products / 1e9:.2f}",
        f"{1e6 * work.floor(h100):.1f}",
        f"{1e6 * work.floor(h200):.1f}",
        bound,
        f"{1e6 * work.chained(h200):.1f}" if work.launch else "-",
        *said,
        str(work.launches),
    ]


def targets() -> Iterator[list[str]]:
    """The targets of kernels.md and speed.md beside what the floors leave room for."""
    gpu = GPUS["H200"]
    for tokens in (8192, 32768):
        forward = next(knocks(SIZES[f"{tokens} tokens"], "mlp"))
        ratio = forward.chained(gpu) * gpu.memory / forward.memory
        what = f"KHA-MLP forward over a copy, {tokens} tokens"
        yield [what, f"{COPY_RATIO} (aim 1.2)", f"{ratio:.2f}", reach(ratio, COPY_RATIO, 1.2)]
    for (shape, tokens, variant), (limit, aim) in TARGETS.items():
        heads = SIZES[f"{tokens} tokens"]
        ours, stock = 0.0, 0.0
        if "kernels" in variant:
            passes = list(prologues(heads))
            ours += sum(work.chained(gpu) for work in passes[:2])
            stock += sum(work.floor(gpu) for work in passes[2:])
            if "folded" in variant:  # values are copied, which stock need not
                ours += 4 * heads.values / gpu.memory
        if variant.startswith("mlp"):
            ours += sum(work.chained(gpu) for work in knocks(heads, "mlp"))
        else:
            model = get_recipe(SHAPES[shape][0]).run.model
            assert model is not None
            ours += folding(heads, model.hidden_size).floor(gpu)  # once a microbatch
        ratio = 1 + (ours - stock) / layer_floor(shape, tokens, gpu)
        what = f"{variant} over stock, {shape}, {tokens} tokens"
        yield [what, f"{limit:g} (aim {aim:g})", f"{ratio:.3f}", reach(ratio, limit, aim)]


def reach(ratio: float, limit: float, aim: float) -> str:
    """Whether the floors leave room."""
    if ratio > limit:
        return "out of reach"
    return "within reach" if ratio <= aim else "the limit is within reach, the aim is not"


PAGE = """# Floors of the kernels

What each kernel must move and multiply on one rank of the paper's models (32 query and 4 key/value
heads of 128, bfloat16), and the time that it cannot be below: **arithmetic; nothing here was
measured**. Made by `python tools/roofline.py > benchmarks/roofline.md`, which asks no GPU.

- *memory* is what must be read or written once; *H100* and *H200* are that over 3.35 and 4.8 TB/s,
  or the products over 989 TFLOP/s, whichever takes longer (NVIDIA's data sheets; 132
  multiprocessors).
- *L2* is what goes between cache and multiprocessors: a program loads the matrices; the weight
  gradients of `mlp` are cut into two blocks of columns, whose programs read the same rows, from
  memory once; its input gradient loads half of each matrix after the other, for every tile.
- *as cut*: where a multiprocessor runs one program, its first rows are loaded before anything is
  multiplied, its last ones stored after everything, and all wait for those with one tile more: 256
  tiles of 128 rows are two turns of 132 programs.
- *registers*, *spilled bytes*, *programs of a multiprocessor* and *instructions* are what ptxas
  makes of it for sm_90 ({triton}).
- *launches* include the sums of partial gradients, and two casts of the norms' gradients. Cosines
  and sines are none: the prologue computes them from Megatron's angles, of which it reads half, 2.1
  MB at 8192 tokens. As tables made anew in each layer and pass they moved 34 MB a layer.

{tables}

## Targets

The targets of [kernels.md](kernels.md) and [speed.md](speed.md), and what the floors above leave
room for on an H200. Of a layer: its stock products at 989 TFLOP/s, forward and backward, and beside
them what ours takes more or less than stock: every kernel of ours *as cut*, stock's at its floor. A
real layer takes two or three times as long, which brings its ratio nearer to 1.

{targets}

A copy's aim at 8192 tokens is out of reach for programs that have a multiprocessor each:
{first:.1f} µs are two turns of {turn:.1f} µs and the first load and last store around them, where
a copy's floor is {copy:.1f} µs, and the matrices (96 KB for each program) come on top. Two programs
of 64 rows and four warps would fit (112 KB when nothing is loaded ahead): edges of half the length,
twice the matrices to load, and loads that only the other program hides. Which is faster takes a GPU
to tell. Folding by itself costs what it costs: below stock it comes with the fused prologue.
"""


def page(reports: Mapping[Any, Report]) -> str:
    """``benchmarks/roofline.md``."""
    import triton

    tables = []
    for name, heads in SIZES.items():
        works = work_of(heads)
        tables.append(f"## {name}\n\n{markdown_table(HEADER, [row(w, reports) for w in works])}")
    forward, gpu = next(knocks(SIZES["8192 tokens"], "mlp")), GPUS["H200"]
    assert forward.chain is not None  # it multiplies
    return PAGE.format(
        triton=f"Triton {triton.__version__}",
        tables="\n\n".join(tables),
        targets=markdown_table(["what", "at most", "floors allow", ""], list(targets())),
        first=1e6 * forward.chained(gpu),
        turn=1e6 * forward.chain.products * PROCESSORS / gpu.products,
        copy=1e6 * forward.memory / gpu.memory,
    )


if __name__ == "__main__":
    print(page(compiled(all_launches())), end="")
