"""Measure one subject with several contenders: ``python tools/bench.py NAME [OPTIONS]``.

Each subject is a module ``bench_NAME`` in this directory. A table in Markdown goes to stdout, and
with ``--json FILE`` all figures to a file. ``python tools/bench.py NAME --help`` lists the options.
"""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from measuring import describe_machine, machine_line, markdown_table, write_report

from kha_megatron.errors import KHAError
from kha_megatron.mcore import compat, cpu

BENCHMARKS = {
    "kernels": "the Triton kernels, torch, torch.compile, cuBLAS and a copy of the same bytes",
    "layer": "time and memory of a transformer layer: Megatron's stock layer and ours",
    "decode": "decoding with transformers: exported models and their baseline",
    "conversion": "convert to-hf and to-megatron, and copying the same bytes",
    "fp8": "losses of the quickstart's model in FP8 and in bf16, on the CPU",
}
"""Contenders by subject.

A module has ``DEFAULTS`` by device, ``options(add)`` for its arguments, ``results(given, device)``
which yields one dictionary per comparison, and ``HEADER`` and ``rows(result)`` for the table. The
entries ``skipped`` and ``failed`` of a result say why contenders are missing, ``cell`` names it.
"""


def cuda_is_available() -> bool:
    """Return whether there is a CUDA device that is not the CPU runtime's."""
    return not cpu.is_installed() and torch.cuda.is_available()


def positive(word: str) -> int:
    """Parse an integer of at least 1."""
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {word}")
    return number


def prepare_megatron(device: str) -> None:
    """Prepare the process before Megatron is imported; on the CPU, install its runtime."""
    if device == "cuda":
        compat.hide_incomplete_te()
        return
    for variable, value in cpu.ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    cpu.install(despite_cuda=True, quiet=True)


def arguments(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a subject. Exit with code 2 on errors, as argparse does."""
    module = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", default="cuda" if cuda_is_available() else "cpu", choices=["cuda", "cpu"])
    add("--repetitions", type=positive, help="turns of all contenders")
    add("--json", type=Path, help="write the results and a description of the machine there")
    module.options(add)
    given = parser.parse_args(words)
    if given.device == "cuda" and not cuda_is_available():
        parser.error("--device cuda needs a CUDA device, and none was found. Use --device cpu.")
    for option, value in module.DEFAULTS[given.device].items():
        if getattr(given, option) is None:
            setattr(given, option, value)
    return given


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bench_{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; return 1 if a contender failed and 2 if the subject is unknown."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in BENCHMARKS:
        print(__doc__, *(f"  {n:<12} {what}" for n, what in BENCHMARKS.items()), sep="\n")
        return 0 if name in ("--help", "-h") else 2
    given, module, results = arguments(name, words), _module(name), []
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    machine = describe_machine(device)
    for result in module.results(given, device):
        results.append(result)
        gc.collect()
        torch.cuda.empty_cache()
    rows = [row for result in results for row in module.rows(result)]
    print(machine_line(machine), "", markdown_table(module.HEADER, rows), "", sep="\n")
    for result in results:
        for word in ("skipped", "failed"):
            for contender, why in result.get(word, {}).items():
                print(f"- {result['cell']}: {contender} {word}: {why}")
    if given.json:
        write_report(given.json, machine=machine, arguments=vars(given), results=results)
    return int(any(result.get("failed") for result in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KHAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
