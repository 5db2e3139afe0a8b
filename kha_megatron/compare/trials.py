"""Trials of a comparison. A trial trains one variant with one seed.

Trials with the same seed see the same batches and start from the same weights (KHA is initialized
to the identity without using random numbers), so it makes sense to compare their losses directly.

A trial's directory is ``OUTPUT/runs/VARIANT-seedN``. In addition to checkpoints and TensorBoard
files it contains:

- ``run.json``: Megatron arguments, written when the trial starts
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
from kha_megatron.compare.pretrained import RESERVED, Start, plan_start
from kha_megatron.compare.statistics import select_last
from kha_megatron.compare.variants import NULL, SETTINGS, ModelVariant
from kha_megatron.errors import ConfigError, DataError, OutputError
from kha_megatron.model.run import Run, parse
from kha_megatron.recipes import Job, Recipe, prepare_job
from kha_megatron.recipes.log_lines import LOSS, SECONDS, VALIDATION_LOSS, History, read_history
from kha_megatron.recipes.recipe import CHECKPOINTS, TENSORBOARD

RUNS = "runs"
RUN = "run.json"
RESULT = "result.json"
_INDEX = "index"
"""Dataset index. Each trial has its own, so that parallel trials cannot overwrite it."""
_MIN_CHECKPOINTS = 4
_SET_FOR_EACH_TRIAL = (
    "--save",
    "--load",
    "--data-cache-path",
    "--tensorboard-dir",
    "--tensorboard-log-interval",
    "--seed",
    "--kha-init-seed",
    "--kha-perturb-embedding",
)
_EVALUATION = ("--eval-iters", "--eval-interval", "--full-validation")
_PERTURBATION_BF16 = 2**-8
_PERTURBATION_FP16 = 2**-11
_PERTURBATION_FP32 = 1e-6
"""Relative perturbation of the initial weights in null trials."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    variant: ModelVariant
    seed: int
    recipe: Recipe  # with the variant's KHA config
    overrides: tuple[str, ...]
    launch: Mapping[str, Any]  # data, ranks and device of prepare_job
    folder: Path
    iterations: int
    has_held_out_loss: bool  # whether to compute the validation loss
    start: Start | None = None  # pretrained model with the variant's mechanisms

    @property
    def name(self) -> str:
        """Directory name, e.g. ``kha_mlp-seed1``."""
        return self.folder.name

    @cached_property
    def config(self) -> Run:
        """Run configuration, except that output directories are not set yet."""
        settings: dict[str, Any] = {"data": self.launch.get("data")}
        if self.launch.get("device"):
            settings["device"] = self.launch["device"]
        return self.recipe.run_for(self.overrides, **settings)

    @property
    def result(self) -> dict[str, Any] | None:
        """The parsed ``result.json``. None if the trial has not finished yet."""
        file = self.folder / RESULT
        if not file.exists():
            return None
        return json.loads(file.read_bytes())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A grid of trials, variants x seeds. The first variant is the reference."""

    recipe: Recipe
    variants: tuple[ModelVariant, ...]
    seeds: tuple[int, ...]
    folder: Path
    trials: tuple[Trial, ...]  # in the order they are trained, i.e. seed by seed


def plan_comparison(
    recipe: Recipe,
    variants: Sequence[ModelVariant],
    seeds: int,
    *,
    output: Path,
    overrides: Sequence[str] = (),
    null: bool = False,
    held_out_sequences: int = 0,
    pretrained: Path | None = None,
    **launch: Any,
) -> Comparison:
    """Plan all trials of a comparison and validate their arguments. Does not write any files.

    Args:
        variants: Variants to train, starting with the reference.
        seeds: Number of seeds. They are numbered from 1.
        output: Output directory. An interrupted comparison is continued if its arguments match.
        null: Whether to add a null trial to estimate the noise floor. It trains the reference a
            second time with slightly perturbed initial weights.
        held_out_sequences: Number of validation sequences for evaluation after training, rounded up
            to full batches. 0 to disable.
        pretrained: Hugging Face model or Megatron checkpoint that all trials start from. The recipe
            is that of :func:`kha_megatron.compare.pretrained.make_recipe`.

    All other arguments (``data``, ``ranks`` and ``device``) are passed to
    :func:`kha_megatron.recipes.prepare_job`.
    """
    has_held_out_loss = held_out_sequences > 0
    _refuse_reserved_flags(overrides, has_held_out_loss, pretrained)
    base = recipe.run_for(overrides)
    iterations = base.training.train_iters
    if iterations is None:
        raise ConfigError(f"--train-iters is not set in {recipe.name}. Add `-- --train-iters N`.")
    reference, *other_variants = variants
    planned_variants = [reference]
    if null:
        null_variant = ModelVariant(NULL, reference.kha, perturbs=True)
        planned_variants.append(null_variant)
    planned_variants += other_variants
    starts: dict[str, Start] = {}
    if pretrained is not None:
        run = recipe.run_for(overrides, data=launch.get("data"))
        for variant in variants:
            starts[variant.name] = plan_start(pretrained, variant, run, output)
        starts[NULL] = starts[reference.name]
        base = base.updated(starts[reference.name].words())  # with the dtype of the model

    shared_flags = [*overrides, *_logging_flags(base)]
    if has_held_out_loss:
        shared_flags += _evaluation_flags(base, held_out_sequences)
    trials = []
    for seed in range(1, seeds + 1):
        for variant in planned_variants:
            start = starts.get(variant.name)
            kha = variant.kha
            flags = [*shared_flags, *_seed_flags(base, variant, seed)]
            if start is not None:
                kha = start.kha
                flags += start.words()
            trial = Trial(
                variant=variant,
                seed=seed,
                recipe=recipe.with_heads(kha),
                overrides=tuple(flags),
                launch=launch,
                folder=output / RUNS / f"{variant.name}-seed{seed}",
                iterations=iterations,
                has_held_out_loss=has_held_out_loss,
                start=start,
            )
            trials.append(trial)
    if has_files(output) and not (output / RUNS).is_dir():
        raise OutputError(
            f"{output} was not written by `kha-megatron compare`. Choose another --output."
        )
    for trial in trials:
        if trial.seed == 1:
            prepare_job(trial.recipe, overrides=trial.overrides, **launch)
        _check_arguments(trial)
    return Comparison(
        recipe=recipe,
        variants=tuple(planned_variants),
        seeds=tuple(range(1, seeds + 1)),
        folder=output,
        trials=tuple(trials),
    )


def _refuse_reserved_flags(
    overrides: Sequence[str], has_held_out_loss: bool, pretrained: Path | None
) -> None:
    """Raise ConfigError for flags of Megatron that another option of ``compare`` sets."""
    options = dict.fromkeys(SETTINGS, "--variants")
    options |= dict.fromkeys(_SET_FOR_EACH_TRIAL, "--output and --seeds")
    if has_held_out_loss:
        options |= dict.fromkeys(_EVALUATION, "--held-out")
    if pretrained is not None:
        options |= dict.fromkeys(RESERVED, "compare --pretrained-checkpoint")
    for flag in parse(overrides):
        if flag in options:
            raise ConfigError(f"{flag} is set by {options[flag]}. Please remove it.")


def _seed_flags(base: Run, variant: ModelVariant, seed: int) -> list[str]:
    flags = ["--seed", str(seed), "--kha-init-seed", str(seed)]
    if variant.perturbs:
        perturbation = _perturbation(base)
        flags += ["--kha-perturb-embedding", f"{perturbation:g}"]
    return flags


def _logging_flags(base: Run) -> list[str]:
    iterations = base.training.train_iters or 0
    recipe_interval = base.training.save_interval or iterations
    longest_interval = math.ceil(iterations / _MIN_CHECKPOINTS)
    interval = min(recipe_interval, longest_interval)
    return [
        *("--save-interval", str(interval)),
        *("--tensorboard-log-interval", "1"),
        "--log-timers-to-tensorboard",
    ]


def _evaluation_flags(base: Run, sequences: int) -> list[str]:
    """Return flags to evaluate once, at the end of training."""
    if base.batch is None or not base.batch.global_batch_size:
        raise ConfigError("--held-out requires `-- --global-batch-size N`.")
    batches = math.ceil(sequences / base.batch.global_batch_size)
    iterations = base.training.train_iters or 0
    return [
        *("--eval-iters", str(batches)),
        *("--eval-interval", str(iterations + 1)),
    ]


def _perturbation(base: Run) -> float:
    if base.training.bf16:
        return _PERTURBATION_BF16
    if base.training.fp16:
        return _PERTURBATION_FP16
    return _PERTURBATION_FP32


def _check_arguments(trial: Trial) -> None:
    """Make sure a trial is not resumed with different arguments."""
    file = trial.folder / RUN
    if not file.exists():
        return
    old_flags = json.loads(file.read_bytes())["arguments"]
    new_flags = {}
    for flag, values in trial.config.flags.items():
        new_flags[flag] = list(values)
    for flag in sorted(old_flags.keys() | new_flags.keys()):
        if old_flags.get(flag) != new_flags.get(flag):
            old = _show_flag(old_flags, flag)
            new = _show_flag(new_flags, flag)
            raise OutputError(
                f"{trial.folder} was started with other arguments ({flag}: {old}, now {new}). "
                "Please choose another --output or delete this directory."
            )


def _show_flag(flags: Mapping[str, list[str]], flag: str) -> str:
    if flag not in flags:
        return "absent"
    return " ".join(flags[flag]) or "set"


def start_trial(trial: Trial) -> Job:
    """Prepare a trial for training, or for resuming from its last checkpoint.

    Raises:
        OutputError: If the trial is still in use by another process.
    """
    run_file = trial.folder / RUN
    index = (trial.folder / _INDEX).absolute()
    starts = 0
    with owned(trial.folder / CHECKPOINTS):
        last_checkpoint = newest(trial.folder / CHECKPOINTS)
        # clean up, because the previous job may have been killed while writing
        if last_checkpoint is None:
            shutil.rmtree(trial.folder, ignore_errors=True)
        else:
            shutil.rmtree(index, ignore_errors=True)
            if run_file.exists():
                starts = json.loads(run_file.read_bytes())["starts"]
    if trial.start is not None and last_checkpoint is None:
        trial.start.write()
    job = prepare_job(
        trial.recipe,
        output=trial.folder,
        overrides=(*trial.overrides, "--data-cache-path", str(index)),
        resume=last_checkpoint is not None,
        **trial.launch,
    )
    trial.folder.mkdir(parents=True, exist_ok=True)
    content = {"starts": starts + 1, "arguments": trial.config.flags}
    write_json(run_file, content)
    return job


def finish_trial(trial: Trial) -> None:
    """Write ``result.json`` and delete files that are no longer needed.

    Only the last checkpoint is kept. The dataset index is deleted as well.
    """
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.compare import measure

    history = read_history(trial.folder / TENSORBOARD)
    losses = _read_losses(history, trial)
    checkpoint = MegatronCheckpoint.open(trial.folder / CHECKPOINTS)
    vocab_size = checkpoint.args.get("padded_vocab_size")
    if not vocab_size:
        vocab_size = trial.recipe.run.vocab_size
    pretrained_model = None if trial.start is None else trial.start.model
    run_file = trial.folder / RUN
    result = {
        "variant": trial.variant.name,
        "knocks": str(trial.variant.kha),
        "seed": trial.seed,
        "losses": losses,
        "held_out": _read_held_out_loss(history, trial),
        "seconds_per_step": _read_step_time(history),
        "cost": measure.compute_cost(trial.config, vocab_size, pretrained_model),
        "device": measure.describe_device(trial.config),
        "starts": json.loads(run_file.read_bytes())["starts"],
        "matrices": measure.diagnose_matrices(checkpoint, trial.folder),
    }
    for folder in checkpoint.path.parent.iterdir():
        is_checkpoint = iteration_of(folder) is not None
        if is_checkpoint and folder != checkpoint.path:
            shutil.rmtree(folder)
    index = trial.folder / _INDEX
    shutil.rmtree(index, ignore_errors=True)
    write_json(trial.folder / RESULT, result)


def _read_step_time(history: History) -> float | None:
    logged_seconds = dict(history.get(SECONDS, ()))
    if not logged_seconds:
        return None
    return median(logged_seconds.values())


def _read_losses(history: History, trial: Trial) -> list[float | None]:
    """Return the loss of each iteration. Those that were not logged are None."""
    logged_losses = dict(history.get(LOSS, ()))
    losses = []
    for iteration in range(1, trial.iterations + 1):
        loss = logged_losses.get(iteration)
        if loss is not None and not math.isfinite(loss):
            raise DataError(f"The loss of {trial.name} is not finite at iteration {iteration}.")
        losses.append(loss)
    final_losses = select_last(losses)
    if all(loss is None for loss in final_losses):
        raise DataError(
            f"The final losses of {trial.folder} are missing. Delete it to start again."
        )
    return losses


def _read_held_out_loss(history: History, trial: Trial) -> float | None:
    if not trial.has_held_out_loss:
        return None
    logged_losses = dict(history.get(VALIDATION_LOSS, ()))
    loss = logged_losses.get(trial.iterations)
    if loss is None or not math.isfinite(loss):
        raise DataError(f"Held-out loss of {trial.folder} is {loss}. Delete it to start again.")
    return loss
