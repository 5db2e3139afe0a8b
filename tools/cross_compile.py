"""Compile the knock kernels for a GPU on a machine without one, and report what ptxas says.

    python -m tools.cross_compile [sm_90]     every launch: registers, spills, shared memory

Triton includes ptxas and nvdisasm, so nothing else is needed. The kernels are not run.
"""

import contextlib
import io
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from kha_megatron.heads.kernels.tilings import (
    HEAD_DIMS,
    KERNEL_VARIANTS,
    SHARED_MEMORY,
    Kernel,
    Tiling,
    padded,
    tiling,
)
from kha_megatron.heads.knock import Variant

TRITON_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
ROWS_ARGUMENTS = ("X", "Y", "DX", "DY")
TENSOR_CORES = {"HMMA", "HGMMA", "UTCHMMA"}  # instructions of Ampere, Hopper and Blackwell


class Launch(NamedTuple):
    """One kernel as it is compiled for one kind of arguments."""

    kernel: Kernel
    variant: Variant
    head_dim: int
    dtype: torch.dtype
    tma: bool
    arch: str = "sm_90"

    @property
    def tiling(self) -> Tiling:
        return tiling(self.kernel, self.variant, self.head_dim, self.dtype, self.arch)

    def __str__(self) -> str:
        dtype = TRITON_DTYPES[self.dtype]
        access = "tma" if self.tma else "pointers"
        return f"{self.arch}-{self.kernel}-{self.variant}-{self.head_dim}-{dtype}-{access}"


class Report(NamedTuple):
    """The compiler's report of one launch."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread."""
    shared: int
    """Bytes per program."""
    threads: int
    """Per program."""
    instructions: Counter[str]
    """Count by the first word of the name."""

    @property
    def programs(self) -> int:
        """Return how many programs fit on a multiprocessor of Hopper."""
        # a warp allocates 256 registers at a time; a program reserves a kilobyte of shared memory
        of_a_warp = -(-32 * self.registers // 256) * 256
        by_registers = 65536 // of_a_warp // (self.threads // 32)
        return min(by_registers, 228 * 1024 // (self.shared + 1024), 2048 // self.threads, 32)


def launches(dtypes: tuple[torch.dtype, ...], arch: str = "sm_90") -> list[Launch]:
    """Return all launches of the package for these dtypes."""
    all_launches = []
    for sizes in itertools.product(get_args(Kernel), KERNEL_VARIANTS, HEAD_DIMS, dtypes):
        launch = Launch(*sizes, tma=False, arch=arch)
        all_launches.append(launch)
        if launch.tiling.allows_descriptors(launch.variant, launch.head_dim, launch.dtype, arch):
            all_launches.append(launch._replace(tma=True))
    return all_launches


def compile_launch(launch: Launch) -> Report:
    """Compile one launch, without Triton's cache."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kha_megatron.heads.kernels import knock_kernels

    options = launch.tiling.options(launch.variant, launch.head_dim) | {"TMA": launch.tma}
    function = getattr(knock_kernels, f"knock_{launch.kernel}_kernel")
    constants = {}
    for name in function.arg_names:
        if name in options:
            constants[name] = options[name]
        elif launch.tma and name.endswith("_heads"):
            # rows at one stride have one head per token; otherwise the number is an argument
            constants[name] = 1
    signature = {}
    constexprs = {}
    attributes = {}
    for position, name in enumerate(function.arg_names):
        if name in constants:
            argument_type = "constexpr"
            constexprs[position,] = constants[name]
        else:
            argument_type = _argument_type(launch, name)
        signature[name] = argument_type
        if argument_type.startswith("*") or name.endswith(("_token", "_head")):
            attributes[position,] = [["tt.divisibility", 16]]
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constexprs,
        attrs=attributes,
    )
    target = GPUTarget("cuda", int(launch.arch.removeprefix("sm_")), 32)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        compiled = triton.compile(
            source,
            target=target,
            options={
                "num_warps": options["num_warps"],
                "num_stages": options["num_stages"],
            },
        )
    log = output.getvalue()
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Report(
        registers=int(registers[1]),
        spilled=max(int(spills[1]), int(spills[2])),
        shared=compiled.metadata.shared,
        threads=32 * options["num_warps"],
        instructions=_instructions(compiled.asm["cubin"]),
    )


def _argument_type(launch: Launch, name: str) -> str:
    """Return the type of an argument of a kernel in Triton's signature."""
    dtype = TRITON_DTYPES[launch.dtype]
    if name == "PARTIAL":
        return "*fp32"
    if name in ROWS_ARGUMENTS and launch.tma:
        return f"tensordesc<{dtype}[{launch.tiling.rows},{padded(launch.head_dim)}]>"
    if name in ROWS_ARGUMENTS or name == "W":
        return f"*{dtype}"
    return "i32"


def _instructions(cubin: bytes) -> Counter[str]:
    import triton

    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-c", file.name]
        listing = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    # an address, an optional predicate, and the name up to its first dot
    lines = re.finditer(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", listing, re.M)
    return Counter(line[1] for line in lines)


def complaints(launch: Launch, report: Report) -> list[str]:
    """Return which bounds the report exceeds."""
    limit = SHARED_MEMORY[launch.arch]
    exceeded = []
    if report.spilled:
        exceeded.append(f"{report.spilled} bytes spilled")
    if report.shared > limit:
        exceeded.append(f"{report.shared} bytes of shared memory, limit {limit}")
    if launch.dtype.itemsize == 2 and not report.instructions.keys() & TENSOR_CORES:
        exceeded.append("no tensor cores")
    return exceeded


def compile_all(chosen: list[Launch]) -> dict[Launch, Report]:
    """Compile all launches in two processes."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return dict(zip(chosen, pool.map(compile_launch, chosen, chunksize=4), strict=True))


def main() -> None:
    chosen = []
    for arch in sys.argv[1:] or SHARED_MEMORY:
        chosen += launches(tuple(TRITON_DTYPES), arch)
    for launch, report in compile_all(chosen).items():
        print(
            f"{launch!s:52} registers {report.registers:3}  spilled {report.spilled:4}  "
            f"shared {report.shared / 1024:6.1f} KB  {report.instructions.total():4} instructions",
            *complaints(launch, report),
        )


if __name__ == "__main__":
    main()
