"""What the finished runs say together, as plain data: what ``report.json`` holds."""

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
    paired,
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
"""What runs are compared by, the name of its difference, and how a result has it, if it does."""


def summarise(
    comparison: Comparison,
    results: Results,
    *,
    failures: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """All numbers of the report. A variant is paired with the reference over the seeds both have.

    ``floor`` is how far the null runs moved from the reference, in training loss (``loss``) and in
    held-out loss (``held_out``), where there are any; a mean difference that is no larger shows
    nothing.

    Args:
        results: at least one.
        failures: why runs did not finish, by their names.
        command: the words that repeat the comparison.
    """
    reference = comparison.variants[0].name
    failures = failures or {}
    floors = _floors(reference, comparison.seeds, results)
    runs = [
        _run(
            run.variant.name,
            run.seed,
            results.get((run.variant.name, run.seed)),
            reference,
            results,
            failures.get(run.name),
        )
        for run in comparison.runs
    ]
    return {
        "recipe": comparison.recipe.name,
        "description": comparison.recipe.description,
        "note": comparison.recipe.note,
        "reference": reference,
        "seeds": list(comparison.seeds),
        "iterations": comparison.runs[0].iterations,
        "floor": {key: asdict(found) for key, found in floors.items()},
        "finished": len(results),
        "planned": len(comparison.runs),
        "variants": [
            _variant(variant.name, str(variant.kha), reference, comparison.seeds, results, floors)
            for variant in comparison.variants
        ],
        "runs": runs,
        "devices": sorted({result["device"] for result in results.values()}),
        "command": list(command),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _run(
    variant: str,
    seed: int,
    result: dict[str, Any] | None,
    reference: str,
    results: Results,
    failure: str | None,
) -> dict[str, Any]:
    entry = {"variant": variant, "seed": seed, "state": failure or "not trained yet"}
    if result is None:
        return entry
    numbers: dict[str, float | None] = {}
    for key, (difference, value_of) in _JUDGED.items():
        numbers[key] = value_of(result)
        both = _pairs(key, variant, reference, [seed], results)
        numbers[difference] = both[0][0] - both[0][1] if both else None
    lost = result["losses"].count(None)
    return entry | {
        "state": f"finished; {lost} losses were lost" if lost else "finished",
        **numbers,
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _pairs(
    key: str, name: str, reference: str, seeds: Sequence[int], results: Results
) -> list[tuple[float, float]]:
    """A number of the variant's runs and of the reference's, over the seeds for which both have it.

    None of the reference with itself.
    """
    value_of = _JUDGED[key][1]
    pairs = [
        (value_of(results[name, seed]), value_of(results[reference, seed]))
        for seed in seeds
        if name != reference and (name, seed) in results and (reference, seed) in results
    ]
    return [(mine, base) for mine, base in pairs if mine is not None and base is not None]


def _floors(reference: str, seeds: Sequence[int], results: Results) -> dict[str, Floor]:
    found = {key: _pairs(key, NULL, reference, seeds, results) for key in _JUDGED}
    return {key: floor(*zip(*pairs, strict=True)) for key, pairs in found.items() if pairs}


def _variant(
    name: str,
    knocks: str,
    reference: str,
    seeds: Sequence[int],
    results: Results,
    floors: Mapping[str, Floor],
) -> dict[str, Any]:
    """One row of every table, and its two curves; without a finished run only its name."""
    own = [results[name, seed] for seed in seeds if (name, seed) in results]
    entry: dict[str, Any] = {"name": name, "knocks": knocks, "seeds": len(own)}
    if not own:
        return entry
    losses = [result["losses"] for result in own]
    times = [result["seconds_per_step"] for result in own if result["seconds_per_step"]]
    spikes = [_spikes(history) for history in losses]
    entry |= {
        "curve": _curve([binned(history) for history in losses]),
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
        if pairs := _pairs(key, name, reference, seeds, results):
            delta = paired(*zip(*pairs, strict=True))
            entry[difference] = asdict(delta) | {"verdict": _verdict(name, delta, floors.get(key))}
    if "delta" not in entry:
        return entry
    both = [s for s in seeds if (name, s) in results and (reference, s) in results]
    mine, base = ([results[variant, s]["losses"] for s in both] for variant in (name, reference))
    differences = [
        [
            (x, None if a is None or b is None else a - b)
            for (x, a), (_, b) in zip(binned(one), binned(two), strict=True)
        ]
        for one, two in zip(mine, base, strict=True)
    ]
    entry["delta_curve"] = _curve(differences)
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
    """Iteration, mean over the seeds and half width, bin by bin; none where no seed has a loss."""
    bins = zip(*histories, strict=True)
    known = ((points[0][0], [y for _, y in points if y is not None]) for points in bins)
    found = ((x, estimate(values)) for x, values in known if values)
    return [[x, e.mean, e.half_width] for x, e in found]


def _versions() -> dict[str, str]:
    return {package: found for package in _PACKAGES if (found := version_of(package))}
