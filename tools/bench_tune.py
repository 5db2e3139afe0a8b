"""Time tile sizes of the Triton kernels of KHA-MLP, and compare each with float64.

The candidates compile for Hopper (sm_90) without register spills (`tools/cross_compile.py`). Times
are relative to a copy of the input, and inputs take turns, because one is smaller than the cache of
the GPU. A result that is wrong fails. With `--choose FILE`, the fastest correct tiling of each
kernel is written there. The tests of the kernels use them if the environment variable KHA_TILINGS
names the file. To set them for good, edit kha_megatron/heads/kernels/tilings.py.

On a CPU, Triton's interpreter runs the kernels (TRITON_INTERPRET=1), and times mean nothing.
"""

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch
from bench import positive
from measuring import Cells, Report, interleaved, spreads
from torch import Tensor

from kha_megatron.checkpoint.staging import staged_file
from kha_megatron.errors import ConfigError
from kha_megatron.heads import knock as knocking
from kha_megatron.heads.kernels import tilings
from kha_megatron.heads.kernels.tilings import Kernel, Tiling

TILINGS_VARIABLE = "KHA_TILINGS"
"""Environment variable with a file that :func:`choose` wrote."""
VARIANT = "mlp"
HEAD_DIM = 128
HEADS = 4
QUERIES_PER_GROUP = 8
"""Of the paper's models. The values are part of a QKV buffer."""
TOLERANCE = 1e-2
"""Relative error of norms: several roundings to bfloat16, as in ``bench_kernels.py``."""
BUFFERS = 4
"""Inputs that take turns on a GPU."""

CANDIDATES: dict[Kernel, list[Tiling]] = {
    "forward": [
        Tiling(128, 128, 8, 2),
        Tiling(128, 128, 8, 3),
        Tiling(128, 128, 8, 1),
        Tiling(64, 128, 4, 2),
        Tiling(64, 128, 4, 3),
        Tiling(64, 128, 8, 2),
    ],
    "backward_input": [
        Tiling(128, 64, 8, 2),
        Tiling(128, 128, 8, 1),
        Tiling(64, 128, 4, 2),
        Tiling(64, 128, 4, 3),
        Tiling(64, 64, 4, 2),
    ],
    "backward_weight": [
        Tiling(128, 64, 8, 2),
        Tiling(64, 64, 8, 2),
        Tiling(64, 64, 8, 3),
    ],
}

DEFAULTS = {
    "cuda": {"tokens": [8192, 32768], "repetitions": 20},
    "cpu": {"tokens": [10], "repetitions": 1},
}
HEADER = ["kernel", "tokens", "rows", "columns", "warps", "stages", "µs", "over a copy", "error"]


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call in bfloat16: ``x`` and ``dy`` ``[tokens, heads, D]``, weight `[3, D, D]`.

    ``x`` is the value part of a QKV buffer.
    """

    x: Tensor
    dy: Tensor
    weight: Tensor

    @classmethod
    def draw(cls, tokens: int, device: torch.device) -> "Inputs":
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
        buffer = draw(tokens, HEADS, (QUERIES_PER_GROUP + 2) * HEAD_DIM)
        weight = draw(3, HEAD_DIM, HEAD_DIM) / HEAD_DIM**0.5
        return cls(buffer[..., -HEAD_DIM:], draw(tokens, HEADS, HEAD_DIM), weight)

    def call(self, kernel: Kernel) -> Tensor:
        """Launch a kernel with the tiling that is set."""
        from kha_megatron.heads.kernels import knock_launch

        if kernel == "forward":
            return knock_launch.knock_forward(self.x, self.weight, VARIANT)
        launch = getattr(knock_launch, f"knock_{kernel}")
        return launch(self.x, self.dy, self.weight, VARIANT)

    def expected(self, kernel: Kernel) -> Tensor:
        """Compute the result in float64 with autograd."""
        x = self.x.double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        y = knocking.knock(x, weight, VARIANT)
        if kernel == "forward":
            return y.detach()
        leaf = x if kernel == "backward_input" else weight
        (gradient,) = torch.autograd.grad(y, [leaf], self.dy.double())
        return gradient


class Candidate:
    """A kernel with one of its tilings."""

    def __init__(self, kernel: Kernel, tiling: Tiling, arch: str) -> None:
        self.kernel = kernel
        self.tiling = tiling
        self.arch = arch
        self.launches: dict[Any, Any] = {}
        """Prepared launches, which contain the tiling and are otherwise reused for any tiling."""

    def call(self, inputs: Inputs) -> Tensor:
        """Launch the kernel with this tiling."""
        from kha_megatron.heads.kernels import knock_launch, launches

        setting = {(self.kernel, VARIANT, HEAD_DIM): self.tiling}
        knock_launch._count_splits.cache_clear()
        with (
            mock.patch.dict(tilings.TILINGS[self.arch], setting),
            mock.patch.object(launches, "_launches", self.launches),
        ):
            result = inputs.call(self.kernel)
        knock_launch._count_splits.cache_clear()
        return result

    def call_in_turn(self, inputs: Iterator[Inputs]) -> None:
        """Launch the kernel with the next inputs."""
        self.call(next(inputs))


def measure(kernel: Kernel, tokens: int, repetitions: int, device: torch.device) -> Report:
    """Return the error and the times of every tiling of a kernel."""
    torch.manual_seed(0)
    count = BUFFERS if device.type == "cuda" else 1
    inputs = [Inputs.draw(tokens, device) for _ in range(count)]
    expected = inputs[0].expected(kernel)
    arch = tilings.architecture(device)
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for tiling in CANDIDATES[kernel]:
        name = str(tiling)
        candidate = Candidate(kernel, tiling, arch)
        try:
            result = candidate.call(inputs[0])
            difference = (result.double() - expected).norm() / expected.norm()
            errors[name] = difference.item()
        except Exception as error:  # too much shared memory, for example
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        if not errors[name] < TOLERANCE:
            failed[name] = f"relative error {errors[name]:.2e}, at most {TOLERANCE}"
            continue
        calls[name] = functools.partial(candidate.call_in_turn, itertools.cycle(inputs))
    source = torch.empty(inputs[0].x.numel() * 2, dtype=torch.uint8, device=device)
    calls["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    warm_up = 3 if device.type == "cuda" else 0
    times = interleaved(calls, device, repetitions=repetitions, warm_up=warm_up)
    microseconds = spreads(times, lambda seconds: 1e6 * seconds)
    measured = []
    for tiling in CANDIDATES[kernel]:
        spread = microseconds.get(str(tiling))
        if spread is not None:
            figures = {"microseconds": spread.median, "error": errors[str(tiling)]}
            figures["over_copy"] = spread.median / microseconds["copy"].median
            measured.append({"tiling": asdict(tiling)} | figures)
    return {"kernel": kernel, "tokens": tokens, "tilings": measured, "failed": failed}


def rows(result: Report) -> list[list[str]]:
    lines = []
    for figures in result["tilings"]:
        tiling = figures["tiling"]
        sizes = [str(tiling[name]) for name in ("rows", "columns", "warps", "stages")]
        line = [result["kernel"], str(result["tokens"]), *sizes]
        line += [f"{figures['microseconds']:.1f}", f"{figures['over_copy']:.3f}"]
        line.append(f"{figures['error']:.1e}")
        lines.append(line)
    return lines


def choose(file: Path, results: list[Report]) -> None:
    """Write the tiling of each kernel that is the fastest over all numbers of tokens.

    A tiling must have been correct for each of them.
    """
    chosen = []
    for kernel, candidates in CANDIDATES.items():
        speeds = []
        for tiling in candidates:
            ratios = []
            of_kernel = [result for result in results if result["kernel"] == kernel]
            for result in of_kernel:
                for figures in result["tilings"]:
                    if figures["tiling"] == asdict(tiling):
                        ratios.append(figures["over_copy"])
            if of_kernel and len(ratios) == len(of_kernel):
                speeds.append((geometric_mean(ratios), asdict(tiling)))
        if speeds:
            _, fastest = min(speeds, key=lambda speed: speed[0])
            chosen.append({"kernel": kernel, "tiling": fastest})
    with staged_file(file) as staged:
        staged.write_text(json.dumps(chosen, indent=2) + "\n")


def use_chosen_tilings() -> None:
    """Set the tilings of the file in ``KHA_TILINGS`` in this process, if there is one."""
    file = Path(os.environ.get(TILINGS_VARIABLE, ""))
    if not file.is_file():
        return
    arch = tilings.architecture(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for entry in json.loads(file.read_text()):
        key = (entry["kernel"], VARIANT, HEAD_DIM)
        tilings.TILINGS[arch][key] = Tiling(**entry["tiling"])


def options(add: Callable[..., Any]) -> None:
    add("--tokens", nargs="+", type=positive, help="default: 8192 32768; on a CPU: 10")
    add("--kernels", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    add("--choose", type=Path, metavar="FILE", help="write the fastest tilings there")


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield each kernel and number of tokens, and a function that measures all tilings."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("Set TRITON_INTERPRET=1 to run the kernels on a CPU.")
    results: list[Report] = []
    if args.resume and args.json.is_file():
        results += json.loads(args.json.read_text())["results"]

    def measure_and_choose(kernel: Kernel, tokens: int) -> Report:
        result = measure(kernel, tokens, args.repetitions, device)
        results.append(result)
        if args.choose:
            choose(args.choose, results)
        return result

    for kernel in args.kernels:
        for tokens in args.tokens:
            name = f"{kernel}, {tokens} tokens"
            yield name, functools.partial(measure_and_choose, kernel, tokens)
