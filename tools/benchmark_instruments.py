"""What ``--kha-log-interval`` costs a training iteration.

    python tools/benchmark_instruments.py --repetitions 5

Trains a small model on the CPU, in turn without instruments and with instruments that measure every
second iteration. Prints the median processor time of iterations without, of those that are not
measured, and of those that are, so the cost of any interval. Processor time, because that of a busy
machine's clock says more about the other programs.
"""

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

WARM_UP = 4  # iterations, an even number

TRAINING = shlex.split("""
--device cpu --kha-preset kha_mlp --mock-data --vocab-size 1000
--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8
--group-query-attention --num-query-groups 4 --kv-channels 64 --qk-layernorm
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --seq-length 256 --max-position-embeddings 256
--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --num-workers 0 --eval-iters 0
--eval-interval 100000 --log-interval 1
""")

PROGRAM = """
import sys, time
from kha_megatron.training.arguments import choose_device
choose_device(sys.argv)
from kha_megatron.training import pretrain
from megatron.training import training
step = training.train_step
def timed(*args, **kwargs):
    start = time.process_time()
    result = step(*args, **kwargs)
    print(f"milliseconds {1000 * (time.process_time() - start)}", flush=True)
    return result
training.train_step = timed
pretrain.run(time.time())
"""


def milliseconds(words: list[str], iterations: int) -> list[float]:
    """Of each iteration of one run after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", PROGRAM, *TRAINING, *words]
        run += ["--train-iters", str(iterations + WARM_UP), "--tensorboard-dir", folder]
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        world |= {"MASTER_PORT": "29631", "OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            run, env=os.environ | world, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    lines = [line.split() for line in output.splitlines()]
    return [float(words[1]) for words in lines if words[:1] == ["milliseconds"]][WARM_UP:]


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="counted of each run")
    given = parser.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(given.repetitions):
        times["without instruments"] += milliseconds([], given.iterations)
        watched = milliseconds(["--kha-log-interval", "2"], given.iterations)
        times["with, not measured"] += watched[0::2]
        times["with, measured"] += watched[1::2]
        print(f"{repetition + 1} of {given.repetitions}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    without, not_due, due = medians.values()
    machine = platform.processor() or platform.machine()
    print(f"{Path(__file__).name} on {machine}, Python {platform.python_version()}\n")
    print("| iteration | number | processor time (ms) | ratio |\n|---|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {len(times[name])} | {value:.1f} | {value / without:.4f} |")
    for interval in (10, 100):
        ratio = 1 + (due - not_due) / interval / not_due
        print(f"| mean of --kha-log-interval {interval} | | {ratio * not_due:.1f} | {ratio:.4f} |")


if __name__ == "__main__":
    main()
