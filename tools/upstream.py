"""Compare an unreleased Megatron-LM with the installed Megatron-Core, on the CPU.

    python tools/upstream.py ~/Megatron-LM

Each case trains 8 steps with the installed version, and again with the source tree. A third run
continues the installed version's checkpoint of step 4 with the source tree. All three must have the
same losses. The exit code is 1 if they differ.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kha_megatron.recipes.log_lines import LOSS, read_history

ROOT = Path(__file__).parents[1]
TEXT = Path(asyncio.__file__).parent
"""About 500 KB of Python."""
STEPS = 8
SAVED = 4

MODEL = """--device cpu --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8
--group-query-attention --num-query-groups 4 --kv-channels 16 --qk-layernorm --normalization RMSNorm
--swiglu --disable-bias-linear --position-embedding-type rope --attention-dropout 0
--hidden-dropout 0 --seq-length 64 --max-position-embeddings 64
--untie-embeddings-and-output-weights"""

TRAINING = f"""--train-iters {STEPS} --micro-batch-size 2 --global-batch-size 8
--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1 --seed 7 --split 1,0,0 --num-workers 0
--eval-interval 1000 --eval-iters 0 --log-interval 1 --tensorboard-log-interval 1
--ckpt-format torch_dist --save-interval {SAVED}"""

EXPERTS = """--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-load-balancing-type none --moe-router-dtype fp32
--moe-token-dispatcher-type alltoall"""

TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CASES = {
    "TP 2 with SP": (2, f"--kha-preset kha_mlp {TP}"),
    "PP 2 with experts": (2, f"--kha-preset kha_mlp {PP} {EXPERTS}"),
    "MoH": (1, "--kha-preset moh_50"),
    "linear and gate, GPTModel": (1, "--kha-query linear --kha-value gate --gpt-model"),
    "distributed optimizer": (2, "--kha-preset kha_linear --use-distributed-optimizer"),
}
"""Number of ranks and additional arguments of each case. Models are hybrid by default."""


def python_path(megatron: Path | None) -> str:
    """Return the PYTHONPATH of this repository and of ``megatron``."""
    paths = [megatron, ROOT, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(str(path) for path in paths if path)


def train(
    words: list[str],
    data: list[str],
    ranks: int,
    folder: Path,
    megatron: Path | None,
) -> dict[int, float]:
    """Train in ``folder`` and return the loss of each step. Raise RuntimeError if a rank fails."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    arguments = [*MODEL.split(), *TRAINING.split(), *words]
    arguments += ["--save", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
    environment = os.environ | {"PYTHONPATH": python_path(megatron)}
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "kha_megatron.training", *arguments, *data],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "log.txt").write_text(done.stdout)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "rror: " in line]
        raise RuntimeError("\n".join(errors) or done.stdout[-4000:])
    return dict(read_history(folder / "tensorboard")[LOSS])


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy the checkpoint of step ``SAVED``."""
    name = f"iter_{SAVED:07}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(SAVED))


def compare(case: str, data: list[str], folder: Path, megatron: Path) -> bool:
    """Run a case three times, print its losses, and return whether they are the same."""
    ranks, arguments = CASES[case]
    words = arguments.split()
    for name in ("installed", "upstream", "continued"):
        (folder / name).mkdir(parents=True)
    installed = train(words, data, ranks, folder / "installed", None)
    upstream = train(words, data, ranks, folder / "upstream", megatron)
    copy_checkpoint(folder / "installed", folder / "continued")
    words += ["--load", str(folder / "continued")]
    continued = train(words, data, ranks, folder / "continued", megatron)
    remaining = {step: loss for step, loss in installed.items() if step > SAVED}
    same = upstream == installed and continued == remaining
    losses = (installed[STEPS], upstream[STEPS], continued[STEPS])
    figures = " ".join(f"{loss:11.7f}" for loss in losses)
    print(f"{case:26} {figures}  {'same' if same else 'DIFFERENT'}", flush=True)
    return same


def copy_dataset_helpers(megatron: Path) -> None:
    """Copy the compiled dataset helpers of the installed version, if the source tree has none."""
    datasets = megatron / "megatron/core/datasets"
    if list(datasets.glob("helpers_cpp*.so")):
        return
    spec = find_spec("megatron.core.datasets.helpers_cpp")
    if spec is None or spec.origin is None:
        sys.exit("error: The installed Megatron-Core has no helpers_cpp. Install its wheel.")
    shutil.copy(spec.origin, datasets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("megatron", type=Path, help="source tree of Megatron-LM")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
    )
    args = parser.parse_args()
    megatron = args.megatron.expanduser().resolve()
    if not (megatron / "megatron/core").is_dir():
        parser.error(f"{megatron} is not a source tree of Megatron-LM")
    copy_dataset_helpers(megatron)
    with tempfile.TemporaryDirectory(prefix="kha-upstream-") as made:
        folder = Path(made)
        words = ["data", "prepare", "--from", str(TEXT), "--glob", "*.py"]
        words += ["--vocab-size", "512", "--out", str(folder / "data")]
        subprocess.run(
            [sys.executable, "-m", "kha_megatron", *words],
            check=True,
            capture_output=True,
        )
        data = ["--data-path", str(folder / "data/corpus")]
        data += ["--tokenizer-type", "HuggingFaceTokenizer"]
        data += ["--tokenizer-model", str(folder / "data/tokenizer")]
        print(f"{'loss of step ' + str(STEPS):26}   installed    upstream   continued")
        results = [compare(case, data, folder / case, megatron) for case in args.cases]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
