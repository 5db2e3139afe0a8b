"""Real runs of the training entry point, in processes of their own.

Megatron's ``pretrain`` keeps global state, so a run cannot share a process with another.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.versions import needs_training_package

_TIMEOUT = 300  # seconds; the longest run takes 40 on two cores

LAYERS = 4
HEAD_DIM = 6

MODEL = shlex.split(f"""
--num-layers {LAYERS} --hidden-size 40 --ffn-hidden-size 48 --num-attention-heads 8
--group-query-attention --num-query-groups 2 --kv-channels {HEAD_DIM} --qk-layernorm
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --seq-length 28 --max-position-embeddings 28
""")

TRAINING = shlex.split("""
--micro-batch-size 3 --global-batch-size 6 --train-iters 8 --lr 1e-2 --lr-decay-style cosine
--clip-grad 1 --seed 7 --split 99,1,0 --num-workers 0 --eval-interval 1000 --eval-iters 0
--log-interval 1 --tensorboard-log-interval 1 --ckpt-format torch_dist --save-interval 1000
""")

EXPERTS = shlex.split("""
--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-router-load-balancing-type none
--expert-model-parallel-size 2 --expert-tensor-parallel-size 1
""")


@dataclass(frozen=True)
class Run:
    """How a run ended, and what its ranks printed."""

    codes: list[int]
    output: str

    @property
    def errors(self) -> list[str]:
        """The lines by which the entry point refuses its input."""
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    @property
    def knocks(self) -> str:
        """What the ranks together said to have knocked."""
        return "\n".join(re.findall(r"^kha_megatron: (knocks .*)$", self.output, re.MULTILINE))


def start(
    words: Sequence[str], ranks: int = 1, *, torchrun: bool = False, program: str | None = None
) -> Run:
    """Run the entry point on ``ranks`` processes; ``program`` is Python source to run instead."""
    needs_training_package()
    python = [sys.executable, *(["-c", program] if program else ["-m", "kha_megatron.training"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        python = [*launcher, "--nproc-per-node", str(ranks), "--no-python", *python]
        environments = [environment]
    else:
        port = str(free_port())
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        environments = [
            environment | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
    with ExitStack() as stack:
        # files, not pipes: a rank whose pipe is full would wait for a reader that waits for another
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
        processes = [
            subprocess.Popen([*python, *words], env=env, stdout=file, stderr=subprocess.STDOUT)
            for env, file in zip(environments, outputs, strict=True)
        ]
        deadline = time.monotonic() + _TIMEOUT
        try:
            codes = [process.wait(deadline - time.monotonic()) for process in processes]
        except subprocess.TimeoutExpired:
            codes = None
        finally:
            for process in processes:
                process.kill()
        for file in outputs:
            file.seek(0)
        texts = [file.read() for file in outputs]
    if codes is None:
        ends = "\n---\n".join(text[-3000:] for text in texts)
        pytest.fail(f"the ranks did not end within {_TIMEOUT} s; they said last\n{ends}")
    return Run(codes, "\n".join(texts))


def losses(folder: Path) -> dict[int, float]:
    """Loss by iteration from TensorBoard, exactly as it was written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars("lm loss")}


def _prepare(out: str) -> None:
    from kha_megatron.data import prepare

    source = Path(prepare.__file__).parents[1]
    prepare.prepare([source], Path(out), vocab_size=300, globs=["*.py"], workers=1)


@pytest.fixture(scope="session")
def corpus(ranks, tmp_path_factory) -> list[str]:
    """Real text, prepared, as the arguments that name it."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    ranks(_prepare, 1, str(folder))
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer"]
    model = ["--tokenizer-model", str(folder / "tokenizer")]
    return ["--data-path", str(folder / "corpus"), *tokenizer, *model]
