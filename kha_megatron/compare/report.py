"""Summarise the finished runs as plain data, which ``report.json`` holds."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from kha_megatron.compare.runs import Comparison
from kha_megatron.compare.spikes import Spike, find_spikes
from kha_megatron.compare.statistics import (
    Estimate,
    Floor,
    Losses,
    binned,
    estimate,
    final_loss,
    floor,
)
from kha_megatron.compare.variants import NULL
from kha_megatron.mcore.compat import version_of

_PACKAGES = ("kha-megatron", "megatron-core", "torch", "transformer-engine", "nemo-run")

Results = Mapping[tuple[str, int], dict[str, Any]]
"""``result.json`` of the finished runs by variant and seed."""

_JUDGED = {
    "loss": ("delta", lambda result: final_loss(result["losses"])),
    "held_out": ("held_out_delta", lambda result: result.get("held_out")),
}
"""By report key: the key of its difference, and how to read the value from a result."""


def summarise(
    comparison: Comparison,
    results: Results,
    *,
    failures: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the report. A variant is paired with the reference over the seeds that both have.

    ``floor`` says how far the null runs moved from the reference, in training loss (``loss``) and
    in held-out loss (``held_out``).

    Args:
        comparison: the planned runs.
        results: at least one.
        failures: why runs failed, by run name.
        command: command line that repeats the comparison.
    """
    seeds, reference = comparison.seeds, comparison.variants[0].name
    moved = {key: _differences(key, NULL, reference, seeds, results) for key in _JUDGED}
    floors = {key: floor(differences) for key, differences in moved.items() if differences}
    runs = []
    for run in comparison.runs:
        entry = {"variant": run.variant.name, "seed": run.seed}
        state = (failures or {}).get(run.name, "not trained yet")
        result = results.get((run.variant.name, run.seed))
        finished = _finished(run.variant.name, result, reference, results) if result else {}
        runs.append(entry | {"state": state} | finished)
    versions = {package: found for package in _PACKAGES if (found := version_of(package))}
    return {
        "recipe": comparison.recipe.name,
        "description": comparison.recipe.description,
        "note": comparison.recipe.note,
        "reference": reference,
        "seeds": list(seeds),
        "iterations": comparison.runs[0].iterations,
        "floor": {key: asdict(found) for key, found in floors.items()},
        "finished": len(results),
        "planned": len(comparison.runs),
        "variants": [
            _variant(variant.name, str(variant.kha), reference, seeds, results, floors)
            for variant in comparison.variants
        ],
        "runs": runs,
        "devices": sorted({result["device"] for result in results.values()}),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"python": platform.python_version()} | versions,
    }


def _finished(
    variant: str, result: dict[str, Any], reference: str, results: Results
) -> dict[str, Any]:
    """Return the report's entries of one finished run."""
    numbers: dict[str, float | None] = {}
    for key, (difference, value_of) in _JUDGED.items():
        own = _differences(key, variant, reference, [result["seed"]], results)
        numbers |= {key: value_of(result), difference: own[0] if own else None}
    lost = result["losses"].count(None)
    return numbers | {
        "state": f"finished; {lost} losses were lost" if lost else "finished",
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _differences(
    key: str, name: str, reference: str, seeds: Sequence[int], results: Results
) -> list[float]:
    """Return variant minus reference for each seed for which both values are known.

    Empty for the reference itself.
    """
    value_of = _JUDGED[key][1]
    pairs = [
        (value_of(results[name, seed]), value_of(results[reference, seed]))
        for seed in seeds
        if name != reference and (name, seed) in results and (reference, seed) in results
    ]
    return [mine - base for mine, base in pairs if mine is not None and base is not None]


def _variant(
    name: str,
    knocks: str,
    reference: str,
    seeds: Sequence[int],
    results: Results,
    floors: Mapping[str, Floor],
) -> dict[str, Any]:
    """Return a variant's table entries and curves; only its name if no run has finished."""
    own = [results[name, seed] for seed in seeds if (name, seed) in results]
    entry: dict[str, Any] = {"name": name, "knocks": knocks, "seeds": len(own)}
    if not own:
        return entry
    times = [result["seconds_per_step"] for result in own if result["seconds_per_step"]]
    spikes = [_spikes(result["losses"]) for result in own]
    entry |= {
        "curve": _curve([binned(result["losses"]) for result in own]),
        "spikes_per_run": fmean(map(len, spikes)),
        "highest_spike": max((s.height for run in spikes for s in run), default=None),
        "seconds_per_step": median(times) if times else None,
        "cost": own[0]["cost"],
        "matrices": own[0]["matrices"],
        "matrices_of": f"{name}-seed{own[0]['seed']}",
    }
    for key, (difference, value_of) in _JUDGED.items():
        known = [value for result in own if (value := value_of(result)) is not None]
        if known:
            entry[key] = asdict(estimate(known))
        if differences := _differences(key, name, reference, seeds, results):
            delta = estimate(differences)
            entry[difference] = asdict(delta) | {"verdict": _verdict(name, delta, floors.get(key))}
    if "delta" in entry:
        both = [s for s in seeds if (name, s) in results and (reference, s) in results]
        histories = [
            [
                None if a is None or b is None else a - b
                for a, b in zip(
                    results[name, s]["losses"], results[reference, s]["losses"], strict=True
                )
            ]
            for s in both
        ]
        entry["delta_curve"] = _curve([binned(history) for history in histories])
    return entry


def _spikes(losses: Losses) -> list[Spike]:
    return find_spikes((i, loss) for i, loss in enumerate(losses, 1) if loss is not None)


def _verdict(name: str, delta: Estimate, floor: Floor | None) -> str:
    if name == NULL:
        return "the floor"
    if delta.half_width is None:
        return "one seed: no interval"
    if delta.side and floor and abs(delta.mean) <= floor.rms:
        return "below the floor"
    return {-1: "lower", 0: "no difference shown", 1: "higher"}[delta.side]


def _curve(histories: Sequence[Sequence[tuple[float, float | None]]]) -> list[list[float | None]]:
    """Return iteration, mean over seeds and half width of each bin that has a loss."""
    curve: list[list[float | None]] = []
    for points in zip(*histories, strict=True):
        if known := [y for _, y in points if y is not None]:
            found = estimate(known)
            curve.append([points[0][0], found.mean, found.half_width])
    return curve
