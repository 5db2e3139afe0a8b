"""Aggregate the results of all trials into ``report.json``."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from kha_megatron.compare.spikes import Spike, find_spikes
from kha_megatron.compare.statistics import (
    Estimate,
    Losses,
    average_bins,
    compute_final_loss,
    estimate,
    estimate_noise,
)
from kha_megatron.compare.trials import Comparison, Trial
from kha_megatron.compare.variants import NULL
from kha_megatron.mcore.compat import version_of

_PACKAGES = ("kha-megatron", "megatron-core", "torch", "transformer-engine", "nemo-run")

Result = Mapping[str, Any]
"""Content of a trial's ``result.json``."""

Results = Mapping[tuple[str, int], Result]
"""Results by variant and seed."""

Entry = dict[str, Any]
"""Description of a trial or variant in ``report.json``."""


@dataclass(frozen=True)
class _Metric:
    """A loss of each trial that the report compares between variants."""

    key: str
    """Key of the loss in the entries of trials and variants."""
    difference_key: str
    """Key of its difference from the reference."""
    read: Callable[[Result], float | None]
    """Return the loss of a trial. None if it was not measured."""


def _read_final_loss(result: Result) -> float:
    return compute_final_loss(result["losses"])


def _read_held_out_loss(result: Result) -> float | None:
    return result.get("held_out")


_METRICS = (
    _Metric(key="loss", difference_key="delta", read=_read_final_loss),
    _Metric(key="held_out", difference_key="held_out_delta", read=_read_held_out_loss),
)

NO_EFFECT = "no effect: every loss is equal"
"""Verdict for a variant with the losses of the reference in every iteration and for all seeds."""
_MIN_EQUAL_LOSSES = 3
"""Fewer equal losses do not show that a variant has no effect. KHA starts as the identity, so that
the first losses of a trial can be equal to those of the reference."""


def build_report(
    comparison: Comparison,
    results: Results,
    *,
    failures: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the report as a JSON-serializable dictionary.

    It can be built before all trials have finished, but needs at least one result.

    Args:
        failures: Maps names of trials to error messages, if any.
        command: Command line to show in the report.
    """
    failures = failures or {}
    reference = comparison.variants[0].name
    trial_entries = []
    for trial in comparison.trials:
        entry = _describe_trial(trial, reference, results, failures)
        trial_entries.append(entry)
    floors = _estimate_floors(trial_entries)
    variant_entries = []
    for variant in comparison.variants:
        entry = {"name": variant.name, "knocks": str(variant.kha)}
        entry |= _describe_variant(variant.name, reference, results, trial_entries, floors)
        variant_entries.append(entry)
    devices = {result["device"] for result in results.values()}
    return {
        "recipe": comparison.recipe.name,
        "description": comparison.recipe.description,
        "note": comparison.recipe.note,
        "reference": reference,
        "seeds": list(comparison.seeds),
        "iterations": comparison.trials[0].iterations,
        "floor": floors,
        "finished": len(results),
        "planned": len(comparison.trials),
        "variants": variant_entries,
        "runs": trial_entries,
        "devices": sorted(devices),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": _installed_versions(),
    }


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        version = version_of(package)
        if version:
            versions[package] = version
    return versions


def _describe_trial(
    trial: Trial,
    reference: str,
    results: Results,
    failures: Mapping[str, str],
) -> Entry:
    entry: Entry = {"variant": trial.variant.name, "seed": trial.seed}
    result = results.get((trial.variant.name, trial.seed))
    if result is None:
        entry["state"] = failures.get(trial.name, "not trained yet")
        return entry
    reference_result = None
    if trial.variant.name != reference:
        reference_result = results.get((reference, trial.seed))
    return entry | _describe_result(result, reference_result)


def _describe_result(result: Result, reference_result: Result | None) -> Entry:
    entry: Entry = {}
    for metric in _METRICS:
        loss = metric.read(result)
        reference_loss = None
        if reference_result is not None:
            reference_loss = metric.read(reference_result)
        entry[metric.key] = loss
        entry[metric.difference_key] = _subtract(loss, reference_loss)
    entry["first_loss"] = result["losses"][0]
    entry["state"] = "finished"
    missing = result["losses"].count(None)
    if missing:
        entry["state"] += f", {missing} losses missing"
    entry["spikes"] = [asdict(spike) for spike in _find_spikes(result)]
    entry["seconds_per_step"] = result["seconds_per_step"]
    entry["starts"] = result["starts"]
    return entry


def _estimate_floors(trial_entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """Return the noise of each metric, which is measured by the null trials (if any)."""
    floors = {}
    for metric in _METRICS:
        null_differences = _collect_numbers(trial_entries, NULL, metric.difference_key)
        if null_differences:
            floors[metric.key] = estimate_noise(null_differences)
    return floors


def _subtract(loss: float | None, reference_loss: float | None) -> float | None:
    if loss is None or reference_loss is None:
        return None
    return loss - reference_loss


def _collect_numbers(
    trial_entries: Sequence[Entry],
    variant: str,
    key: str,
) -> list[float]:
    """Return a number of all trials of a variant that have it."""
    numbers = []
    for entry in trial_entries:
        if entry["variant"] != variant:
            continue
        number = entry.get(key)
        if number is not None:
            numbers.append(number)
    return numbers


def _describe_variant(
    name: str,
    reference: str,
    results: Results,
    trial_entries: Sequence[Entry],
    floors: Mapping[str, Mapping[str, float]],
) -> Entry:
    finished = []
    for (variant, _seed), result in sorted(results.items()):
        if variant == name:
            finished.append(result)
    entry: Entry = {"seeds": len(finished)}
    if not finished:
        return entry
    entry |= _describe_spikes(finished)
    entry |= _describe_speed(finished)
    entry["curve"] = _average_curves([result["losses"] for result in finished])
    first_result = finished[0]
    entry["cost"] = first_result["cost"]
    entry["matrices"] = first_result["matrices"]
    entry["matrices_of"] = f"{name}-seed{first_result['seed']}"
    differences = []
    if name != reference:
        differences = _differences_from(reference, finished, results)
    if differences:
        entry["delta_curve"] = _average_curves(differences)
    has_no_effect = name != NULL and _have_no_effect(differences)
    for metric in _METRICS:
        losses = _collect_numbers(trial_entries, name, metric.key)
        if losses:
            entry[metric.key] = asdict(estimate(losses))
        deltas = _collect_numbers(trial_entries, name, metric.difference_key)
        if deltas:
            delta = estimate(deltas)
            verdict = find_verdict(name, delta, floors.get(metric.key))
            if has_no_effect:
                verdict = NO_EFFECT
            entry[metric.difference_key] = asdict(delta) | {"verdict": verdict}
    return entry


def _describe_spikes(finished: Sequence[Result]) -> Entry:
    heights = []
    for result in finished:
        for spike in _find_spikes(result):
            heights.append(spike.height)
    return {
        "spikes_per_run": len(heights) / len(finished),
        "highest_spike": max(heights, default=None),
    }


def _describe_speed(finished: Sequence[Result]) -> Entry:
    times = []
    for result in finished:
        if result["seconds_per_step"]:
            times.append(result["seconds_per_step"])
    if not times:
        return {"seconds_per_step": None, "seconds_range": None}
    return {
        "seconds_per_step": median(times),
        "seconds_range": [min(times), max(times)],
    }


def _differences_from(
    reference: str,
    finished: Sequence[Result],
    results: Results,
) -> list[list[float | None]]:
    """Subtract the losses of the reference, for all seeds with which it has been trained."""
    histories = []
    for result in finished:
        reference_result = results.get((reference, result["seed"]))
        if reference_result is None:
            continue
        reference_losses = reference_result["losses"]
        differences = []
        for loss, reference_loss in zip(result["losses"], reference_losses, strict=True):
            differences.append(_subtract(loss, reference_loss))
        histories.append(differences)
    return histories


def _have_no_effect(histories: Sequence[Losses]) -> bool:
    """Return True if all losses of all seeds are equal to those of the reference.

    Args:
        histories: Differences from the losses of the reference, by seed.
    """
    for differences in histories:
        known = [difference for difference in differences if difference is not None]
        if len(known) < _MIN_EQUAL_LOSSES or any(known):
            return False
    return bool(histories)


def _find_spikes(result: Result) -> list[Spike]:
    history = []
    for iteration, loss in enumerate(result["losses"], 1):
        if loss is not None:
            history.append((iteration, loss))
    return find_spikes(history)


def find_verdict(name: str, delta: Estimate, floor: Mapping[str, float] | None) -> str:
    """Return what a difference from the reference shows.

    Args:
        name: Name of the variant.
        delta: Mean difference over seeds.
        floor: Noise of this metric from :func:`estimate_noise`, if there are null trials.
    """
    if name == NULL:
        return "the floor"
    if delta.half_width is None:
        return "one seed: no interval"
    if delta.sign == 0:
        return "no difference shown"
    if floor and abs(delta.mean) <= floor["rms"]:
        return "below the floor"
    return "higher" if delta.sign > 0 else "lower"


def _average_curves(histories: Sequence[Losses]) -> list[list[float | None]]:
    """Average over seeds. Returns a list of ``[iteration, mean, half_width]``."""
    binned_histories = [average_bins(history) for history in histories]
    curve: list[list[float | None]] = []
    for bins in zip(*binned_histories, strict=True):
        known = [loss_bin.loss for loss_bin in bins if loss_bin.loss is not None]
        if known:
            average = estimate(known)
            curve.append([bins[0].iteration, average.mean, average.half_width])
    return curve
