"""Training runs of a comparison.

Runs with the same seed see the same batches and start from the same weights (KHA is initialized to
the identity without using random numbers), so it makes sense to compare their losses directly.

A run's directory is ``OUTPUT/runs/VARIANT-seedN``. In addition to checkpoints and TensorBoard files
it contains:

- ``run.json``: Megatron arguments, written when the run starts
- ``result.json``: losses and diagnostics, written when it finishes
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from kha_megatron.checkpoint.ownership import has_files, owned
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.checkpoint.tracker import iteration_of, newest
from kha_megatron.compare.statistics import select_last
from kha_megatron.compare.variants import NULL, SETTINGS, ModelVariant
from kha_megatron.errors import ConfigError, DataError, OutputError
from kha_megatron.model.run import Run, parse
from kha_megatron.recipes import Job, Recipe, prepare_job
from kha_megatron.recipes.log_lines import LOSS, SECONDS, VALIDATION_LOSS, History, read_history
from kha_megatron.recipes.recipe import CHECKPOINTS, TENSORBOARD

RUNS = "runs"
RUN, RESULT = "run.json", "result.json"
_INDEX = "index"
"""Dataset index. Each run has its own, otherwise parallel runs could overwrite each other's."""
_MIN_CHECKPOINTS = 4
_SET_BY = dict.fromkeys(SETTINGS, "--variants") | dict.fromkeys(
    (
        *("--save", "--load", "--data-cache-path", "--tensorboard-dir"),
        *("--tensorboard-log-interval", "--seed", "--kha-init-seed", "--kha-perturb-embedding"),
    ),
    "--output and --seeds",
)
"""Users can't pass these flags to Megatron. The values are the options to use instead."""
_EVALUATION = ("--eval-iters", "--eval-interval", "--full-validation")
_ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
"""Relative perturbation of the initial weights in null runs (1e-6 for fp32)."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    variant: ModelVariant
    seed: int
    recipe: Recipe  # with the variant's KHA config
    overrides: tuple[str, ...]
    launch: Mapping[str, Any]  # data, ranks and device of prepare_job
    folder: Path
    iterations: int
    held_out: bool  # whether to compute the validation loss

    @property
    def name(self) -> str:
        """Directory name, e.g. ``kha_mlp-seed1``."""
        return self.folder.name

    @cached_property
    def config(self) -> Run:
        """Run configuration, except that output directories aren't set yet."""
        device = self.launch.get("device")
        placed: dict[str, Any] = {"device": device} if device else {}
        return self.recipe.run_for(self.overrides, data=self.launch.get("data"), **placed)

    @property
    def result(self) -> dict[str, Any] | None:
        """The parsed ``result.json``. None if the run hasn't finished yet."""
        file = self.folder / RESULT
        return json.loads(file.read_bytes()) if file.exists() else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A grid of runs, variants x seeds. The first variant is the reference."""

    recipe: Recipe
    variants: tuple[ModelVariant, ...]
    seeds: tuple[int, ...]
    folder: Path
    runs: tuple[Trial, ...]  # in the order they are trained, i.e. seed by seed


def plan_comparison(
    recipe: Recipe,
    variants: Sequence[ModelVariant],
    seeds: int,
    *,
    output: Path,
    overrides: Sequence[str] = (),
    null: bool = False,
    held_out: int = 0,
    **launch: Any,
) -> Comparison:
    """Plan all runs of a comparison and validate their arguments. Doesn't write any files.

    Args:
        variants: Variants to train, starting with the reference.
        seeds: Number of seeds. Runs are numbered from 1.
        output: Output directory. An interrupted comparison is continued if its arguments match.
        null: Whether to add a null run to estimate the noise floor. This is a second run of the
            reference with slightly perturbed initial weights.
        held_out: Number of validation sequences for evaluation after training, rounded up to full
            batches. 0 to disable.

    All other arguments (``data``, ``ranks`` and ``device``) are passed to
    :func:`kha_megatron.recipes.prepare_job`.
    """
    set_by = _SET_BY | dict.fromkeys(_EVALUATION if held_out else (), "--held-out")
    if taken := [flag for flag in parse(overrides) if flag in set_by]:
        raise ConfigError(f"{taken[0]} is set by {set_by[taken[0]]}. Please remove it.")
    base = recipe.run_for(overrides)
    iterations = base.training.train_iters
    if iterations is None:
        raise ConfigError(f"--train-iters is not set in {recipe.name}. Add `-- --train-iters N`.")
    nulls = [ModelVariant(NULL, variants[0].kha, perturbs=True)] if null else []
    variants = variants[0], *nulls, *variants[1:]
    interval = base.training.save_interval or iterations
    interval = min(interval, math.ceil(iterations / _MIN_CHECKPOINTS))
    words = [*overrides, "--save-interval", str(interval), "--tensorboard-log-interval", "1"]
    words.append("--log-timers-to-tensorboard")
    if held_out:
        batch = base.batch and base.batch.global_batch_size
        if not batch:
            raise ConfigError("--held-out requires `-- --global-batch-size N`.")
        words += ["--eval-iters", str(math.ceil(held_out / batch))]
        words += ["--eval-interval", str(iterations + 1)]  # evaluate only at the end of training
    rounding = next((x for name, x in _ROUNDING.items() if getattr(base.training, name)), 1e-6)
    numbers = tuple(range(1, seeds + 1))
    runs = tuple(
        Trial(
            variant=variant,
            seed=seed,
            recipe=recipe.with_heads(variant.kha),
            overrides=(
                *(*words, "--seed", str(seed), "--kha-init-seed", str(seed)),
                *(("--kha-perturb-embedding", f"{rounding:g}") if variant.perturbs else ()),
            ),
            launch=launch,
            folder=output / RUNS / f"{variant.name}-seed{seed}",
            iterations=iterations,
            held_out=bool(held_out),
        )
        for seed in numbers
        for variant in variants
    )
    if has_files(output) and not (output / RUNS).is_dir():
        raise OutputError(
            f"{output} was not written by `kha-megatron compare`. Choose another --output."
        )
    for run in runs:
        if run.seed == 1:
            prepare_job(run.recipe, overrides=run.overrides, **launch)
        _check_arguments(run)
    return Comparison(recipe=recipe, variants=variants, seeds=numbers, folder=output, runs=runs)


def _check_arguments(run: Trial) -> None:
    """Make sure a run isn't resumed with different arguments."""
    if not (run.folder / RUN).exists():
        return
    old = json.loads((run.folder / RUN).read_bytes())["arguments"]
    new = {flag: list(words) for flag, words in run.config.flags.items()}
    if other := sorted(f for f in old.keys() | new.keys() if old.get(f) != new.get(f)):
        was, now = (" ".join(x.get(other[0], ["absent"])) or "set" for x in (old, new))
        raise OutputError(
            f"{run.folder} was started with other arguments ({other[0]}: {was}, now {now}). Please "
            "choose another --output or delete this directory."
        )


def start_run(run: Trial) -> Job:
    """Prepare a run for training, or for resuming from its last checkpoint.

    Raises:
        OutputError: If the run is still in use by another process.
    """
    with owned(run.folder / CHECKPOINTS):
        last = newest(run.folder / CHECKPOINTS)
        earlier = run.folder / RUN
        starts = json.loads(earlier.read_bytes())["starts"] if last and earlier.exists() else 0
        # clean up, because the previous job may have been killed while writing
        shutil.rmtree(run.folder if last is None else run.folder / _INDEX, ignore_errors=True)
    index = str((run.folder / _INDEX).absolute())
    job = prepare_job(
        run.recipe,
        output=run.folder,
        overrides=(*run.overrides, "--data-cache-path", index),
        resume=last is not None,
        **run.launch,
    )
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / RUN, {"starts": starts + 1, "arguments": run.config.flags})
    return job


def finish_run(run: Trial) -> None:
    """Write ``result.json`` and delete files that are no longer needed.

    Only the last checkpoint is kept. The dataset index is deleted as well.
    """
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.compare import measure

    history = read_history(run.folder / TENSORBOARD)
    losses = _losses(history, run)
    checkpoint = MegatronCheckpoint.open(run.folder / CHECKPOINTS)
    seconds = [value for _, value in history.get(SECONDS, ())]
    vocab_size = checkpoint.args.get("padded_vocab_size") or run.recipe.run.vocab_size
    result = {
        "variant": run.variant.name,
        "knocks": str(run.variant.kha),
        "seed": run.seed,
        "losses": losses,
        "held_out": _held_out(run, history),
        "seconds_per_step": median(seconds) if seconds else None,
        "cost": measure.compute_cost(run.config, vocab_size),
        "device": measure.describe_device(run.config),
        "starts": json.loads((run.folder / RUN).read_bytes())["starts"],
        "matrices": measure.diagnose_matrices(checkpoint, run.folder),
    }
    for folder in checkpoint.path.parent.iterdir():
        if iteration_of(folder) is not None and folder != checkpoint.path:
            shutil.rmtree(folder)
    shutil.rmtree(run.folder / _INDEX, ignore_errors=True)
    write_json(run.folder / RESULT, result)


def _losses(history: History, run: Trial) -> list[float | None]:
    found = dict(history.get(LOSS, ()))
    losses = [found.get(i) for i in range(1, run.iterations + 1)]
    if bad := [i for i, x in enumerate(losses, 1) if x is not None and not math.isfinite(x)]:
        raise DataError(f"The loss of {run.name} is not finite at iteration {bad[0]}.")
    if all(loss is None for loss in select_last(losses)):
        raise DataError(f"The final losses of {run.folder} are missing. Delete it to start again.")
    return losses


def _held_out(run: Trial, history: History) -> float | None:
    if not run.held_out:
        return None
    loss = dict(history.get(VALIDATION_LOSS, ())).get(run.iterations)
    if loss is None or not math.isfinite(loss):
        raise DataError(f"Held-out loss of {run.folder} is {loss}. Delete it to start again.")
    return loss
