"""Memory and speed of the converter on a synthetic checkpoint, beside copying the same bytes.

    python tools/bench.py conversion --folder /a/disk/with/room

Makes a dense bfloat16 model of the sizes of Qwen3-1.7B with an output layer of its own (4.1 GB),
then runs, in turn and `--repetitions` times: a copy with fsync of the Megatron checkpoint, `convert
to-hf`, a copy with fsync of the Hugging Face folder, `convert to-megatron`. Both sources are in the
page cache for the copy as for the conversion, and both find memory in the same state (`SETTLED`).
What it makes is deleted.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kha_megatron.checkpoint.staging import flush
from kha_megatron.checkpoint.tracker import RELEASE

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB = 2048, 6144, 16, 8, 128, 151_936
WHOLE = 28
"""Layers, fewer with a smaller --gigabytes."""

LIMIT_GB, SHARE = 1.5, 0.6
"""What the converter must stay below, and the share of the copy's throughput that it must reach."""

SETTLED = 15
"""Seconds between deleting what was written before and each timed part. Many virtual machines give
freed memory back to their host within seconds, and writing 4 GB into memory that has to be fetched
again took twice as long: so that both parts meet the same, each starts from the same deletions."""


CONVERT = [sys.executable, "-m", "kha_megatron", "convert"]


def make(folder: Path, layers: int) -> None:
    """Save a stock model with random weights."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run(command: list[str], target: Path) -> dict[str, float]:
    """Run a command that makes the folder ``target``, and watch it.

    Returns:
        ``seconds`` from its start to its end, ``writing`` from the appearance of the staged folder
        to its flushed end in the target's place, ``processor`` time; bytes of resident memory,
        ``peak`` (``ru_maxrss``) and ``anonymous``, which are no file's pages (``RssAnon``).
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ended, staged, done, anonymous = 0, 0.0, 0.0, 0
    while not ended:
        # with little work, since the cores are what is measured: one folder, one file of /proc
        time.sleep(0.02)
        anonymous = max(anonymous, _anonymous(process.pid))
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        now, names = time.perf_counter(), os.listdir(target.parent)
        if not staged and any(f".{target.name}.partial-" in name for name in names):
            staged = now
        if not done and target.name in names:
            done = now
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": now - start,
        "writing": done - staged,
        "processor": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * 1024,
        "anonymous": anonymous,
    }


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy all files of a folder and flush them, one after another."""
    start = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        flush(target / file.name)
    flush(target)
    flush(target.parent)
    return time.perf_counter() - start


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(name: str, source: Path, target: Path, repetitions: int) -> dict[str, Any]:
    """All runs of one direction; leaves its result at ``target``."""
    files = source / RELEASE if (source / RELEASE).is_dir() else source
    copied_to = target.with_name("copy")
    command = [*CONVERT, name, str(source), str(target), "--no-verify"]
    runs = []
    for number in range(1, repetitions + 1):
        _settle(target, copied_to)
        copied = copy(files, copied_to)
        _settle(target, copied_to)
        done = run(command, target)
        runs.append({"copied": copied, "share": copied / done["writing"]} | done)
        print(f"{name} {number}: {runs[-1]}", file=sys.stderr)
    return {"direction": name, "bytes": size(files), "runs": runs}


def _settle(*outputs: Path) -> None:
    for folder in outputs:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    time.sleep(SETTLED)


HEADER = ["direction", "run", "copy + fsync GB/s", "conversion GB/s", "share", "writing s"]
HEADER += ["whole command s", "its CPU s", "peak RSS GB", "peak RssAnon GB"]
DEFAULTS = {device: {"repetitions": 3} for device in ("cuda", "cpu")}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    name, gigabytes, runs = result["direction"], result["bytes"] / 1e9, result["runs"]
    found = []
    for i, r in enumerate(runs, 1):
        speeds = [f"{gigabytes / r[key]:.2f}" for key in ("copied", "writing")]
        times = [f"{r[key]:.1f}" for key in ("writing", "seconds", "processor")]
        peaks = [f"{r[key] / 1e9:.2f}" for key in ("peak", "anonymous")]
        found.append([name, str(i), *speeds, f"{r['share']:.0%}", *times, *peaks])
    share, peak = statistics.median(r["share"] for r in runs), max(r["peak"] for r in runs)
    met = "met" if peak < LIMIT_GB * 1e9 and share >= SHARE else "MISSED"
    last = [f"{share:.0%}", "", "", "", f"{peak / 1e9:.2f} (largest)", f"targets {met}"]
    return [*found, [name, "median", "", "", *last]]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for."""
    add("--folder", type=Path, default=Path(tempfile.gettempdir()))
    add("--gigabytes", type=float, default=4.06, help="at least 1.3")
    words = "sources as others write them, with nothing to check: half of the hashing"
    add("--without-hashes", action="store_true", help=words)


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for each direction; what they make is deleted."""
    attention, mlp = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * GROUPS), 3 * FFN * HIDDEN
    fixed, layer = 2 * VOCAB * HIDDEN * 2, (attention + mlp) * 2
    layers = max(1, min(WHOLE, round((given.gigabytes * 1e9 - fixed) / layer)))
    needed = 4 * (fixed + layers * layer)
    if (free := shutil.disk_usage(given.folder).free) < needed:
        raise SystemExit(f"{given.folder} has {free:,} bytes free, {needed:,} are needed")
    with tempfile.TemporaryDirectory(prefix="kha-benchmark-", dir=given.folder) as made:
        folder = Path(made)
        # by processes of their own: the peak of one that is started is at least its parent's
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            apart.submit(make, folder / "stock", layers).result()
        words = ["to-megatron", str(folder / "stock"), str(folder / "megatron"), "--no-verify"]
        subprocess.run([*CONVERT, *words], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder / "stock")
        if given.without_hashes:
            next(folder.glob("megatron/*/integrity.json")).unlink()
        yield measure("to-hf", folder / "megatron", folder / "hf", given.repetitions)
        if given.without_hashes:
            (folder / "hf" / "manifest.json").unlink()
        yield measure("to-megatron", folder / "hf", folder / "back", given.repetitions)
