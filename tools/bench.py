"""Measure one subject with several contenders: ``python tools/bench.py NAME [OPTIONS]``.

Each subject is a module ``bench_NAME`` in this directory. A table in Markdown goes to stdout, and
with ``--json FILE`` all figures to a file. Both get each result as soon as it is measured. After an
interruption, ``--resume`` measures only what is missing in the file. ``python tools/bench.py NAME
--help`` lists the options.
"""

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import measuring
import torch

from kha_megatron.errors import KHAError
from kha_megatron.mcore import compat, cpu

BENCHMARKS = {
    "kernels": "the Triton kernels, torch, torch.compile, cuBLAS and a copy of the same bytes",
    "layer": "time and memory of a transformer layer: Megatron's stock layer and ours",
    "step": "a whole training step: Megatron's stock model and ours",
    "tune": "tile sizes of the Triton kernels of KHA-MLP",
    "decode": "decoding with transformers: exported models and their baseline",
    "conversion": "convert to-hf and to-megatron, and copying the same bytes",
    "fp8": "losses of the quickstart's model in FP8 and in bf16, on the CPU",
}
"""Contenders by subject.

A module has ``DEFAULTS`` by device, ``options(add)`` for its arguments, ``cells(args, device)``
which yields the name of each comparison and a function that returns its result as a dictionary,
and ``HEADER`` and ``rows(result)`` for the table. The entries ``skipped`` and ``failed`` of a
result say why contenders are missing.
"""


def cuda_is_available() -> bool:
    """Return whether there is a CUDA device that is not the CPU runtime's."""
    return not cpu.is_installed() and torch.cuda.is_available()


def positive(word: str) -> int:
    """Parse an integer of at least 1."""
    number = int(word)
    if number < 1:
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
    module = importlib.import_module(f"bench_{name}")
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--device",
        default="cuda" if cuda_is_available() else "cpu",
        choices=["cuda", "cpu"],
    )
    add("--repetitions", type=positive, help="turns of all contenders")
    add(
        "--json",
        type=Path,
        help="write the results and a description of the machine there",
    )
    add(
        "--resume",
        action="store_true",
        help="measure only what is missing in the --json file",
    )
    module.options(add)
    args = parser.parse_args(words)
    if args.device == "cuda" and not cuda_is_available():
        parser.error(f"No CUDA device found: {compat.cuda_versions()}. Use --device cpu.")
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE.")
    for option, value in module.DEFAULTS[args.device].items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    return args


def publish_result(header: list[str], result: measuring.Report) -> None:
    """Publish the rows of a result, and why contenders are missing."""
    for number, row in enumerate(result["rows"], 1):
        cells = [f"{title} {cell}" for title, cell in zip(header, row, strict=True) if cell]
        is_missed = any("MISSED" in cell for cell in row)
        status = "missed" if is_missed else "measured"
        name = f"{result['cell']}, row {number}"
        measuring.publish(name, status, ", ".join(cells), cells=row, header=header)
    for status in ("skipped", "failed"):
        for contender, reason in result.get(status, {}).items():
            measuring.publish(f"{result['cell']}, {contender}", status, reason)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; return 1 if a contender failed and 2 if the subject is unknown."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in BENCHMARKS:
        print(__doc__)
        for subject, contenders in BENCHMARKS.items():
            print(f"  {subject:<12} {contenders}")
        return 0 if name in ("--help", "-h") else 2
    args = arguments(name, words)
    module = importlib.import_module(f"bench_{name}")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    options = dict(vars(args))
    del options["json"], options["resume"]
    report = {
        "machine": measuring.describe_machine(device),
        "arguments": options,
        "header": module.HEADER,
        "complete": False,
        "results": [],
    }
    if args.resume and args.json.is_file():
        report = measuring.read_report(args.json, report)
    results = report["results"]
    rows = []
    for result in results:
        rows += result["rows"]
    print(measuring.machine_line(report["machine"]), "", sep="\n")
    print(measuring.markdown_table(module.HEADER, rows), flush=True)
    measured = {result["cell"] for result in results}
    cells = [] if report["complete"] else module.cells(args, device)
    for cell, measure in cells:
        if cell in measured:
            continue
        print(cell, file=sys.stderr, flush=True)
        result = {"cell": cell} | measure()
        result["rows"] = module.rows(result)
        results.append(result)
        for row in result["rows"]:
            print(measuring.markdown_row(row), flush=True)
        measuring.write_report(args.json, report)
        publish_result(module.HEADER, result)
        gc.collect()
        torch.cuda.empty_cache()
    measuring.write_report(args.json, report | {"complete": True})
    print()
    for result in results:
        for word in ("skipped", "failed"):
            for contender, why in result.get(word, {}).items():
                print(f"- {result['cell']}: {contender} {word}: {why}")
    return int(any(result.get("failed") for result in results))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore interrupts
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KHAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("Interrupted. --resume measures what is missing.", file=sys.stderr)
        sys.exit(130)
