"""Write ``benchmarks/reproduction.*`` from directories of ``kha-megatron compare ... -- --lr X``.

    python tools/reproduction.py compare/moe-4e-3 compare/moe-8e-3 compare/dense-4e-3

Adds the runs to ``reproduction.json``. Then writes two tables per recipe between the two marks of
``reproduction.md``: the held-out loss at each learning rate, and the differences from the baseline
with each variant at its best rate (``--picture`` also draws it in ``reproduction.png``).
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from measuring import ROOT, markdown_table

from kha_megatron.checkpoint.staging import staged_file, write_json
from kha_megatron.compare.page import format_estimate
from kha_megatron.compare.report import find_verdict
from kha_megatron.compare.statistics import Estimate, estimate, estimate_noise
from kha_megatron.compare.variants import NULL

PAGE = ROOT / "benchmarks" / "reproduction.md"
BEGIN = "<!-- tables: begin -->\n"
END = "<!-- tables: end -->\n"
VARIANTS = ("baseline", "kha_mlp", "kha_linear", "gate_output", "moh_75", "mea", "mea_no_norm")
TITLES = {"laptop/dense": "Dense model", "laptop/moe": "Mixture of experts"}
RESULT_KEYS = ("recipe", "iterations", "devices", "written", "versions")
RUN_KEYS = ("variant", "seed", "seconds_per_step", "loss", "held_out")
_COLOUR = "#0b62c4"

Losses = dict[str, dict[int, float]]
"""Held-out losses by variant and seed."""
Floor = Mapping[str, float] | None


@dataclass(frozen=True)
class Variant:
    """A variant at its best learning rate, and its difference from the baseline."""

    name: str
    rate: str
    losses: dict[int, float]
    delta: Estimate | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """The variants of one recipe and the noise floor of their differences."""

    variants: list[Variant]
    floor: Floor


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("comparisons", nargs="*", metavar="DIRECTORY")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    file = options.page.with_suffix(".json")
    results = json.loads(file.read_text())
    for folder in options.comparisons:
        _add(results, json.loads(Path(folder, "report.json").read_text()))
    write_json(file, results)
    before, _, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    tables = ""
    comparisons = {}
    for recipe, title in TITLES.items():
        rates = _rates(results, recipe)
        comparison = _compare(rates)
        comparisons[title] = comparison
        tables += f"### {title}\n\n{_sweep(rates)}\n\n{_differences(comparison)}\n\n"
    if options.picture:
        with staged_file(options.page.with_suffix(".png")) as staged:
            _draw(comparisons, staged)
    with staged_file(options.page) as staged:
        staged.write_text(before + BEGIN + tables + END + after, encoding="utf-8")


def _add(results: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Add the runs of a report, without their curves."""
    command = report["command"]
    rate = command[command.index("--lr") + 1]
    runs = _find_result(results, report, rate)["runs"]
    known = {(run["variant"], run["seed"]) for run in runs}
    for run in report["runs"]:
        if "loss" in run and (run["variant"], run["seed"]) not in known:
            runs.append({key: run[key] for key in RUN_KEYS})


def _find_result(
    results: dict[str, Any],
    report: Mapping[str, Any],
    rate: str,
) -> dict[str, Any]:
    """Return the result for the recipe and the learning rate of a report. Add it if missing."""
    for result in results.values():
        if result["recipe"] == report["recipe"] and result.get("lr") == rate:
            return result
    result = {"lr": rate, "runs": []}
    for key in RESULT_KEYS:
        result[key] = report[key]
    return results.setdefault(f"{report['recipe']} at {rate}", result)


def _rates(results: Mapping[str, Any], recipe: str) -> dict[str, Losses]:
    """Return the losses of a recipe by learning rate, lowest rate first."""
    rates: dict[str, Losses] = {}
    for result in results.values():
        if result["recipe"] != recipe or "lr" not in result:
            continue
        losses = rates.setdefault(result["lr"], {})
        for run in result["runs"]:
            losses.setdefault(run["variant"], {})[run["seed"]] = run["held_out"]
    return dict(sorted(rates.items(), key=lambda item: float(item[0])))


def _sweep(rates: Mapping[str, Losses]) -> str:
    rows = []
    for name in VARIANTS:
        row = [name]
        for losses in rates.values():
            loss = losses.get(name, {}).get(1)
            row.append("not measured" if loss is None else f"{loss:.3f}")
        rows.append(row)
    return markdown_table(["held out, seed 1", *rates], rows)


def _best_rate(rates: Mapping[str, Losses], name: str) -> str | None:
    """Return the rate with the lowest mean among those with the most seeds.

    Returns:
        The rate, or None if the variant was not trained.
    """
    trained = {rate: losses[name] for rate, losses in rates.items() if name in losses}
    if not trained:
        return None
    most_seeds = max(len(losses) for losses in trained.values())
    means = {}
    for rate, losses in trained.items():
        if len(losses) == most_seeds:
            means[rate] = fmean(losses.values())
    return min(means, key=means.__getitem__)


def _compare(rates: Mapping[str, Losses]) -> Comparison:
    """Compare variants at their best rates with the baseline at its best rate, seed by seed."""
    best_rates = {}
    for name in VARIANTS:
        rate = _best_rate(rates, name)
        if rate is not None:
            best_rates[name] = rate
    reference = rates[best_rates["baseline"]]["baseline"]
    variants = []
    floor = None
    for name, rate in {NULL: best_rates["baseline"], **best_rates}.items():
        losses = rates[rate].get(name, {})
        differences = []
        for seed, loss in losses.items():
            if seed in reference:
                differences.append(loss - reference[seed])
        if name == NULL and differences:
            floor = estimate_noise(differences)
        delta = None
        verdict = "–"
        if differences and name != "baseline":
            delta = estimate(differences)
            verdict = find_verdict(name, delta, floor)
        variants.append(Variant(name, rate, losses, delta, verdict))
    return Comparison(variants, floor)


def _differences(comparison: Comparison) -> str:
    text = ""
    rows = []
    floor = comparison.floor
    if floor:
        text = f"The noise floor is {floor['rms']:.2g} (largest {floor['largest']:.2g}).\n\n"
    for variant in comparison.variants:
        mean = "not measured"
        if variant.losses:
            mean = f"{fmean(variant.losses.values()):.3f}"
        delta = asdict(variant.delta) if variant.delta else None
        rows.append(
            [
                variant.name,
                variant.rate,
                str(len(variant.losses)),
                mean,
                format_estimate(delta, 4, "+").replace("-", "−"),
                variant.verdict,
            ]
        )
    return text + markdown_table(["variant", "rate", "seeds", "held out", "ΔL", "verdict"], rows)


def _draw(comparisons: Mapping[str, Comparison], file: Path) -> None:
    """Draw one panel per recipe: means with their intervals, and the floor as a band."""
    heights = [len(comparison.variants) - 1 for comparison in comparisons.values()]
    count = len(heights)
    height = 0.8 + 0.3 * sum(heights) + 0.55 * count
    figure = Figure(figsize=(7, height), layout="constrained")
    panels = figure.subplots(
        count,
        1,
        squeeze=False,
        height_ratios=heights,
        sharex=True,
    )
    for axis, title in zip(panels[:, 0], comparisons, strict=True):
        _draw_panel(axis, title, comparisons[title])
    lowest = panels[-1, 0]
    lowest.set_xlabel("ΔL held out in nats per token (95 % intervals; band: the floor)")
    figure.savefig(file, format="png", dpi=150)


def _draw_panel(axis: Any, title: str, comparison: Comparison) -> None:
    variants = [v for v in comparison.variants if v.name != "baseline"]
    for y, variant in enumerate(variants):
        delta = variant.delta
        if delta:
            axis.errorbar(
                delta.mean,
                y,
                xerr=delta.half_width or 0,
                fmt="o",
                markersize=4,
                capsize=3,
                color=_COLOUR,
            )
    floor = comparison.floor
    if floor:
        axis.axvspan(-floor["rms"], floor["rms"], color=_COLOUR, alpha=0.12, lw=0)
    axis.axvline(0, color="#1c1e21", linewidth=1)
    axis.set_yticks(range(len(variants)), [f"{v.name} at {v.rate}" for v in variants])
    axis.set_ylim(len(variants) - 0.5, -0.5)
    seeds = max(len(v.losses) for v in variants)
    axis.set_title(f"{title}: difference from the baseline, {seeds} seeds", fontsize=10)
    axis.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main()
