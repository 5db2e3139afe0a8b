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


@dataclass(frozen=True)
class _Metric:
    """A loss of each trial that the report compares between variants."""

    key: str
    difference_key: str
    """Key for the difference from the reference."""
    read: Callable[[Mapping[str, Any]], float | None]
    """Return the loss of a trial, given its ``result.json``."""


_METRICS = (
    _Metric("loss", "delta", lambda result: compute_final_loss(result["losses"])),
    _Metric("held_out", "held_out_delta", lambda result: result.get("held_out")),
)

NO_EFFECT = "no effect: every loss is equal"
"""Verdict for a variant with the losses of the reference in every iteration and for all seeds."""
_LEAST_EQUAL_LOSSES = 3

Results = Mapping[tuple[str, int], dict[str, Any]]
"""Maps (variant, seed) to the content of ``result.json``."""


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
    reference = comparison.variants[0].name
    trials = []
    for trial in comparison.trials:
        trials.append(_describe_trial(trial, results, reference, failures or {}))
    floors = {}
    for metric in _METRICS:
        if null_differences := _known(trials, NULL, metric.difference_key):
            floors[metric.key] = estimate_noise(null_differences)
    variants = []
    for variant in comparison.variants:
        entry = {"name": variant.name, "knocks": str(variant.kha)}
        variants.append(entry | _describe_variant(variant.name, results, reference, trials, floors))
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
        "variants": variants,
        "runs": trials,
        "devices": sorted({result["device"] for result in results.values()}),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": _installed_versions(),
    }


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        if version := version_of(package):
            versions[package] = version
    return versions


def _describe_trial(
    trial: Trial,
    results: Results,
    reference: str,
    failures: Mapping[str, str],
) -> dict[str, Any]:
    variant = trial.variant.name
    entry: dict[str, Any] = {"variant": variant, "seed": trial.seed}
    result = results.get((variant, trial.seed))
    if result is None:
        return entry | {"state": failures.get(trial.name, "not trained yet")}
    reference_result = None
    if variant != reference:
        reference_result = results.get((reference, trial.seed))
    for metric in _METRICS:
        loss = metric.read(result)
        reference_loss = metric.read(reference_result) if reference_result else None
        entry[metric.key] = loss
        entry[metric.difference_key] = _subtract(loss, reference_loss)
    missing = result["losses"].count(None)
    return entry | {
        "state": f"finished, {missing} losses missing" if missing else "finished",
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _subtract(loss: float | None, reference_loss: float | None) -> float | None:
    if loss is None or reference_loss is None:
        return None
    return loss - reference_loss


def _known(trials: Sequence[Mapping[str, Any]], name: str, key: str) -> list[float]:
    """Return a number of all trials of a variant that have it."""
    values = [trial.get(key) for trial in trials if trial["variant"] == name]
    return [value for value in values if value is not None]


def _describe_variant(
    name: str,
    results: Results,
    reference: str,
    trials: Sequence[Mapping[str, Any]],
    floors: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    finished = [result for (variant, _), result in sorted(results.items()) if variant == name]
    entry: dict[str, Any] = {"seeds": len(finished)}
    if not finished:
        return entry
    entry |= _describe_spikes(finished)
    entry |= _describe_speed(finished)
    entry["curve"] = _curve([average_bins(result["losses"]) for result in finished])
    first = finished[0]
    entry["cost"] = first["cost"]
    entry["matrices"] = first["matrices"]
    entry["matrices_of"] = f"{name}-seed{first['seed']}"
    histories = []
    if name != reference:
        histories = _differences_from(reference, finished, results)
    if histories:
        entry["delta_curve"] = _curve([average_bins(history) for history in histories])
    has_no_effect = bool(histories) and name != NULL and all(map(_is_zero, histories))
    for metric in _METRICS:
        if losses := _known(trials, name, metric.key):
            entry[metric.key] = asdict(estimate(losses))
        if differences := _known(trials, name, metric.difference_key):
            delta = estimate(differences)
            verdict = find_verdict(name, delta, floors.get(metric.key))
            if has_no_effect:
                verdict = NO_EFFECT
            entry[metric.difference_key] = asdict(delta) | {"verdict": verdict}
    return entry


def _describe_spikes(finished: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    heights = []
    for result in finished:
        heights += [spike.height for spike in _spikes(result["losses"])]
    return {
        "spikes_per_run": len(heights) / len(finished),
        "highest_spike": max(heights, default=None),
    }


def _describe_speed(finished: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = [result["seconds_per_step"] for result in finished if result["seconds_per_step"]]
    return {
        "seconds_per_step": median(times) if times else None,
        "seconds_range": [min(times), max(times)] if times else None,
    }


def _differences_from(
    reference: str,
    finished: Sequence[Mapping[str, Any]],
    results: Results,
) -> list[list[float | None]]:
    """Subtract the losses of the reference, for all seeds with which it has been trained."""
    histories = []
    for result in finished:
        reference_result = results.get((reference, result["seed"]))
        if reference_result is not None:
            pairs = zip(result["losses"], reference_result["losses"], strict=True)
            histories.append([_subtract(loss, reference_loss) for loss, reference_loss in pairs])
    return histories


def _is_zero(differences: Losses) -> bool:
    """Whether all losses equal those of the reference. The first ones may, at the identity."""
    known = [difference for difference in differences if difference is not None]
    return len(known) >= _LEAST_EQUAL_LOSSES and not any(known)


def _spikes(losses: Losses) -> list[Spike]:
    return find_spikes((i, loss) for i, loss in enumerate(losses, 1) if loss is not None)


def find_verdict(name: str, delta: Estimate, floor: Mapping[str, float] | None) -> str:
    if name == NULL:
        return "the floor"
    if delta.half_width is None:
        return "one seed: no interval"
    if delta.sign and floor and abs(delta.mean) <= floor["rms"]:
        return "below the floor"
    return {-1: "lower", 0: "no difference shown", 1: "higher"}[delta.sign]


def _curve(histories: Sequence[Sequence[tuple[float, float | None]]]) -> list[list[float | None]]:
    """Average over seeds. Returns a list of ``[iteration, mean, half_width]``."""
    curve: list[list[float | None]] = []
    for points in zip(*histories, strict=True):
        iteration, _ = points[0]
        known = [loss for _, loss in points if loss is not None]
        if known:
            average = estimate(known)
            curve.append([iteration, average.mean, average.half_width])
    return curve
