"""Megatron on the CPU beside a plain PyTorch loop: training the quickstart's model, and starting.

Contenders are runs of the quickstart's recipe under torchrun: on one rank knocked, not knocked, and
with Megatron's own layers (`stock`); on two ranks as the recipe is. *Plain* is `plain_training.py`:
the same model, weights, tokens and maths without Megatron, on as many threads; that its losses are
those of the run, this tool looks at too. Runs take turns, in another order each time. Of each the
mean step after the warm-up counts, data and logging included.

Started anew each turn: `import`, the entry point's modules in a new process; and `launch`,
`kha-megatron launch quickstart` until its first iteration is done.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from bench import in_words, positive, within
from measuring import Spread, ratios
from timed_training import LOSS, SECONDS

from kha_megatron.errors import KHAError
from kha_megatron.history.log_lines import parse_step
from kha_megatron.recipes import Job, Recipe, get_recipe, prepare
from kha_megatron.recipes.recipe import TENSORBOARD

EXAMPLE = """example:
  python tools/bench.py cpu --json cpu.json
  python tools/bench.py cpu --data quickstart/data --repetitions 3 --contenders plain/1 mlp/1
"""

DEFAULTS = {device: {"repetitions": 5} for device in ("cuda", "cpu")}
AT_MOST = 1.25
"""Times the plain loop's step: 0.8 of its tokens per second."""
CLOSE = 1e-3
"""Relative distance of two losses that are the same but for rounding, in a run's first steps."""
INTERVAL = 5
"""Steps between two lines of Megatron's log, each of which says their mean time."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """One way to train the model."""

    cores: int
    preset: str | None
    """None for the plain loop."""
    stock: bool = False

    @property
    def baseline(self) -> str:
        """What it is compared with."""
        return f"plain/{self.cores}"


CONTENDERS = {
    "plain/1": Contender(1, None),
    "mlp/1": Contender(1, "kha_mlp"),
    "baseline/1": Contender(1, "baseline"),
    "stock/1": Contender(1, "baseline", stock=True),
    "plain/2": Contender(2, None),
    "mlp/2": Contender(2, "kha_mlp"),
}
STARTS = ("import", "launch")
HEADER = [
    "contender",
    "ms / step",
    "tokens/s",
    "step over plain's",
    f"target: {AT_MOST}",
    "mlp/1 over it",
]


def options(add: Callable[..., Any]) -> None:
    """What the user may ask for."""
    add("--steps", type=positive, default=20, help="that count, of one run (default: 20)")
    add("--warm-up", type=positive, default=5, help="steps before them (default: 5)")
    add("--contenders", nargs="+", choices=[*CONTENDERS, *STARTS], default=[*CONTENDERS, *STARTS])
    add("--data", type=Path, help="folder of `kha-megatron data prepare` (default: made anew)")


def recipe_for(contender: Contender) -> Recipe:
    """The quickstart's, on as many ranks as it has cores, at a learning rate that stays."""
    rate = get_recipe("quickstart").run.arguments["lr"]
    words = ["--lr-decay-style", "constant", "--lr-warmup-fraction", "0", "--min-lr", str(rate)]
    words += ["--log-interval", str(INTERVAL), "--kha-preset", contender.preset or "kha_mlp"]
    alone: dict[str, Any] = {}
    if contender.cores == 1:
        alone = dict.fromkeys(["tensor_model_parallel_size", "expert_model_parallel_size"], 1)
        alone["sequence_parallel"] = False
    return replace(get_recipe("quickstart").updated(words, **alone), ranks=contender.cores)


def output_of(job: Job) -> list[str]:
    """The lines that a job printed under torchrun.

    Raises:
        RuntimeError: it failed.
    """
    python, _, *target = job.command
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return _lines([python, *torchrun, *target], os.environ | job.environment)


def _lines(command: Sequence[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        raise RuntimeError("\n".join([f"exit code {done.returncode}", *lines[-20:]]))
    return lines


def _figures(lines: Sequence[str], word: str) -> list[float]:
    return [float(line.split()[1]) for line in lines if line.startswith(f"{word} ")]


def record(data: Path, folder: Path, steps: int) -> list[float]:
    """Leave for the plain loop what the knocked run on one rank begins with and reads.

    Returns:
        The loss of each of its steps.
    """
    recipe = replace(recipe_for(CONTENDERS["mlp/1"]), entry=str(HERE / "timed_training.py"))
    words = ["--train-iters", str(steps)]
    job = prepare(recipe, data=data, overrides=words)
    recorded = (*job.command[:3], "--record", str(folder), *job.command[3:])
    return _figures(output_of(replace(job, command=recorded)), LOSS)


def seconds_of(
    contender: Contender, data: Path, recorded: Path, given: argparse.Namespace
) -> float:
    """The mean step of one run.

    Raises:
        RuntimeError: it failed.
    """
    steps = given.warm_up + given.steps
    if contender.preset is None:
        words = [sys.executable, str(HERE / "plain_training.py"), str(recorded)]
        lines = _lines(
            [*words, "--steps", str(steps)], os.environ | {"OMP_NUM_THREADS": str(contender.cores)}
        )
        return fmean(_figures(lines, SECONDS)[given.warm_up :])
    recipe = recipe_for(contender)
    if contender.stock:
        recipe = replace(recipe, entry=str(HERE / "timed_training.py"))
    job = prepare(recipe, data=data, overrides=["--train-iters", str(steps)])
    if contender.stock:
        job = replace(job, command=(*job.command[:3], "--stock", *job.command[3:]))
    steps_said = filter(None, map(parse_step, output_of(job)))
    times = [s.seconds for s in steps_said if s.iteration > given.warm_up and s.seconds]
    if not times:
        raise RuntimeError("its log has no line after the warm-up: ask for more --steps")
    return fmean(times)


def seconds_to_start(name: str, data: Path) -> float:
    """Of importing what the entry point needs, or from a launch to the end of its first step."""
    start = time.time()
    if name == "import":
        source = "from kha_megatron.mcore import cpu; cpu.install()\n"
        source += "import kha_megatron.training.pretrain"
        _lines([sys.executable, "-c", source], {**os.environ})
        return time.time() - start
    with tempfile.TemporaryDirectory(prefix="kha-cpu-") as folder:
        words = ["launch", "quickstart", "--data", str(data), "--output", folder]
        words += ["--", "--train-iters", "1", "--save-interval", "1000"]
        _lines([sys.executable, "-m", "kha_megatron", *words], {**os.environ})
        return _first_step(Path(folder) / TENSORBOARD) - start


def _first_step(folder: Path) -> float:
    """When its loss was written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Scalars("lm loss")[0].wall_time


def results(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One for all."""
    with tempfile.TemporaryDirectory(prefix="kha-cpu-") as folder:
        data, recorded = given.data, Path(folder) / "recorded"
        if data is None:
            data = Path(folder) / "data"
            words = ["data", "prepare", "--vocab-size", "512", "--out", str(data)]
            _lines([sys.executable, "-m", "kha_megatron", *words], {**os.environ})
        losses = record(data, recorded, given.warm_up + given.steps)
        check_plain(losses, recorded)
        times: dict[str, list[float]] = {name: [] for name in given.contenders}
        failed: dict[str, str] = {}
        shuffled = random.Random(0)
        for turn in range(given.repetitions):
            for name in shuffled.sample(given.contenders, len(given.contenders)):
                if name in failed:
                    continue
                try:
                    if name in STARTS:
                        times[name].append(seconds_to_start(name, data))
                    else:
                        times[name].append(seconds_of(CONTENDERS[name], data, recorded, given))
                except RuntimeError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    failed[name] = str(error).partition("\n")[0]
                    continue
                print(f"{turn + 1}: {name} {times[name][-1]:.4f} s", file=sys.stderr, flush=True)
    batch = get_recipe("quickstart").run.batch
    assert batch is not None
    tokens = batch.global_batch_size * get_recipe("quickstart").run.arguments["seq_length"]
    yield compared({n: t for n, t in times.items() if n not in failed}, tokens) | {
        "cell": "quickstart",
        "tokens": tokens,
        "failed": failed,
    }


def check_plain(losses: list[float], recorded: Path) -> None:
    """Refuse to compare with a loop that trains something else.

    Raises:
        KHAError: its losses are not those of the run.
    """
    from plain_training import train

    plain = [loss for loss, *_ in train(recorded, min(5, len(losses)))]
    for step, (ours, theirs) in enumerate(zip(losses, plain, strict=False), 1):
        if abs(ours - theirs) > CLOSE * ours:
            raise KHAError(
                f"step {step}: the plain loop's loss is {theirs:.5f}, Megatron's {ours:.5f}"
            )


def compared(times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Spreads of each contender and of its ratios to others, turn by turn."""
    found: dict[str, Any] = {
        "seconds": {name: Spread.of(t) for name, t in times.items()},
        "tokens_per_second": {},
        "over_plain": {},
        "knocked_over": {},
        "targets": {},
    }
    for name, contender in CONTENDERS.items():
        if name not in times:
            continue
        found["tokens_per_second"][name] = Spread.of([tokens / t for t in times[name]])
        if contender.preset is not None and contender.baseline in times:
            over = ratios(times[name], times[contender.baseline])
            found["over_plain"][name] = over
            if contender.preset != "baseline":
                found["targets"][name] = within(AT_MOST, over)
    for name in ("baseline/1", "stock/1"):
        if name in times and "mlp/1" in times:
            found["knocked_over"][name] = ratios(times["mlp/1"], times[name])
    return found


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Of the table."""
    found = []
    for name, spread in result["seconds"].items():
        cells: list[str] = [name, Spread(*(1e3 * v for v in _values(spread)), spread.count).text(0)]
        for figures, digits in (("tokens_per_second", 0), ("over_plain", 3)):
            figure = result[figures].get(name)
            cells.append(figure.text(digits) if figure else "")
        target, knocked = result["targets"].get(name), result["knocked_over"].get(name)
        cells.append(in_words(target) if target else "")
        found.append([*cells, knocked.text(3) if knocked else ""])
    return found


def _values(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high
