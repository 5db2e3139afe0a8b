"""What the finished runs say together, as plain data: what ``report.json`` holds."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from kha_megatron.compare.runs import Comparison
from kha_megatron.compare.statistics import Estimate, Losses, binned, estimate, final_loss, paired
from kha_megatron.history.spikes import Spike, find_spikes
from kha_megatron.versions import version_of

_PACKAGES = ("kha-megatron", "megatron-core", "torch", "transformer-engine", "nemo-run")

Results = Mapping[tuple[str, int], dict[str, Any]]
"""``result.json`` of the finished runs by variant and seed."""


def summarise(
    comparison: Comparison,
    results: Results,
    *,
    failures: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """All numbers of the report. A variant is paired with the reference over the seeds both have.

    Args:
        results: at least one.
        failures: why runs did not finish, by their names.
        command: the words that repeat the comparison.
    """
    reference = comparison.variants[0].name
    failures = failures or {}
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
        "reference": reference,
        "seeds": list(comparison.seeds),
        "iterations": comparison.runs[0].iterations,
        "finished": len(results),
        "planned": len(comparison.runs),
        "variants": [
            _variant(variant.name, str(variant.kha), reference, comparison.seeds, results)
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
    loss, base = final_loss(result["losses"]), results.get((reference, seed))
    lost = result["losses"].count(None)
    return entry | {
        "state": f"finished; {lost} losses were lost" if lost else "finished",
        "loss": loss,
        "delta": loss - final_loss(base["losses"]) if base and variant != reference else None,
        "spikes": [asdict(spike) for spike in _spikes(result["losses"])],
        "seconds_per_step": result["seconds_per_step"],
        "starts": result["starts"],
    }


def _variant(
    name: str, knocks: str, reference: str, seeds: Sequence[int], results: Results
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
        "loss": asdict(estimate([final_loss(history) for history in losses])),
        "curve": _curve([binned(history) for history in losses]),
        "spikes_per_run": fmean(map(len, spikes)),
        "highest_spike": max((s.height for run in spikes for s in run), default=None),
        "seconds_per_step": median(times) if times else None,
        "cost": own[0]["cost"],
        "matrices": own[0]["matrices"],
        "matrices_of": f"{name}-seed{own[0]['seed']}",
    }
    both = [s for s in seeds if (name, s) in results and (reference, s) in results]
    if name == reference or not both:
        return entry
    mine, base = ([results[variant, s]["losses"] for s in both] for variant in (name, reference))
    delta = paired(list(map(final_loss, mine)), list(map(final_loss, base)))
    differences = [
        [
            (x, None if a is None or b is None else a - b)
            for (x, a), (_, b) in zip(binned(one), binned(two), strict=True)
        ]
        for one, two in zip(mine, base, strict=True)
    ]
    entry["delta"] = asdict(delta) | {"verdict": _verdict(delta)}
    entry["delta_curve"] = _curve(differences)
    return entry


def _spikes(losses: Losses) -> list[Spike]:
    return find_spikes((i, loss) for i, loss in enumerate(losses, 1) if loss is not None)


def _verdict(delta: Estimate) -> str:
    if delta.half_width is None:
        return "one seed: no interval"
    return {-1: "lower", 0: "no difference shown", 1: "higher"}[delta.side]


def _curve(histories: Sequence[Sequence[tuple[float, float | None]]]) -> list[list[float | None]]:
    """Iteration, mean over the seeds and half width, bin by bin; none where no seed has a loss."""
    bins = zip(*histories, strict=True)
    known = ((points[0][0], [y for _, y in points if y is not None]) for points in bins)
    found = ((x, estimate(values)) for x, values in known if values)
    return [[x, e.mean, e.half_width] for x, e in found]


def _versions() -> dict[str, str]:
    return {package: found for package in _PACKAGES if (found := version_of(package))}
