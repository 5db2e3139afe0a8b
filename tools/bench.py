"""Measure one thing in several ways: ``python tools/bench.py NAME [OPTIONS]``.

Every benchmark is a module ``bench_NAME`` of this folder. All contenders of a comparison take turns
in one run, in another order each time; a table in Markdown goes to stdout, and with ``--json FILE``
the figures to a file. `python tools/bench.py NAME --help` says more. They are:
"""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from measuring import Spread, describe_machine, markdown_table, publish

from kha_megatron.errors import KHAError
from kha_megatron.mcore import compat, cpu

BENCHMARKS = {
    "kernels": "the fused kernels, plain and compiled torch, cuBLAS, Transformer Engine, a copy",
    "layer": "a transformer layer, forward and backward: Megatron's stock layer beside ours",
    "memory": "what a layer keeps for its backward pass: stock beside ours",
    "step": "whole training steps of the real entry point: stock layers beside ours",
    "decode": "decoding with transformers: exported models beside their baseline",
    "instruments": "training iterations on the CPU with --kha-log-interval and without",
    "conversion": "convert to-hf and to-megatron beside copying the same bytes",
    "fp8": "losses of the quickstart's model in FP8 beside bf16, on the CPU",
    "cpu": "training the quickstart's model on the CPU, and starting, beside a plain PyTorch loop",
    "data": "data prepare beside tokenizing the same text with tokenizers alone",
}
"""The contenders of each, in a line.

A module has ``DEFAULTS`` by device, ``options(add)`` for its arguments, ``results(given, device)``,
which yields a dict for each comparison, and ``HEADER`` and ``rows(result)`` for the table; where
there is something to refuse, ``refusal(given)``. A result's ``skipped`` and ``failed`` say why
contenders are not there; ``cell`` names it in these lines.
"""


def cuda_is_here() -> bool:
    """Whether there is one, the CPU runtime's pretence aside."""
    return not cpu.is_installed() and torch.cuda.is_available()


def positive(word: str) -> int:
    """A whole number from 1 up."""
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def choose_device(name: str) -> torch.device:
    """The device of this process. For the CPU, before Megatron is imported, its runtime."""
    if name == "cuda":
        compat.hide_incomplete_te()
        return torch.device("cuda", torch.cuda.current_device())
    for variable, value in cpu.ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    cpu.install(despite_cuda=True, quiet=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreting

        interpreting.mend()
    return torch.device("cpu")


def within(limit: float, ratio: Spread) -> dict[str, bool]:
    """Whether a ratio's median keeps to the limit, and whether its quarters agree about that."""
    return {"met": ratio.median <= limit, "decided": not ratio.low <= limit < ratio.high}


def in_words(target: Mapping[str, Any]) -> str:
    """``met``, ``MISSED``, and where the spread is too wide to tell, that."""
    word = "met" if target["met"] else "MISSED"
    return word if target.get("decided", True) else f"{word}, undecided by the spread"


def arguments(name: str, words: Sequence[str]) -> argparse.Namespace:
    """What the user asked for; what was left out is the device's default.

    Refuses with exit code 2, as argparse does.
    """
    module = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=module.__doc__,
        epilog=getattr(module, "EXAMPLE", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", default="cuda" if cuda_is_here() else "cpu", choices=["cuda", "cpu"])
    add("--repetitions", type=positive, help="turns of all contenders")
    add("--json", type=Path, help="write the results there, with the machine's description")
    module.options(add)
    given = parser.parse_args(words)
    if given.device == "cuda" and not cuda_is_here():
        parser.error("--device cuda: no CUDA device was found, use --device cpu")
    for option, value in module.DEFAULTS[given.device].items():
        if getattr(given, option) is None:
            setattr(given, option, value)
    if why := getattr(module, "refusal", lambda given: None)(given):
        parser.error(why)
    return given


def add_model_options(
    add: Callable[..., Any], *, many: bool, variants: Sequence[str] | None = None
) -> None:
    """Arguments of the benchmarks that run Megatron's layers."""
    from shapes import PRECISIONS, SHAPES
    from variants import VARIANTS

    add("--shapes", nargs="+", choices=list(SHAPES))
    add("--sequence", type=positive, help="tokens of one sequence (default: 8192)")
    words = "bf16, or an FP8 recipe of Megatron's"
    if many:
        add("--precisions", nargs="+", choices=list(PRECISIONS), help=words)
    else:
        add("--precision", default="bf16", choices=list(PRECISIONS), help=words)
    add("--variants", nargs="+", choices=list(VARIANTS), default=variants or list(VARIANTS))
    words = "one more argument of Megatron's for every layer, as --megatron=--flag=value"
    add("--megatron", action="append", default=[], metavar="WORD", help=words)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bench_{name}")


def table(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The results in Markdown, and who did not take part, and why."""
    module = _module(name)
    absent = {
        f"- {result['cell']}: {contender} {word}: {why}": None
        for result in results
        for word in ("skipped", "failed")
        for contender, why in result.get(word, {}).items()
    }
    rows = [row for result in results for row in module.rows(result)]
    return "\n".join([markdown_table(module.HEADER, rows), "", *absent])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for and print it; 1 if a contender broke."""
    name, *words = sys.argv[1:] if argv is None else argv or ["--help"]
    if name not in BENCHMARKS:
        print(__doc__, *(f"  {n:<12} {what}" for n, what in BENCHMARKS.items()), sep="\n")
        return 0 if name in ("--help", "-h") else 2
    given, module = arguments(name, words), _module(name)
    start = getattr(module, "start", lambda given: torch.device(given.device))
    device = start(given)
    machine = describe_machine(device)
    results = []
    for result in module.results(given, device):
        results.append(result)
        gc.collect()
        torch.cuda.empty_cache()
    publish(table(name, results), machine, given, results)
    return int(any(result.get("failed") for result in results))


def exit_with(main: Callable[[], int]) -> None:
    """End the process with what ``main`` returns; what it cannot honour is one line on stderr."""
    try:
        sys.exit(main())
    except KHAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    exit_with(main)
