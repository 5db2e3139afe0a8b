"""Aggregate the results of all runs into ``report.json``."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from kha_megatron.compare.runs import Comparison
from kha_megatron.compare.spikes import Spike, find_spikes
from kha_megatron.compare.statistics import (
    Estimate,
    Losses,
    NoiseFloor,
    average_bins,
    compute_final_loss,
    estimate,
)
from kha_megatron.compare.variants import NULL
from kha_megatron.mcore.compat import version_of

_PACKAGES = ("kha-megatron", "megatron-core", "torch", "transformer-engine", "nemo-run")

_METRICS = {
    "loss": ("delta", lambda result: compute_final_loss(result["losses"])),
    "held_out": ("held_out_delta", lambda result: result.get("held_out")),
}
"""Maps a metric to the key for its difference from the reference, and a function to read it."""


@dataclass(frozen=True)
class _Results:
    by_run: Mapping[tuple[str, int], dict[str, Any]]
    reference: str
    seeds: Sequence[int]

    def pairs(
        self, name: str, seeds: Sequence[int] | None = None
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Get (variant, reference) pairs of results. Skips seeds that aren't finished for both."""
        found = [
            (self.by_run.get((name, s)), self.by_run.get((self.reference, s)))
            for s in seeds or self.seeds
        ]
        return [(own, base) for own, base in found if name != self.reference and own and base]

    def differences(self, key: str, name: str, seeds: Sequence[int] | None = None) -> list[float]:
        """Subtract the reference from a variant, seed by seed."""
        read = _METRICS[key][1]
        values = [(read(own), read(base)) for own, base in self.pairs(name, seeds)]
        return [own - base for own, base in values if own is not None and base is not None]


def build_report(
    comparison: Comparison,
    results: Mapping[tuple[str, int], dict[str, Any]],
    *,
    failures: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the report as a JSON-serializable dictionary.

    It can be built before all runs have finished, but needs at least one result.

    Args:
        results: Maps (variant, seed) to the content of ``result.json``.
        failures: Maps run names to error messages, if any.
        command: Command line to show in the report.
    """
    found = _Results(results, comparison.variants[0].name, comparison.seeds)
    null = {key: found.differences(key, NULL) for key in _METRICS}
    floors = {key: NoiseFloor.estimate(values) for key, values in null.items() if values}
    runs = []
    for run in comparison.runs:
        entry = {"variant": run.variant.name, "seed": run.seed}
        if result := results.get((run.variant.name, run.seed)):
            entry |= _finished_run(run.variant.name, result, found)
        else:
            entry["state"] = (failures or {}).get(run.name, "not trained yet")
        runs.append(entry)
    versions = {package: number for package in _PACKAGES if (number := version_of(package))}
    return {
        "recipe": comparison.recipe.name,
        "description": comparison.recipe.description,
        "note": comparison.recipe.note,
        "reference": found.reference,
        "seeds": list(comparison.seeds),
        "iterations": comparison.runs[0].iterations,
        "floor": {key: asdict(floor) for key, floor in floors.items()},
        "finished": len(results),
        "planned": len(comparison.runs),
        "variants": [
            {"name": variant.name, "knocks": str(variant.kha)}
            | _variant(variant.name, found, floors)
            for variant in comparison.variants
        ],
        "runs": runs,
        "devices": sorted({result["device"] for result in results.values()}),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"python": platform.python_version()} | versions,
    }


def _finished_run(name: str, result: dict[str, Any], found: _Results) -> dict[str, Any]:
    numbers: dict[str, float | None] = {}
    for key, (difference, read) in _METRICS.items():
        own = found.differences(key, name, [result["seed"]])
        numbers |= {key: read(result), difference: own[0] if own else None}
    lost = result["losses"].count(None)
    return numbers | {
        "state": f"finished, {lost} losses missing" if lost else "finished",
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _variant(name: str, found: _Results, floors: Mapping[str, NoiseFloor]) -> dict[str, Any]:
    own = [found.by_run[name, seed] for seed in found.seeds if (name, seed) in found.by_run]
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
    for key, (difference, read) in _METRICS.items():
        if known := [value for result in own if (value := read(result)) is not None]:
            entry[key] = asdict(estimate(known))
        if differences := found.differences(key, name):
            delta = estimate(differences)
            entry[difference] = asdict(delta) | {"verdict": _verdict(name, delta, floors.get(key))}
    if pairs := found.pairs(name):
        histories = [
            [
                None if a is None or b is None else a - b
                for a, b in zip(mine["losses"], base["losses"], strict=True)
            ]
            for mine, base in pairs
        ]
        entry["delta_curve"] = _curve([average_bins(history) for history in histories])
    return entry


def _spikes(losses: Losses) -> list[Spike]:
    return find_spikes((i, loss) for i, loss in enumerate(losses, 1) if loss is not None)


def _verdict(name: str, delta: Estimate, floor: NoiseFloor | None) -> str:
    if name == NULL:
        return "the floor"
    if delta.half_width is None:
        return "one seed: no interval"
    if delta.sign and floor and abs(delta.mean) <= floor.rms:
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
