"""The runs of a comparison: one folder each, which says how far it has come.

``OUT/runs/VARIANT-seedN/`` holds ``run.json`` (what was asked for), the checkpoints and TensorBoard
files of the run, and at its end ``result.json``, by which a finished run is known. A run that was
interrupted goes on from its last checkpoint, bit for bit as if nothing had happened.

For one seed every variant sees the same data in the same order, and starts from the same weights:
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
"""Megatron's index of the samples. By default it lies beside the data, where runs that are trained
side by side would write the same files at the same time, each under the other's eyes."""
_SAVES = 4
"""Checkpoints of a run, at least: what an interruption loses is a quarter of it, at most."""

_OWN = (
    *("--save", "--load", "--data-cache-path", "--tensorboard-dir", "--tensorboard-log-interval"),
    *("--seed", "--kha-init-seed", "--kha-perturb-embedding"),
)
_ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
"""What a null run changes weights by, where 1e-6 of them would be lost."""


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
    """Whether it is also judged on the validation split."""

    @property
    def name(self) -> str:
        """``kha_mlp-seed1``, which is its folder's name too."""
        return self.folder.name

    @cached_property
    def asked(self) -> Run:
        """The whole run, without the folders that are written to."""
        placed: dict[str, Any] = {"device": self.device} if self.device else {}
        return self.recipe.run_for(self.overrides, data=self.data, **placed)

    @property
    def result(self) -> dict[str, Any] | None:
        """What :func:`finish` wrote; None for a run that has not finished.

        Raises:
            OutputError: it cannot be read.
        """
        try:
            return read_json(self.folder / RESULT)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            file = self.folder / RESULT
            raise OutputError(f"{file} is damaged ({in_one_line(error)}): remove it") from error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every variant with every seed; the first variant is what the others are compared with."""

    recipe: Recipe
    variants: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    folder: Path
    runs: tuple[Trial, ...]
    """In the order they are trained: all variants of a seed, then the next seed."""


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
    """Lay out a comparison and refuse what cannot work in any of its runs; nothing is written.

    Args:
        seeds: how many; they are 1, 2, ...
        overrides: Megatron arguments for all runs.
        null: also train the first variant from a start that differs by rounding alone, seed by
            seed: the floor below which differences mean nothing.
        held_out: sequences of the validation split on which each run is judged at its end, the
            same for all variants of a seed; rounded up to whole batches.

    Raises:
        ConfigError: a variant that the recipe's model cannot carry, or arguments that are not for
            all runs.
        DataError: datasets or tokenizer are missing.
        OutputError: ``output`` is not a comparison's, or was begun with other arguments.
    """
    for flag in parse(overrides):
        if flag in _OWN or flag in SETTINGS:
            instead = "--variants" if flag in SETTINGS else "--output and --seeds"
            raise ConfigError(f"{flag} is for one run, and these are several: use {instead}")
    training = recipe.run_for(overrides).training
    iterations = training.train_iters
    if iterations is None:
        raise ConfigError(f"recipe {recipe.name} has no --train-iters: add `-- --train-iters N`")
    if null:
        variants = with_null(tuple(variants))
    every = min(training.save_interval or iterations, math.ceil(iterations / _SAVES))
    words = (*overrides, "--save-interval", str(every), "--tensorboard-log-interval", "1")
    if held_out:
        words += _judging(overrides, recipe.run_for(overrides), held_out)
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
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file: name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise OutputError(f"{output} is not empty and holds no {MARK}: name another --output")
    for run in runs:
        if run.seed == 1:
            prepare(run.recipe, data=data, overrides=run.overrides, ranks=ranks, device=device)
        _check_same(run)
    return Comparison(
        recipe=recipe,
        variants=tuple(variants),
        seeds=tuple(range(1, seeds + 1)),
        folder=output,
        runs=runs,
    )


def _judging(overrides: Sequence[str], run: Run, sequences: int) -> tuple[str, ...]:
    """Megatron's words for one validation, at the end of training.

    Raises:
        ConfigError: the overrides say when to validate, or a batch has no size yet.
    """
    ours = ("--eval-iters", "--eval-interval", "--full-validation")
    if said := [flag for flag in parse(overrides) if flag in ours]:
        raise ConfigError(f"{said[0]} is what --held-out decides: remove one of them")
    batch = run.batch and run.batch.global_batch_size
    if not batch:
        raise ConfigError("--held-out needs batches of one size: add `-- --global-batch-size N`")
    never = str((run.training.train_iters or 0) + 1)
    return "--eval-iters", str(math.ceil(sequences / batch)), "--eval-interval", never


def _check_same(run: Trial) -> None:
    """A run that was begun goes on with the same arguments, or its two halves are two runs."""
    try:
        begun = read_json(run.folder / RUN)["arguments"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{run.folder / RUN} is damaged: remove {run.folder}") from error
    now = {flag: list(words) for flag, words in run.asked.flags.items()}
    if other := sorted(f for f in begun.keys() | now.keys() if begun.get(f) != now.get(f)):
        was, wanted = (" ".join(x.get(other[0], ["absent"])) for x in (begun, now))
        raise OutputError(
            f"{run.folder} was begun with other arguments ({other[0]}: {was or 'set'}, now "
            f"{wanted or 'set'}): name another --output, or remove {run.folder}"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the comparison's folder, and keep a second command out of it.

    Raises:
        OutputError: another one is at work there, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / MARK).open("a")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error
    with file:
        try:
            lock(file.fileno(), folder)
        except BlockingIOError:
            raise OutputError(
                f"another `kha-megatron compare` is at work in {folder}: wait for its end, or name "
                "another --output"
            ) from None
        yield


def begin(run: Trial) -> tuple[Job, int]:
    """Make a run ready to be launched: from its newest complete checkpoint, or anew without one.

    A folder with a complete checkpoint is never removed; losses that TensorBoard's files lack are
    missing from the report.

    Returns:
        The job, and the iteration that it goes on from.

    Raises:
        OutputError: ranks of an earlier launch are still at work in the folder.
    """
    if pids := _at_work(run.folder):
        raise OutputError(
            f"process {pids[0]} still trains in {run.folder}, left over from an earlier command: "
            f"wait for its end, or stop it (kill {' '.join(map(str, pids))})"
        )
    last = newest(run.folder / CHECKPOINTS)
    starts = 1 + (_starts(run) if last else 0)
    # saves that were cut short, if any, and an index that may be half written
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
    write_json(run.folder / RUN, {"starts": starts, "arguments": run.asked.flags})
    return job, (iteration_of(last) or 0) if last else 0


def _starts(run: Trial) -> int:
    """How many times a run was started; once, where its record is lost."""
    try:
        return int(read_json(run.folder / RUN)["starts"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def finish(run: Trial) -> dict[str, Any]:
    """Measure a run whose ranks have ended well, and write its ``result.json``.

    All checkpoints but the last are removed, and the index: with several runs they fill a disk.

    Raises:
        DataError: a loss is not finite, or TensorBoard's files hold none of the last iterations.
        CheckpointError: the last checkpoint cannot be read.
    """
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.compare import measure

    history = read_history(run.folder / TENSORBOARD)
    losses = _losses(history, run.iterations)
    if bad := [i for i, x in enumerate(losses, 1) if x is not None and not math.isfinite(x)]:
        raise DataError(f"the loss of {run.name} is not finite from iteration {bad[0]} on")
    checkpoint = MegatronCheckpoint.open(run.folder / CHECKPOINTS)
    seconds = [value for _, value in history.get(SECONDS, ())]
    vocab = measure.padded_vocab(checkpoint, run.recipe.run.vocab_size)
    result = {
        "variant": run.variant.name,
        "knocks": str(run.variant.kha),
        "seed": run.seed,
        "losses": losses,
        "held_out": _held_out(run, history),
        "seconds_per_step": median(seconds) if seconds else None,
        "cost": measure.cost(run.asked, vocab),
        "device": measure.device(run.asked),
        "starts": read_json(run.folder / RUN)["starts"],
        "matrices": measure.matrices(checkpoint, run.folder),
    }
    for folder in checkpoint.path.parent.iterdir():
        if iteration_of(folder) is not None and folder != checkpoint.path:
            shutil.rmtree(folder)
    shutil.rmtree(run.folder / _INDEX, ignore_errors=True)
    write_json(run.folder / RESULT, result)
    return result


def _losses(history: History, iterations: int) -> list[float | None]:
    """The loss of each iteration from 1 to ``iterations``; None where it was lost.

    Raises:
        DataError: all are missing over which the final loss is the mean.
    """
    found = dict(history.get(LOSS, ()))
    losses = [found.get(i) for i in range(1, iterations + 1)]
    if all(loss is None for loss in last_share(losses)):
        raise DataError(
            f"TensorBoard's files hold no loss of the last {len(last_share(losses))} iterations: "
            "remove the run's folder and train it again"
        )
    return losses


def _held_out(run: Trial, history: History) -> float | None:
    """The loss over the validation split at the end; None where it was not asked for.

    Raises:
        DataError: it is missing, or not finite.
    """
    if not run.held_out:
        return None
    loss = dict(history.get(VALIDATION_LOSS, ())).get(run.iterations)
    if loss is None or not math.isfinite(loss):
        what = "not finite" if loss is not None else "missing from TensorBoard's files"
        raise DataError(
            f"the held-out loss of {run.name} is {what}: remove the run's folder and train it again"
        )
    return loss


def _at_work(folder: Path) -> list[int]:
    """Live processes whose command line names the run's checkpoints."""
    wanted = str(folder.absolute() / CHECKPOINTS).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # ended meanwhile
            continue
    return [pid for pid in sorted(found) if pid != os.getpid()]
