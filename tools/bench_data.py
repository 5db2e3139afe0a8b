"""`kha-megatron data prepare` beside tokenizing the same text with `tokenizers` alone.

    python tools/bench.py data --megabytes 1000 --folder /a/disk/with/room

The text is the source of Python's standard library, over and over; with `--line` it is one file of
one line. The command is timed from its start to its end: it looks at every file, trains its
tokenizer, writes, and decodes every document to see that nothing is lost. The library gets its
documents in memory, and that tokenizer. What is made is deleted.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import batched, cycle
from pathlib import Path
from typing import Any

import torch

from kha_megatron.data.prepare import standard_library
from kha_megatron.data.text_files import read_pieces

LIMIT = 4.0
"""Times of the library's time that the command may take."""

DEFAULTS = {device: {"repetitions": 1} for device in ("cuda", "cpu")}
HEADER = ["MB", "cores", "data prepare s", "tokenizers s", "ratio", "limit", "peak RSS GB"]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for."""
    add("--folder", type=Path, default=Path(tempfile.gettempdir()))
    add("--megabytes", type=float, default=100)
    add("--line", action="store_true", help="one file of one line, words with spaces between")


def make(folder: Path, size: int, line: bool) -> None:
    """Write at least ``size`` bytes of text."""
    sources = sorted(standard_library().glob("*.py"))
    made = 0
    for number, source in enumerate(cycle(sources)):
        text = source.read_bytes()
        name = "line.txt" if line else f"{number:07}.py"
        with (folder / name).open("ab") as file:
            made += file.write(text.replace(b"\n", b" ") if line else text)
        if made >= size:
            return


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each turn."""
    from tokenizers import Tokenizer

    for _ in range(given.repetitions):
        with tempfile.TemporaryDirectory(prefix="kha-benchmark-", dir=given.folder) as made:
            text, out = Path(made, "text"), Path(made, "out")
            text.mkdir()
            make(text, round(given.megabytes * 1e6), given.line)
            words = [sys.executable, "-m", "kha_megatron", "data", "prepare"]
            begin = time.perf_counter()
            subprocess.run([*words, "--from", text, "--out", out], check=True, stdout=sys.stderr)
            whole = time.perf_counter() - begin
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
            files = sorted(text.iterdir())
            documents = (piece.decode() for file in files for piece in read_pieces(file, 1 << 20))
            alone = 0.0
            for batch in batched(documents, 64):
                begin = time.perf_counter()
                tokenizer.encode_batch_fast(list(batch), add_special_tokens=False)
                alone += time.perf_counter() - begin
            yield {
                "cell": "data prepare",
                "bytes": sum(file.stat().st_size for file in files),
                "cores": len(os.sched_getaffinity(0)),
                "prepare": whole,
                "tokenizers": alone,
                "peak": peak,
            }


def rows(result: dict[str, Any]) -> list[list[str]]:
    """For the table."""
    ratio = result["prepare"] / result["tokenizers"]
    words = "met" if ratio <= LIMIT else "MISSED"
    return [
        [
            f"{result['bytes'] / 1e6:,.0f}",
            str(result["cores"]),
            f"{result['prepare']:.1f}",
            f"{result['tokenizers']:.1f}",
            f"{ratio:.2f}",
            f"{LIMIT:g}: {words}",
            f"{result['peak'] / 1e9:.2f}",
        ]
    ]
