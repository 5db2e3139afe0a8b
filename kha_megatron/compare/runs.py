"""Plan, start and finish the runs of a comparison.

``OUT/runs/VARIANT-seedN/`` holds ``run.json`` (the requested arguments), checkpoints, TensorBoard
files and, once the run has finished, ``result.json``. An interrupted run resumes from its last
checkpoint.

Within a seed all variants see the same data in the same order and start from the same weights:
Megatron's ``--seed`` decides both, and matrices at the identity draw no random numbers.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from kha_megatron.checkpoint.reading import read_json
from kha_megatron.checkpoint.staging import lock, write_json
from kha_megatron.checkpoint.tracker import iteration_of, newest
from kha_megatron.compare.statistics import last_share
from kha_megatron.compare.variants import SETTINGS, Candidate, with_null
from kha_megatron.errors import ConfigError, DataError, OutputError, in_one_line
from kha_megatron.model.run import Run
from kha_megatron.model.words import parse
from kha_megatron.recipes import Job, Recipe, prepare
from kha_megatron.recipes.log_lines import (
    LOSS,
    SECONDS,
    VALIDATION_LOSS,
    History,
    read_history,
)
from kha_megatron.recipes.recipe import CHECKPOINTS, TENSORBOARD

MARK = "compare.lock"
RUN, RESULT = "run.json", "result.json"
_INDEX = "index"
"""Directory of Megatron's sample index. Parallel runs would otherwise write it beside the data."""
_MIN_SAVES = 4
_OF_ONE_RUN = (
    *("--save", "--load", "--data-cache-path", "--tensorboard-dir", "--tensorboard-log-interval"),
    *("--seed", "--kha-init-seed", "--kha-perturb-embedding"),
)
_ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
"""Relative perturbation of a null run by dtype; 1e-6 in float32."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant trained with one seed."""

    variant: Candidate
    seed: int
    recipe: Recipe
    """With the variant's KHA settings."""
    overrides: tuple[str, ...]
    data: Path | None
    ranks: int | None
    device: str | None
    folder: Path
    iterations: int
    held_out: bool
    """Whether the run is also evaluated on the validation split."""

    @property
    def name(self) -> str:
        """Name of the run and of its directory, such as ``kha_mlp-seed1``."""
        return self.folder.name

    @cached_property
    def asked(self) -> Run:
        """The whole run without output directories."""
        placed: dict[str, Any] = {"device": self.device} if self.device else {}
        return self.recipe.run_for(self.overrides, data=self.data, **placed)

    @property
    def result(self) -> dict[str, Any] | None:
        """Content of ``result.json``; None if the run has not finished."""
        return _read(self.folder / RESULT)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every variant with every seed; the first variant is the reference."""

    recipe: Recipe
    variants: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    folder: Path
    runs: tuple[Trial, ...]
    """In training order: all variants of a seed, then the next seed."""


def plan(
    recipe: Recipe,
    variants: Sequence[Candidate],
    seeds: int,
    *,
    output: Path,
    data: Path | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    device: str | None = None,
    null: bool = False,
    held_out: int = 0,
) -> Comparison:
    """Plan a comparison and check every run; writes nothing.

    Args:
        recipe: what to train.
        variants: the reference first.
        seeds: number of seeds; they are 1, 2, ...
        output: directory of the comparison.
        data: directory written by ``data prepare``.
        overrides: Megatron arguments of all runs.
        ranks: ranks of each run; None for the recipe's.
        device: ``cuda`` or ``cpu``; None for the recipe's.
        null: also train the reference from weights that differ by rounding alone.
        held_out: validation sequences to evaluate at the end, rounded up to whole batches.

    Raises:
        ConfigError, DataError, OutputError: a run cannot be prepared, or ``output`` is in use.
    """
    for flag in parse(overrides):
        if flag in _OF_ONE_RUN or flag in SETTINGS:
            instead = "--variants" if flag in SETTINGS else "--output and --seeds"
            raise ConfigError(f"{flag} differs between the runs: use {instead} instead")
    training = recipe.run_for(overrides).training
    iterations = training.train_iters
    if iterations is None:
        raise ConfigError(f"recipe {recipe.name} has no --train-iters: add `-- --train-iters N`")
    variants = with_null(tuple(variants)) if null else tuple(variants)
    every = min(training.save_interval or iterations, math.ceil(iterations / _MIN_SAVES))
    words = (*overrides, "--save-interval", str(every), "--tensorboard-log-interval", "1")
    if held_out:
        words += _evaluation(overrides, recipe.run_for(overrides), held_out)
    size = next((s for name, s in _ROUNDING.items() if getattr(training, name)), 1e-6)
    runs = tuple(
        Trial(
            variant=variant,
            seed=seed,
            recipe=recipe.having(variant.kha),
            overrides=(
                *(*words, "--log-timers-to-tensorboard"),
                *("--seed", str(seed), "--kha-init-seed", str(seed)),
                *(("--kha-perturb-embedding", f"{size:g}") if variant.perturbs else ()),
            ),
            data=data,
            ranks=ranks,
            device=device,
            folder=output / "runs" / f"{variant.name}-seed{seed}",
            iterations=iterations,
            held_out=bool(held_out),
        )
        for seed in range(1, seeds + 1)
        for variant in variants
    )
    if output.is_file():
        raise OutputError(f"--output: expected a directory, got the file {output}")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise OutputError(f"{output} is not empty and holds no {MARK}: choose another --output")
    for run in runs:
        if run.seed == 1:
            prepare(run.recipe, data=data, overrides=run.overrides, ranks=ranks, device=device)
        _check_same(run)
    return Comparison(
        recipe=recipe,
        variants=variants,
        seeds=tuple(range(1, seeds + 1)),
        folder=output,
        runs=runs,
    )


def _evaluation(overrides: Sequence[str], run: Run, sequences: int) -> tuple[str, ...]:
    """Return Megatron's arguments for one evaluation at the end of training."""
    flags = ("--eval-iters", "--eval-interval", "--full-validation")
    if given := [flag for flag in parse(overrides) if flag in flags]:
        raise ConfigError(f"--held-out sets {given[0]} itself: remove one of them")
    batch = run.batch and run.batch.global_batch_size
    if not batch:
        raise ConfigError("--held-out needs a fixed batch size: add `-- --global-batch-size N`")
    never = str((run.training.train_iters or 0) + 1)
    return "--eval-iters", str(math.ceil(sequences / batch)), "--eval-interval", never


def _check_same(run: Trial) -> None:
    """Raise OutputError if the run was started with other arguments."""
    if (record := _read(run.folder / RUN)) is None:
        return
    old, new = record["arguments"], {flag: list(words) for flag, words in run.asked.flags.items()}
    if other := sorted(f for f in old.keys() | new.keys() if old.get(f) != new.get(f)):
        was, now = (" ".join(x.get(other[0], ["absent"])) or "set" for x in (old, new))
        raise OutputError(
            f"{run.folder} was started with other arguments ({other[0]}: {was}, now {now}): choose "
            f"another --output, or remove {run.folder}"
        )


def _read(file: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if it does not exist."""
    try:
        return read_json(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{file} is damaged ({in_one_line(error)}): remove {file.parent}"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the comparison directory and lock it; OutputError if it is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / MARK).open("a") as file:
        try:
            lock(file.fileno(), folder)
        except BlockingIOError:
            raise OutputError(
                f"another `kha-megatron compare` is running in {folder}: wait, or choose another "
                "--output"
            ) from None
        yield


def begin(run: Trial) -> tuple[Job, int]:
    """Prepare a run for launching, from its newest complete checkpoint if there is one.

    Returns:
        The job, and the iteration from which it resumes (0 for a new run).

    Raises:
        OutputError: ranks of an earlier launch still train in the directory.
    """
    if pids := _live_ranks(run.folder):
        raise OutputError(
            f"process {pids[0]} of an earlier command still trains in {run.folder}: wait, or stop "
            f"it (kill {' '.join(map(str, pids))})"
        )
    last = newest(run.folder / CHECKPOINTS)
    record = _read(run.folder / RUN) if last else None
    # remove incomplete checkpoints, and an index that may be incomplete
    shutil.rmtree(run.folder if last is None else run.folder / _INDEX, ignore_errors=True)
    index = str((run.folder / _INDEX).absolute())
    job = prepare(
        run.recipe,
        data=run.data,
        output=run.folder,
        overrides=(*run.overrides, "--data-cache-path", index),
        ranks=run.ranks,
        device=run.device,
        resume=last is not None,
    )
    run.folder.mkdir(parents=True, exist_ok=True)
    starts = 1 + (record["starts"] if record else 0)
    write_json(run.folder / RUN, {"starts": starts, "arguments": run.asked.flags})
    return job, (iteration_of(last) or 0) if last else 0


def finish(run: Trial) -> None:
    """Measure a run that succeeded and write its ``result.json``.

    Removes the index and all checkpoints but the last, because several runs fill a disk.
    """
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.compare import measure

    history = read_history(run.folder / TENSORBOARD)
    losses = _losses(history, run)
    checkpoint = MegatronCheckpoint.open(run.folder / CHECKPOINTS)
    seconds = [value for _, value in history.get(SECONDS, ())]
    rows = checkpoint.args.get("padded_vocab_size")
    result = {
        "variant": run.variant.name,
        "knocks": str(run.variant.kha),
        "seed": run.seed,
        "losses": losses,
        "held_out": _held_out(run, history),
        "seconds_per_step": median(seconds) if seconds else None,
        "cost": measure.cost(run.asked, rows if rows else run.recipe.run.vocab_size),
        "device": measure.device(run.asked),
        "starts": read_json(run.folder / RUN)["starts"],
        "matrices": measure.matrices(checkpoint, run.folder),
    }
    for folder in checkpoint.path.parent.iterdir():
        if iteration_of(folder) is not None and folder != checkpoint.path:
            shutil.rmtree(folder)
    shutil.rmtree(run.folder / _INDEX, ignore_errors=True)
    write_json(run.folder / RESULT, result)


def _losses(history: History, run: Trial) -> list[float | None]:
    """Return the loss of each iteration from 1 on; None where TensorBoard holds none."""
    found = dict(history.get(LOSS, ()))
    losses = [found.get(i) for i in range(1, run.iterations + 1)]
    if all(loss is None for loss in last_share(losses)):
        raise DataError(
            f"TensorBoard holds no loss of the last {len(last_share(losses))} iterations of "
            f"{run.name}: remove {run.folder} and train it again"
        )
    if bad := [i for i, x in enumerate(losses, 1) if x is not None and not math.isfinite(x)]:
        raise DataError(f"the loss of {run.name} is not finite from iteration {bad[0]} on")
    return losses


def _held_out(run: Trial, history: History) -> float | None:
    """Return the validation loss at the end; None if it was not requested."""
    if not run.held_out:
        return None
    loss = dict(history.get(VALIDATION_LOSS, ())).get(run.iterations)
    if loss is None or not math.isfinite(loss):
        raise DataError(
            f"expected a finite held-out loss of {run.name} in TensorBoard, got {loss}: remove "
            f"{run.folder} and train it again"
        )
    return loss


def _live_ranks(folder: Path) -> list[int]:
    """Return the processes whose command line names the run's checkpoints."""
    wanted = str(folder.absolute() / CHECKPOINTS).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # the process has exited
            continue
    return [pid for pid in sorted(found) if pid != os.getpid()]
