"""What the benchmarks that run models share: command lines, devices, words for targets."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import Spread

from kha_megatron import cpu
from kha_megatron.errors import KHAError


def parser_for(documentation: str, example: str) -> argparse.ArgumentParser:
    """A parser with what all of them take: ``--device``, ``--repetitions``, ``--json``."""
    parser = argparse.ArgumentParser(
        description=documentation,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", default="cuda" if cuda_is_here() else "cpu", choices=["cuda", "cpu"]
    )
    parser.add_argument("--repetitions", type=positive, help="turns of all contenders")
    parser.add_argument(
        "--json", type=Path, help="write the results there, with the machine's description"
    )
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    defaults: Mapping[str, Mapping[str, Any]],
) -> argparse.Namespace:
    """What the user asked for; what was left out is the device's default.

    Refuses with exit code 2, as argparse does.
    """
    given = parser.parse_args(argv)
    if given.device == "cuda" and not cuda_is_here():
        parser.error("--device cuda: no CUDA device was found, use --device cpu")
    for name, value in defaults[given.device].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


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


def exit_with(main: Callable[[], int]) -> None:
    """End the process with what ``main`` returns; what it cannot honour is one line on stderr."""
    try:
        sys.exit(main())
    except KHAError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
