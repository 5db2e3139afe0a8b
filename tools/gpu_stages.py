"""The stages of ``tools/gpu.py``: what they run, and how long they may take."""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from measuring import ROOT, Report

from kha_megatron.model.run import Arguments, parse, render

TILINGS = "tilings.json"
"""Written by the stage `tune`, and used by `kernels`."""

_ALL_RANKS = 4
"""Most ranks of a case of ``tests/distributed/test_engine.py``."""
RANKS_SECONDS = 20
"""Time limit of two NCCL ranks on one GPU, which hang if NCCL does not support them."""
NCCL_VARIABLE = "KHA_NCCL"
"""Environment variable with the library that ``gpu_bundle.sh`` packs."""
_SEVERAL_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    # few, so that the kernels of all ranks run at the same time
    "NCCL_MAX_CTAS": "4",
}
_CPU_SLOWER = 10
"""Time limits on a CPU, relative to those on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the commands of a stage depend on."""

    device: str
    """``cuda`` or ``cpu``."""
    gpus: int
    folder: Path
    """Directory of the results of this commit and machine."""
    backend: str = "nccl"
    """That the stage `ranks` found to work for several ranks on one GPU."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def ranks_per_gpu(self) -> int:
        return max(1, math.ceil(_ALL_RANKS / max(1, self.gpus)))

    def several_ranks(self) -> dict[str, str]:
        """Return the environment of several NCCL ranks on one GPU."""
        if not self.on_gpu or self.ranks_per_gpu == 1:
            return {}
        environment = dict(_SEVERAL_RANKS)
        library = os.environ.get(NCCL_VARIABLE)
        if library:
            environment["LD_PRELOAD"] = library
        return environment


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process of a stage."""

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_fallback: bool = False
    """Run it only if the command before failed. Its result then counts instead."""


Commands = Callable[[Setting], list[Command]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run."""

    name: str
    question: str
    """What it answers."""
    seconds: float
    """Time limit on a GPU."""
    commands: Commands
    least: float | None = None
    """Seconds that must be left to start it; by default its time limit. Stages that continue where
    they stopped may start with less."""
    needs: tuple[str, ...] = ()
    """Keys of ``gpu.COMPONENTS``."""
    repeats: bool = False
    """Whether a later run starts it again although it was complete."""

    def limit(self, device: str) -> float:
        return self.seconds * (1 if device == "cuda" else _CPU_SLOWER)

    def least_seconds(self, device: str) -> float:
        if self.least is None:
            return self.limit(device)
        return self.least * (1 if device == "cuda" else _CPU_SLOWER)


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def pytest(*words: str) -> list[str]:
    """Return a command that publishes the outcome of each test."""
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_rows", *words)


def parallel() -> list[str]:
    """Return options of pytest for several processes. Most of the time is for compiling kernels."""
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    return ["-n", str(workers)] if importlib.util.find_spec("xdist") else []


def bench(setting: Setting, file: str, subject: str, *words: str) -> list[str]:
    """Return a command that measures what ``file`` lacks."""
    report = str(setting.folder / f"{file}.json")
    tool = str(ROOT / "tools/bench.py")
    common = ["--device", setting.device, "--json", report, "--resume"]
    return [tool, subject, *words, *common]


def check_ranks(setting: Setting) -> list[Command]:
    tool = str(ROOT / "tools/gpu_ranks.py")
    gloo = python(tool, "gloo", "--device", setting.device)
    if not setting.on_gpu:
        return [Command(words=gloo)]
    nccl = python(tool, "nccl", "--seconds", str(RANKS_SECONDS))
    return [
        Command(words=nccl, environment=setting.several_ranks()),
        Command(words=gloo, is_fallback=True),
    ]


def choose_backend(rows: Iterable[Report]) -> str:
    """Return NCCL unless the rows of the stage `ranks` say that it failed."""
    statuses = []
    for row in rows:
        if row["stage"] == "ranks" and row["name"].startswith("nccl"):
            statuses.append(row["status"])
    return "gloo" if "failed" in statuses else "nccl"


def test_parallelism(setting: Setting) -> list[Command]:
    backend = setting.backend if setting.on_gpu else "gloo"
    words = ["-m", "gpu", "tests/distributed/test_engine.py"]
    words += ["--ranks-device", setting.device, "--ranks-backend", backend]
    words += ["--ranks-per-gpu", str(setting.ranks_per_gpu)]
    environment = setting.several_ranks() if backend == "nccl" else {}
    return [Command(words=pytest(*words), environment=environment)]


def measure_steps(setting: Setting) -> list[Command]:
    return [Command(words=python(*bench(setting, "step", "step")))]


def measure_decoding(setting: Setting) -> list[Command]:
    words = ["--caches", "step", "--models", "mlp", "mlp-folded"]
    if setting.on_gpu:
        words += ["--shape", "dense-0.6b", "--new", "48", "--repetitions", "7"]
    else:
        words += ["--batches", "2", "--new", "4", "--prompt", "5", "--repetitions", "2"]
    return [Command(words=python(*bench(setting, "decode-step", "decode", *words)))]


def tune(setting: Setting) -> list[Command]:
    words = bench(setting, "tune", "tune", "--choose", str(setting.folder / TILINGS))
    if not setting.on_gpu:
        words = ["-m", "tests.interpreting", *words]
    return [Command(words=python(*words))]


def test_kernels(setting: Setting) -> list[Command]:
    if setting.on_gpu:
        words = [*parallel(), "-m", "gpu", "tests/kernels"]
    else:
        case = "test_equals_float64_with_every_gradient[mlp-torch.bfloat16-128-129]"
        words = ["--whole", f"tests/kernels/test_interpreted.py::{case}"]
    environment = {"KHA_TILINGS": str(setting.folder / TILINGS)}
    return [Command(words=pytest(*words), environment=environment)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A comparison of models that train from scratch."""

    name: str
    recipe: str
    variants: str
    flags: Arguments


def _flags(text: str) -> Arguments:
    return parse(text.split())


_GPU_TRAINING = _flags("""
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 16 --global-batch-size 64
    --train-iters 1000 --lr 2e-3 --min-lr 2e-4 --init-method-std 0.02 --bf16
    --tensor-model-parallel-size 1 --transformer-impl transformer_engine
    --no-gradient-accumulation-fusion --cross-entropy-loss-fusion
    --num-attention-heads 8 --num-query-groups 4 --kv-channels 128 --num-layers 12
""")
_MOE = _GPU_TRAINING | _flags("""
    --hidden-size 512 --ffn-hidden-size 384 --moe-ffn-hidden-size 384 --num-experts 16
    --expert-model-parallel-size 1 --moe-grouped-gemm --moe-permute-fusion
""")
_DENSE = _GPU_TRAINING | _flags("--hidden-size 768 --ffn-hidden-size 2304")
_FASTER = _flags("--lr 6e-3 --min-lr 6e-4")
_VARIANTS = "baseline,kha_mlp,kha_linear,gate_output"
TRAININGS = (
    Training(name="moe", recipe="quickstart", variants=_VARIANTS, flags=_MOE),
    Training(name="dense", recipe="laptop/dense", variants=_VARIANTS, flags=_DENSE),
    Training(
        name="moe-high-lr",
        recipe="quickstart",
        variants=_VARIANTS,
        flags=_MOE | _FASTER,
    ),
)
"""Models of 0.14B and 0.1B parameters, 65.5M tokens. The last has three times the learning rate."""
TINY_TRAINING = Training(
    name="tiny",
    recipe="laptop/dense",
    variants="baseline,kha_mlp",
    flags=_flags("--train-iters 4 --seq-length 32 --max-position-embeddings 32"),
)
SEEDS = (1, 3)
"""All trainings have one seed before any has more."""


def compare_trainings(setting: Setting) -> list[Command]:
    """Prepare text of Python files, and train the variants of each model on it."""
    data = setting.folder / "data"
    prepare = ["-m", "kha_megatron", "data", "prepare", "--out", str(data)]
    if setting.on_gpu:
        library = str(Path(os.__file__).parent)
        prepare += ["--vocab-size", "4096", "--from", library, "--glob", "*.py"]
        prepare += ["--exclude", "__pycache__", "--exclude", "lib2to3"]
    else:
        prepare += ["--vocab-size", "512", "--from", str(ROOT / "tools"), "--glob", "*.py"]
    commands = []
    if not data.is_dir():
        commands.append(Command(words=python(*prepare)))
    trainings = TRAININGS if setting.on_gpu else (TINY_TRAINING,)
    for seeds in SEEDS if setting.on_gpu else (1,):
        for training in trainings:
            words = ["-m", "kha_megatron", "compare", "--recipe", training.recipe]
            words += ["--variants", training.variants, "--seeds", str(seeds), "--null"]
            words += ["--held-out", "320" if setting.on_gpu else "8", "--nproc", "1"]
            words += ["--device", setting.device, "--jobs", "1", "--data", str(data)]
            words += ["--output", str(setting.folder / "compare" / training.name)]
            commands.append(Command(words=python(*words, "--", *render(training.flags))))
    return commands


def finished_trials(folder: Path) -> list[Report]:
    """Return a row for each training that has finished."""
    rows = []
    for file in sorted(folder.glob("compare/*/runs/*/result.json")):
        result = json.loads(file.read_text())
        detail = f"held-out loss {result['held_out']:.4f}"
        seconds = result["seconds_per_step"]
        if seconds is not None:  # it is not logged for a few steps
            detail += f", {seconds:.3f} s a step"
        name = f"{file.parents[2].name}, {file.parent.name}"
        rows.append({"stage": "compare", "name": name, "status": "measured", "detail": detail})
    return rows


def _pytest_stage(*words: str) -> Commands:
    return lambda setting: [Command(words=pytest(*words))]


def _bench_stage(file: str, *words: str) -> Commands:
    return lambda setting: [Command(words=python(*bench(setting, file, *words)))]


_TE = ("te", "triton")
_ALL = ("te", "triton", "flash-attn", "apex")
_LOSSES = "tests/gpu/test_losses.py"
_MAIN = ("--variants", "baseline", "mlp", "mlp/kernels", "linear")
_LAYER = ("layer", "--precisions")

RUN = (
    Stage(
        name="ranks",
        question="two NCCL ranks on one GPU: collectives against the CPU",
        seconds=40,
        commands=check_ranks,
    ),
    Stage(
        name="parallelism",
        question="sharded training with Transformer Engine in bf16 against one rank",
        seconds=180,
        least=60,
        commands=test_parallelism,
        needs=_TE,
    ),
    Stage(
        name="step",
        question="tokens/s, TFLOP/s, busy share and memory of training steps, stock and ours",
        seconds=200,
        least=60,
        commands=measure_steps,
        needs=_TE,
    ),
    Stage(
        name="decode",
        question="a compiled decoding step: stock, KHA-MLP, KHA-MLP folded",
        seconds=130,
        least=70,
        commands=measure_decoding,
    ),
    Stage(
        name="tune",
        question="tile sizes of KHA-MLP's kernels, each against float64",
        seconds=60,
        least=40,
        commands=tune,
        needs=("triton",),
    ),
    Stage(
        name="kernels",
        question="every kernel against float64 with the chosen tile sizes",
        seconds=60,
        least=40,
        commands=test_kernels,
        needs=("triton",),
    ),
    Stage(
        name="compare",
        question="losses of variants trained from scratch",
        seconds=3600,
        least=60,
        commands=compare_trainings,
        needs=_TE,
        repeats=True,
    ),
)
CHECK = (
    Stage(
        name="first",
        question="each kernel at the paper's head dim, and a layer with kernels",
        seconds=90,
        commands=_pytest_stage(
            *("--maxfail", "1", "-m", "gpu and first"),
            *("tests/kernels/test_gpu.py", "tests/gpu/test_layers.py"),
        ),
        needs=_ALL,
    ),
    RUN[5],
    Stage(
        name="modules",
        question="layers, attention backends and exported models",
        seconds=180,
        least=60,
        commands=_pytest_stage("-m", "gpu", "tests/gpu", "tests/hf", f"--ignore={_LOSSES}"),
        needs=_ALL,
    ),
    RUN[0],
    RUN[1],
    Stage(
        name="losses",
        question="short trainings in bf16 and FP8, compared",
        seconds=240,
        least=60,
        commands=_pytest_stage("-m", "gpu", _LOSSES),
        needs=_ALL,
    ),
)
BENCH = (
    Stage(
        name="layer-moe",
        question="a layer of the paper's MoE in bf16",
        seconds=240,
        least=60,
        commands=_bench_stage("layer-moe", *_LAYER, "bf16", "--shapes", "moe", *_MAIN),
        needs=_TE,
    ),
    Stage(
        name="kernels-mlp",
        question="kernels of KHA-MLP, torch, cuBLAS and a copy",
        seconds=120,
        least=30,
        commands=_bench_stage("kernels-mlp", "kernels", "--variants", "mlp"),
        needs=("triton",),
    ),
    Stage(
        name="layer-dense",
        question="a dense layer in bf16",
        seconds=180,
        least=60,
        commands=_bench_stage("layer-dense", *_LAYER, "bf16", "--shapes", "dense", *_MAIN),
        needs=_TE,
    ),
    Stage(
        name="generate",
        question="decoding with generate() of transformers",
        seconds=240,
        least=60,
        commands=_bench_stage("generate", "decode", "--repetitions", "3", "--models", "mlp"),
    ),
    Stage(
        name="layer-fp8",
        question="the MoE layer in FP8",
        seconds=240,
        least=60,
        commands=_bench_stage("layer-fp8", *_LAYER, "tensorwise", "--shapes", "moe", *_MAIN),
        needs=_TE,
    ),
    Stage(
        name="kernels-gate",
        question="kernels of KHA-Gate",
        seconds=180,
        least=30,
        commands=_bench_stage("kernels-gate", "kernels", "--variants", "gate"),
        needs=("triton",),
    ),
    Stage(
        name="layer-gate",
        question="KHA-Gate in the MoE layer",
        seconds=300,
        least=60,
        commands=_bench_stage(
            *("layer-gate", *_LAYER, "bf16", "--shapes", "moe"),
            *("--variants", "gate", "gate/kernels"),
        ),
        needs=_TE,
    ),
)
STAGES = {"run": RUN, "check": CHECK, "bench": BENCH}
"""By command, the most informative stages first."""
MINUTES = {"run": 13, "check": 15, "bench": 25}
