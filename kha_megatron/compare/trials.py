"""Trials of a comparison. A trial trains one variant with one seed.

Trials with the same seed see the same batches and start from the same weights (KHA is initialized
to the identity without using random numbers), so it makes sense to compare their losses directly.

A trial's directory is ``OUTPUT/runs/VARIANT-seedN``. In addition to checkpoints and TensorBoard
files it contains:

- ``run.json``: Megatron arguments and data files, written when the trial starts
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

from kha_megatron.checkpoint.integrity import hash_file
from kha_megatron.checkpoint.ownership import has_files, owned
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.checkpoint.tracker import iteration_of, newest
from kha_megatron.compare.pretrained import (
    RESERVED,
    InitialCheckpoint,
    plan_initial_checkpoint,
)
from kha_megatron.compare.statistics import select_last
from kha_megatron.compare.variants import NULL, SETTINGS, ModelVariant
from kha_megatron.data import list_data_files
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
"""A trial saves at least this many checkpoints, so that an interruption loses little."""
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
"""Flags that a comparison sets."""
_EVALUATION = ("--eval-iters", "--eval-interval", "--full-validation")
"""Flags that a comparison with a held-out loss sets."""
_PERTURBATION_BF16 = 2**-8
_PERTURBATION_FP16 = 2**-11
_PERTURBATION_FP32 = 1e-6
"""Relative perturbation of the initial weights in null trials."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    variant: ModelVariant
    seed: int
    recipe: Recipe
    """Recipe with the variant's head mechanisms."""
    overrides: tuple[str, ...]
    """Flags of Megatron that override the recipe."""
    job_options: Mapping[str, Any]
    """Options of :func:`prepare_job`: data, ranks and device."""
    data_files: Mapping[str, str]
    """Sizes and hashes of the training data and the tokenizer by path."""
    folder: Path
    iterations: int
    has_held_out_loss: bool
    """Whether the validation loss is computed after training."""
    initial_checkpoint: InitialCheckpoint | None = None
    """Pretrained model with the variant's head mechanisms. None to start from random weights."""

    @property
    def name(self) -> str:
        """Directory name, e.g. ``kha_mlp-seed1``."""
        return self.folder.name

    @cached_property
    def config(self) -> Run:
        """Run configuration, except that output directories are not set yet."""
        options: dict[str, Any] = {"data": self.job_options.get("data")}
        if self.job_options.get("device"):
            options["device"] = self.job_options["device"]
        return self.recipe.run_for(self.overrides, **options)

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
    trials: tuple[Trial, ...]
    """Trials in the order they are trained, i.e. seed by seed."""


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
    **job_options: Any,
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
    run = recipe.run_for(overrides)
    iterations = run.training.train_iters
    if iterations is None:
        raise ConfigError(f"--train-iters is not set in {recipe.name}. Add `-- --train-iters N`.")
    planned_variants = _add_null_variant(variants) if null else list(variants)
    initial_checkpoints: dict[str, InitialCheckpoint] = {}
    if pretrained is not None:
        run_with_data = recipe.run_for(overrides, data=job_options.get("data"))
        initial_checkpoints = _plan_initial_checkpoints(
            pretrained,
            variants,
            run_with_data,
            output,
        )
        reference_checkpoint = initial_checkpoints[variants[0].name]
        run = run.updated(reference_checkpoint.words())  # with the dtype of the model

    data_files = _describe_data(recipe.run_for(overrides, data=job_options.get("data")))
    shared_flags = [*overrides, *_logging_flags(run)]
    if has_held_out_loss:
        shared_flags += _evaluation_flags(run, held_out_sequences)
    trials = []
    for seed in range(1, seeds + 1):
        for variant in planned_variants:
            kha = variant.kha
            flags = [*shared_flags, *_seed_flags(run, variant, seed)]
            initial_checkpoint = initial_checkpoints.get(variant.name)
            if initial_checkpoint is not None:
                kha = initial_checkpoint.kha
                flags += initial_checkpoint.words()
            trial = Trial(
                variant=variant,
                seed=seed,
                recipe=recipe.with_heads(kha),
                overrides=tuple(flags),
                job_options=job_options,
                data_files=data_files,
                folder=output / RUNS / f"{variant.name}-seed{seed}",
                iterations=iterations,
                has_held_out_loss=has_held_out_loss,
                initial_checkpoint=initial_checkpoint,
            )
            trials.append(trial)
    _check_output(output)
    for trial in trials:
        if trial.seed == 1:  # other seeds have the same arguments
            prepare_job(trial.recipe, overrides=trial.overrides, **job_options)
        _check_same_arguments(trial)
    return Comparison(
        recipe=recipe,
        variants=tuple(planned_variants),
        seeds=tuple(range(1, seeds + 1)),
        folder=output,
        trials=tuple(trials),
    )


def _add_null_variant(variants: Sequence[ModelVariant]) -> list[ModelVariant]:
    """Insert a perturbed copy of the reference after the reference."""
    reference, *other_variants = variants
    null_variant = ModelVariant(NULL, reference.kha, perturbs=True)
    return [reference, null_variant, *other_variants]


def _refuse_reserved_flags(
    overrides: Sequence[str], has_held_out_loss: bool, pretrained: Path | None
) -> None:
    """Raise ConfigError for flags of Megatron that another option of ``compare`` sets."""
    option_by_flag = dict.fromkeys(SETTINGS, "--variants")
    option_by_flag |= dict.fromkeys(_SET_FOR_EACH_TRIAL, "--output and --seeds")
    if has_held_out_loss:
        option_by_flag |= dict.fromkeys(_EVALUATION, "--held-out")
    if pretrained is not None:
        option_by_flag |= dict.fromkeys(RESERVED, "compare --pretrained-checkpoint")
    for flag in parse(overrides):
        if flag in option_by_flag:
            raise ConfigError(f"{flag} is set by {option_by_flag[flag]}. Please remove it.")


def _plan_initial_checkpoints(
    pretrained: Path,
    variants: Sequence[ModelVariant],
    run: Run,
    output: Path,
) -> dict[str, InitialCheckpoint]:
    """Plan the initial checkpoints by variant. Null trials share that of the reference."""
    checkpoints = {}
    for variant in variants:
        checkpoints[variant.name] = plan_initial_checkpoint(pretrained, variant, run, output)
    checkpoints[NULL] = checkpoints[variants[0].name]
    return checkpoints


def _check_output(output: Path) -> None:
    """Raise OutputError if the output directory has files of another program."""
    if has_files(output) and not (output / RUNS).is_dir():
        raise OutputError(
            f"{output} was not written by `kha-megatron compare`. Choose another --output."
        )


def _seed_flags(run: Run, variant: ModelVariant, seed: int) -> list[str]:
    flags = ["--seed", str(seed), "--kha-init-seed", str(seed)]
    if variant.perturbs:
        perturbation = _perturbation(run)
        flags += ["--kha-perturb-embedding", f"{perturbation:g}"]
    return flags


def _logging_flags(run: Run) -> list[str]:
    iterations = run.training.train_iters or 0
    recipe_interval = run.training.save_interval or iterations
    longest_interval = math.ceil(iterations / _MIN_CHECKPOINTS)
    interval = min(recipe_interval, longest_interval)
    return [
        *("--save-interval", str(interval)),
        *("--tensorboard-log-interval", "1"),
        "--log-timers-to-tensorboard",
    ]


def _evaluation_flags(run: Run, sequences: int) -> list[str]:
    """Return flags to evaluate once, at the end of training."""
    if run.batch is None or not run.batch.global_batch_size:
        raise ConfigError("--held-out requires `-- --global-batch-size N`.")
    batches = math.ceil(sequences / run.batch.global_batch_size)
    iterations = run.training.train_iters or 0
    return [
        *("--eval-iters", str(batches)),
        *("--eval-interval", str(iterations + 1)),
    ]


def _perturbation(run: Run) -> float:
    if run.training.bf16:
        return _PERTURBATION_BF16
    if run.training.fp16:
        return _PERTURBATION_FP16
    return _PERTURBATION_FP32


def _describe_data(run: Run) -> dict[str, str]:
    """Return the sizes of the data files of a run by path, and hashes of all but the tokens.

    The index contains the length of each document, so it differs for other tokens.
    """
    descriptions = {}
    for file in list_data_files(run.arguments):
        description = f"{file.stat().st_size} bytes"
        if file.suffix != ".bin":
            description += f", SHA-256 {hash_file(file)}"
        descriptions[str(file)] = description
    return descriptions


def _check_same_data(trial: Trial, old_files: Mapping[str, str]) -> None:
    for file in sorted(old_files.keys() | trial.data_files.keys()):
        if old_files.get(file) != trial.data_files.get(file):
            raise OutputError(
                f"{trial.folder} was started with other data ({file} has changed). Please choose "
                "another --output or delete this directory."
            )


def _check_same_arguments(trial: Trial) -> None:
    """Make sure a trial is not resumed with different arguments or data."""
    file = trial.folder / RUN
    if not file.exists():
        return
    content = json.loads(file.read_bytes())
    old_flags = content["arguments"]
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
    if "data_files" in content:  # not recorded by earlier versions
        _check_same_data(trial, content["data_files"])


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
    previous_starts = 0
    with owned(trial.folder / CHECKPOINTS):
        last_checkpoint = newest(trial.folder / CHECKPOINTS)
        # clean up, because the previous job may have been killed while writing
        if last_checkpoint is None:
            shutil.rmtree(trial.folder, ignore_errors=True)
        else:
            shutil.rmtree(index, ignore_errors=True)
            if run_file.exists():
                previous_starts = json.loads(run_file.read_bytes())["starts"]
    if trial.initial_checkpoint is not None and last_checkpoint is None:
        trial.initial_checkpoint.write()
    job = prepare_job(
        trial.recipe,
        output=trial.folder,
        overrides=(*trial.overrides, "--data-cache-path", str(index)),
        resume=last_checkpoint is not None,
        **trial.job_options,
    )
    trial.folder.mkdir(parents=True, exist_ok=True)
    content = {
        "starts": previous_starts + 1,
        "arguments": trial.config.flags,
        "data_files": trial.data_files,
    }
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
    pretrained_model = None
    if trial.initial_checkpoint is not None:
        pretrained_model = trial.initial_checkpoint.model
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
    _delete_unneeded_files(trial, last_checkpoint=checkpoint.path)
    write_json(trial.folder / RESULT, result)


def _delete_unneeded_files(trial: Trial, *, last_checkpoint: Path) -> None:
    """Delete the dataset index and all checkpoints but the last one."""
    for folder in last_checkpoint.parent.iterdir():
        is_checkpoint = iteration_of(folder) is not None
        if is_checkpoint and folder != last_checkpoint:
            shutil.rmtree(folder)
    index = trial.folder / _INDEX
    shutil.rmtree(index, ignore_errors=True)


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
