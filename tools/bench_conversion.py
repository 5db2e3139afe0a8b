"""Memory and speed of the converter on a synthetic checkpoint, and of copying the same bytes.

    python tools/bench.py conversion --folder /a/disk/with/room

Makes a dense bfloat16 model of the sizes of Qwen3-1.7B with an untied output layer (4.1 GB). Each
repetition then copies the source with fsync and converts it, to Hugging Face and back. Source files
are in the page cache for both. All files are deleted at the end.
"""

import argparse
import functools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measuring import Cells, Spread
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.checkpoint.staging import flush
from kha_megatron.checkpoint.tracker import RELEASE

NEEDED = 17_000_000_000
"""Bytes of free space."""

LIMIT_GB = 1.5
"""Target: largest resident memory of the converter."""
SHARE = 0.6
"""Target: smallest share of the copy's throughput."""

SETTLED = 15
"""Seconds between deletions and each timed part. Virtual machines return freed memory to the host,
and writing into memory that has to be fetched again takes twice as long."""

CONVERT = [sys.executable, "-m", "kha_megatron", "convert"]
DEFAULTS = {device: {"repetitions": 3} for device in ("cuda", "cpu")}
HEADER = ["direction", "copy + fsync GB/s", "conversion GB/s", "share", "whole command s"]
HEADER += ["peak RSS GB", "targets"]


def make(folder: Path) -> None:
    """Save a stock model with random weights."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run(command: list[str], target: Path) -> tuple[float, float, int]:
    """Run a command that makes the directory ``target``.

    Returns:
        Seconds from start to end, seconds from the first staged file to the renamed directory, and
        the peak of resident memory in bytes.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ended = 0
    seen = {}
    while not ended:
        time.sleep(0.02)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        now = time.perf_counter()
        seen = dict.fromkeys(os.listdir(target.parent), now) | seen
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {process.returncode}")
    writing = seen[target.name] - seen[f".{target.name}.partial"]
    return now - start, writing, usage.ru_maxrss * 1024


def copy(source: Path, target: Path) -> float:
    """Return the seconds to copy all files of a directory and flush them, one after another."""
    start = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        flush(target / file.name)
    flush(target)
    flush(target.parent)
    return time.perf_counter() - start


def measure(name: str, source: Path, target: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one direction. The result of the last conversion stays at ``target``."""
    if not source.exists():  # the first direction was measured before an interruption
        run([*CONVERT, "to-hf", source.with_name("megatron"), source, "--no-verify"], source)
    if args.without_hashes:
        (source / "manifest.json").unlink(missing_ok=True)
    release = source / RELEASE
    folder = release if release.is_dir() else source
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    copied_to = target.with_name("copy")
    runs = []

    def settle() -> None:
        for path in (target, copied_to):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
        time.sleep(SETTLED)

    for _ in range(args.repetitions):
        settle()
        copied = copy(folder, copied_to)
        settle()
        converted = run([*CONVERT, name, source, target, "--no-verify"], target)
        runs.append((copied, *converted))
        print(f"{name}: {runs[-1]}", file=sys.stderr)
    return {"bytes": size, "runs": runs}


def rows(result: dict[str, Any]) -> list[list[str]]:
    gigabytes = result["bytes"] / 1e9
    copy_speeds = []
    speeds = []
    shares = []
    commands = []
    peaks = []
    for copied, command, writing, peak in result["runs"]:
        copy_speeds.append(gigabytes / copied)
        speeds.append(gigabytes / writing)
        shares.append(copied / writing)
        commands.append(command)
        peaks.append(peak / 1e9)
    share = statistics.median(shares)
    met = "met" if max(peaks) < LIMIT_GB and share >= SHARE else "MISSED"
    return [
        [
            result["cell"],
            Spread.of(copy_speeds).text(2),
            Spread.of(speeds).text(2),
            f"{share:.0%}",
            f"{statistics.median(commands):.1f}",
            f"{max(peaks):.2f}",
            met,
        ]
    ]


def options(add: Callable[..., Any]) -> None:
    add("--folder", type=Path, default=Path(tempfile.gettempdir()))
    words = "sources without SHA-256 hashes, as other tools write them"
    add("--without-hashes", action="store_true", help=words)


def cells(args: argparse.Namespace, device: torch.device) -> Cells:
    """Yield the name of each direction and a function that measures it."""
    free = shutil.disk_usage(args.folder).free
    if free < NEEDED:
        raise SystemExit(f"error: {args.folder} has {free:,} bytes, and {NEEDED:,} are needed")
    with tempfile.TemporaryDirectory(prefix="kha-benchmark-", dir=args.folder) as made:
        folder = Path(made)
        # a process of its own: the peak of a child process is at least that of its parent
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(make, folder / "stock").result()
        words = ["to-megatron", folder / "stock", folder / "megatron", "--no-verify"]
        subprocess.run([*CONVERT, *words], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder / "stock")
        if args.without_hashes:
            next(folder.glob("megatron/*/integrity.json")).unlink()
        for name, source, target in (("to-hf", "megatron", "hf"), ("to-megatron", "hf", "back")):
            yield name, functools.partial(measure, name, folder / source, folder / target, args)
