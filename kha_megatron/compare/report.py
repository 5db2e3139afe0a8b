"""Aggregate the results of all runs into ``report.json``."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from kha_megatron.compare.runs import Comparison, Trial
from kha_megatron.compare.spikes import Spike, find_spikes
from kha_megatron.compare.statistics import (
    Estimate,
    Losses,
    average_bins,
    compute_final_loss,
    estimate,
    estimate_noise,
)
from kha_megatron.compare.variants import NULL
from kha_megatron.mcore.compat import version_of

_PACKAGES = ("kha-megatron", "megatron-core", "torch", "transformer-engine", "nemo-run")

_METRICS = {
    "loss": ("delta", lambda result: compute_final_loss(result["losses"])),
    "held_out": ("held_out_delta", lambda result: result.get("held_out")),
}
"""Maps a metric to the key for its difference from the reference, and a function to read it."""

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

    It can be built before all runs have finished, but needs at least one result.

    Args:
        failures: Maps run names to error messages, if any.
        command: Command line to show in the report.
    """
    reference = comparison.variants[0].name
    runs = [_describe_run(run, results, reference, failures or {}) for run in comparison.runs]
    floors = {
        key: estimate_noise(values)
        for key, (difference, _) in _METRICS.items()
        if (values := _known(runs, NULL, difference))
    }
    versions = {package: number for package in _PACKAGES if (number := version_of(package))}
    return {
        "recipe": comparison.recipe.name,
        "description": comparison.recipe.description,
        "note": comparison.recipe.note,
        "reference": reference,
        "seeds": list(comparison.seeds),
        "iterations": comparison.runs[0].iterations,
        "floor": floors,
        "finished": len(results),
        "planned": len(comparison.runs),
        "variants": [
            {"name": variant.name, "knocks": str(variant.kha)}
            | _describe_variant(variant.name, results, reference, runs, floors)
            for variant in comparison.variants
        ],
        "runs": runs,
        "devices": sorted({result["device"] for result in results.values()}),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"python": platform.python_version()} | versions,
    }


def _describe_run(
    run: Trial, results: Results, reference: str, failures: Mapping[str, str]
) -> dict[str, Any]:
    name, seed = run.variant.name, run.seed
    entry: dict[str, Any] = {"variant": name, "seed": seed}
    if (result := results.get((name, seed))) is None:
        return entry | {"state": failures.get(run.name, "not trained yet")}
    base = None if name == reference else results.get((reference, seed))
    for key, (difference, read) in _METRICS.items():
        own, other = read(result), base and read(base)
        entry |= {key: own, difference: None if None in (own, other) else own - other}
    lost = result["losses"].count(None)
    return entry | {
        "state": f"finished, {lost} losses missing" if lost else "finished",
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _known(runs: Sequence[Mapping[str, Any]], name: str, key: str) -> list[float]:
    """Return a number of all runs of a variant that have it."""
    return [run[key] for run in runs if run["variant"] == name and run.get(key) is not None]


def _describe_variant(
    name: str,
    results: Results,
    reference: str,
    runs: Sequence[Mapping[str, Any]],
    floors: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    own = [result for (variant, _), result in sorted(results.items()) if variant == name]
    entry: dict[str, Any] = {"seeds": len(own)}
    if not own:
        return entry
    times = [result["seconds_per_step"] for result in own if result["seconds_per_step"]]
    spikes = [_spikes(result["losses"]) for result in own]
    entry |= {
        "curve": _curve([average_bins(result["losses"]) for result in own]),
        "spikes_per_run": fmean(map(len, spikes)),
        "highest_spike": max((s.height for run in spikes for s in run), default=None),
        "seconds_per_step": median(times) if times else None,
        "seconds_range": [min(times), max(times)] if times else None,
        "cost": own[0]["cost"],
        "matrices": own[0]["matrices"],
        "matrices_of": f"{name}-seed{own[0]['seed']}",
    }
    bases = [results.get((reference, result["seed"])) for result in own]
    histories = [
        [
            None if a is None or b is None else a - b
            for a, b in zip(result["losses"], base["losses"], strict=True)
        ]
        for result, base in zip(own, bases, strict=True)
        if base is not None and name != reference
    ]
    if histories:
        entry["delta_curve"] = _curve([average_bins(history) for history in histories])
    has_no_effect = histories and name != NULL and all(map(_is_zero, histories))
    for key, (difference, _) in _METRICS.items():
        if known := _known(runs, name, key):
            entry[key] = asdict(estimate(known))
        if differences := _known(runs, name, difference):
            delta = estimate(differences)
            verdict = find_verdict(name, delta, floors.get(key))
            entry[difference] = asdict(delta) | {"verdict": NO_EFFECT if has_no_effect else verdict}
    return entry


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
        if known := [y for _, y in points if y is not None]:
            found = estimate(known)
            curve.append([points[0][0], found.mean, found.half_width])
    return curve
