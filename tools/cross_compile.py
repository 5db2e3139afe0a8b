"""Compiling the kernels for an architecture on a machine without it, and what ptxas says of them.

    python -m tools.cross_compile     every launch on sm_90: registers, spills, memory, instructions

A ``Launch`` is what a GPU would be asked to compile. Triton brings ptxas and nvdisasm, so that
nothing else is needed; what runs is not found out.
"""

import contextlib
import hashlib
import io
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from kha_megatron.heads.knock import MATRICES
from kha_megatron.ops.kernels.tilings import (
    HEAD_DIMS,
    SHARED_MEMORY,
    Kernel,
    Tiling,
    padded,
    tiling,
)

TRITON_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ROWS_ARGUMENTS = ("X", "Y", "DX", "DY")


class Launch(NamedTuple):
    """One kernel as it is compiled for one kind of arguments."""

    kernel: Kernel
    variant: str
    head_dim: int
    dtype: torch.dtype
    tma: bool
    architecture: str = "sm_90"

    @property
    def tiling(self) -> Tiling:
        """How it is cut."""
        return tiling(self.kernel, self.variant, self.head_dim, self.dtype, self.architecture)

    def __str__(self) -> str:
        how = "tma" if self.tma else "pointers"
        dtype = TRITON_DTYPES[self.dtype]
        return f"{self.kernel}-{self.variant}-{self.head_dim}-{dtype}-{how}"


class PrologueLaunch(NamedTuple):
    """One kernel of the prologue, for the paper's 8 queries of each of 4 groups."""

    direction: str
    head_dim: int
    dtype: torch.dtype
    turning: int
    """Features of a head that RoPE turns."""
    copies_values: bool = True
    """Whether it moves values too, which no kernel has knocked."""
    architecture: str = "sm_90"


class Report(NamedTuple):
    """What the compiler says of one launch."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes, of a thread."""
    shared: int
    """Bytes, of a program."""
    threads: int
    """Of a program."""
    instructions: dict[str, int]
    """How many of each stand in the machine's code, by the first word of their names: ``HGMMA``
    are products of a warpgroup, ``HMMA`` of one warp."""

    @property
    def tensor_cores(self) -> bool:
        """Whether they multiply."""
        return bool(self.instructions.keys() & {"HGMMA", "HMMA"})

    @property
    def programs(self) -> int:
        """How many fit on a multiprocessor of Hopper at once."""
        # registers come in 256 for a warp; a program takes a kilobyte of shared memory for itself
        of_a_warp = -(-32 * self.registers // 256) * 256
        by_registers = 65536 // of_a_warp // (self.threads // 32)
        return min(by_registers, 228 * 1024 // (self.shared + 1024), 2048 // self.threads, 32)


def launches(dtypes: tuple[torch.dtype, ...], architecture: str = "sm_90") -> list[Launch]:
    """All that the package may launch."""
    sizes = itertools.product(get_args(Kernel), MATRICES, HEAD_DIMS, dtypes)
    found = []
    for kernel, variant, head_dim, dtype in sizes:
        launch = Launch(kernel, variant, head_dim, dtype, False, architecture)
        found.append(launch)
        if launch.tiling.allows_descriptors(variant, head_dim, dtype):
            found.append(launch._replace(tma=True))
    return found


def compile_launch(launch: Launch) -> Report:
    """Compile one, never from a cache, for want of ptxas's words there."""
    from triton import knobs

    from kha_megatron.ops.kernels import knock_kernels

    options = launch.tiling.options(launch.variant, launch.head_dim) | {"TMA": launch.tma}
    function = getattr(knock_kernels, f"knock_{launch.kernel}")
    # two strides between rows are the general case, so the heads are a number of the run
    constants = {name: 1 for name in function.arg_names if launch.tma and name.endswith("_heads")}
    constants |= {name: value for name, value in options.items() if name in function.arg_names}
    signature, aligned = {}, []
    for name in function.arg_names:
        signature[name] = _type(name, launch, constants)
        if signature[name].startswith("*") or name.endswith(("_token", "_head")):
            aligned.append(name)
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    return _compile(function, signature, constants, aligned, options, launch.architecture)


def compile_prologue(launch: PrologueLaunch) -> Report:
    """Compile a kernel of the prologue as the package launches it, with both norms."""
    from triton import knobs

    from kha_megatron.ops.kernels import prologue_kernels
    from kha_megatron.ops.kernels.prologue_launch import sizes, tiling

    function = getattr(prologue_kernels, f"prologue_{launch.direction}")
    turned = launch.turning // 2
    cut = tiling(launch.direction, launch.head_dim, turned)
    constants = sizes(launch.head_dim, turned, cut)
    constants |= {"COPY_V": launch.copies_values, "NORM_Q": True, "NORM_K": True, "CENTRE": 0.0}
    constants |= {"G": 4, "QUERIES": 8}
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("ANGLES", "PARTIAL"):
            signature[name] = "*fp32"
        elif name.isupper() and name != "T":
            signature[name] = f"*{TRITON_DTYPES[launch.dtype]}"
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
    whole = ("T", "b", "eps", "angle_tokens", *constants)
    aligned = [name for name in function.arg_names if name not in whole]
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    return _compile(function, signature, constants, aligned, cut.options(), launch.architecture)


def compile_reduction(architecture: str = "sm_90") -> Report:
    """Compile the sum over splits."""
    from triton import knobs

    from kha_megatron.ops.kernels import knock_kernels, knock_launch

    constants = dict(knock_launch.REDUCTION)
    signature = {"PARTIAL": "*fp32", "DW": "*bf16", "S": "i32", "N": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    function = knock_kernels.sum_partials
    options = {"num_warps": 4, "num_stages": 3}
    return _compile(function, signature, constants, ["PARTIAL", "DW"], options, architecture)


def _type(name: str, launch: Launch, constants: dict) -> str:
    dtype = TRITON_DTYPES[launch.dtype]
    if name in constants:
        return "constexpr"
    if name in ROWS_ARGUMENTS and launch.tma:
        return f"tensordesc<{dtype}[{launch.tiling.rows},{padded(launch.head_dim)}]>"
    if name == "PARTIAL":
        return "*fp32"
    return f"*{dtype}" if name in (*ROWS_ARGUMENTS, "W") else "i32"


def _compile(function, signature, constants, aligned, options, architecture) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    at = function.arg_names.index
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(at(name),): value for name, value in constants.items()},
        attrs={(at(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    chosen = ("num_warps", "num_stages", "maxnreg")
    options = {name: options[name] for name in chosen if name in options}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=target, options=options)
    words = said.getvalue()
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", words)
    return Report(
        registers=int(re.search(r"Used (\d+) registers", words)[1]),
        spilled=max(int(spills[1]), int(spills[2])),
        shared=compiled.metadata.shared,
        threads=32 * options["num_warps"],
        instructions=_instructions(compiled.asm["cubin"]),
    )


def _instructions(cubin: bytes) -> dict[str, int]:
    import triton

    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # an address, perhaps a predicate, a name whose words after points say how
    lines = re.finditer(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", listing, re.M)
    return dict(Counter(line[1] for line in lines))


def fingerprint() -> str:
    """Of all that decides about a report: the kernels, how they are cut, how they are compiled."""
    import triton

    from kha_megatron.ops import kernels

    found = hashlib.sha256(triton.__version__.encode())
    for file in (*sorted(Path(kernels.__file__).parent.glob("*.py")), Path(__file__)):
        found.update(file.read_bytes())
    return found.hexdigest()


def complaints(launch: Launch, report: Report) -> list[str]:
    """What is beyond its written bound."""
    found = []
    if report.spilled > launch.tiling.spills:
        found.append(f"{report.spilled} bytes spilled, bound {launch.tiling.spills}")
    if report.shared > (limit := SHARED_MEMORY[launch.architecture]):
        found.append(f"{report.shared} bytes of shared memory, limit {limit}")
    if launch.dtype.itemsize == 2 and not report.tensor_cores:
        found.append("no tensor cores")
    return found


def compile_all(chosen: list[Launch], processes: int = 2) -> dict[Launch, Report]:
    """All of them, over several processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return dict(zip(chosen, pool.map(compile_launch, chosen, chunksize=4), strict=True))


def main() -> None:
    """Print the report of every launch."""
    for launch, report in compile_all(launches(tuple(TRITON_DTYPES))).items():
        bound = launch.tiling.spills
        print(
            f"{launch!s:45} registers {report.registers:3}  spilled {report.spilled:4} "
            f"(bound {bound:3})  shared {report.shared / 1024:6.1f} KB  "
            f"{sum(report.instructions.values()):4} instructions",
            *complaints(launch, report),
        )


if __name__ == "__main__":
    main()
