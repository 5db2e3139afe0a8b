"""Memory and speed of the converter on a synthetic checkpoint, beside copying the same bytes.

    python tools/bench.py conversion --folder /a/disk/with/room

Makes a dense bfloat16 model of the sizes of Qwen3-1.7B with an output layer of its own (4.1 GB),
then runs, in turn and `--repetitions` times: a copy with fsync of the Megatron checkpoint, `convert
to-hf`, a copy with fsync of the Hugging Face folder, `convert to-megatron`. Both sources are in the
page cache for the copy as for the conversion, and both find memory in the same state (`SETTLED`).
What it makes is deleted.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kha_megatron.checkpoint.staging import flush
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB = 2048, 6144, 16, 8, 128, 151_936
WHOLE = 28
"""Layers, fewer with a smaller --gigabytes."""

LIMIT_GB, SHARE = 1.5, 0.6
"""What the converter must stay below, and the share of the copy's throughput that it must reach."""

SETTLED = 15
"""Seconds between deleting what was written before and each timed part. Many virtual machines give
freed memory back to their host within seconds, and writing 4 GB into memory that has to be fetched
again took twice as long: so that both parts meet the same, each starts from the same deletions."""


def sizes(layers: int) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the model's tensors by Megatron's names."""
    each = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN),
        "self_attention.q_layernorm.weight": (HEAD_DIM,),
        "self_attention.k_layernorm.weight": (HEAD_DIM,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "pre_mlp_layernorm.weight": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
    }
    return {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        **{f"decoder.layers.{name}": (layers, *shape) for name, shape in each.items()},
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCAB, HIDDEN),
    }


def arguments(layers: int) -> Namespace:
    """What Megatron would have saved of its command line, as far as conversion asks."""
    return Namespace(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        max_position_embeddings=40_960,
        init_method_std=0.02,
        layernorm_epsilon=1e-6,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        swiglu=True,
        position_embedding_type="rope",
        rotary_base=1_000_000,
        rotary_percent=1.0,
        untie_embeddings_and_output_weights=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        padded_vocab_size=VOCAB,
        vocab_size=VOCAB,
        num_experts=None,
        bf16=True,
        kha_query=None,
        kha_key=None,
        kha_value=None,
    )


def make(folder: Path, layers: int) -> None:
    """Write the checkpoint as one rank would have: a chunk a layer."""
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    noise = torch.randn(2**25, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with TorchDistWriter(path) as writer:
        for key, shape in sizes(layers).items():
            stacked = key.startswith("decoder.layers.")
            part = (1, *shape[1:]) if stacked else shape
            count = torch.Size(part).numel()
            filled = noise.repeat(-(-count // len(noise)))[:count].view(part)
            for row in range(shape[0] if stacked else 1):
                offsets = (row, *[0] * (len(shape) - 1))
                writer.write(key, filled, shape=shape, offsets=offsets)
        common = {"args": arguments(layers), "iteration": 1, "checkpoint_version": 3.0}
        writer.close(common, {"format": "synthetic"})
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


@dataclass
class Run:
    """One conversion."""

    seconds: float
    """From the start of the process to its end."""
    writing: float
    """From the appearance of the staged folder to its flushed end in the target's place."""
    peak: int
    """Bytes of resident memory (``ru_maxrss``)."""
    anonymous: int
    """Bytes of it that are no file's pages (``RssAnon``)."""
    processor: float
    """Seconds of processor time, start of the process included."""


def run(command: list[str], target: Path) -> Run:
    """Run a command that makes the folder ``target``, and watch it."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    seen = {"anonymous": 0, "staged": 0.0, "done": 0.0}

    def watch() -> None:
        # with little work, since the cores are what is measured: one folder, one file of /proc
        while process.returncode is None:
            names = os.listdir(target.parent)
            if not seen["staged"] and any(f".{target.name}.partial-" in name for name in names):
                seen["staged"] = time.perf_counter()
            if not seen["done"] and target.name in names:
                seen["done"] = time.perf_counter()
            seen["anonymous"] = max(seen["anonymous"], _anonymous(process.pid))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    end = time.perf_counter()
    process.returncode = os.waitstatus_to_exitcode(status)
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Run(
        end - start,
        seen["done"] - seen["staged"],
        usage.ru_maxrss * 1024,
        seen["anonymous"],
        usage.ru_utime + usage.ru_stime,
    )


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
    files = next((p for p in source.glob("iter_*")), source)
    copied_to = target.with_name("copy")
    command = [sys.executable, "-m", "kha_megatron", "convert", name, *map(str, (source, target))]
    runs = []
    for number in range(1, repetitions + 1):
        _settle(target, copied_to)
        copied = copy(files, copied_to)
        _settle(target, copied_to)
        done = run([*command, "--no-verify"], target)
        runs.append({"copied": copied, "share": copied / done.writing} | asdict(done))
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
        make(folder / "megatron", layers)
        if given.without_hashes:
            next(folder.glob("megatron/*/integrity.json")).unlink()
        yield measure("to-hf", folder / "megatron", folder / "hf", given.repetitions)
        if given.without_hashes:
            (folder / "hf" / "manifest.json").unlink()
        yield measure("to-megatron", folder / "hf", folder / "back", given.repetitions)
