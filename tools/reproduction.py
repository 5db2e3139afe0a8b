"""Write ``benchmarks/reproduction.*`` from directories of ``kha-megatron compare ... -- --lr X``.

    python tools/reproduction.py compare/moe-4e-3 compare/moe-8e-3 compare/dense-4e-3

Adds the runs to ``reproduction.json``. Then writes two tables per recipe between the two marks of
``reproduction.md``: the held-out loss at each learning rate, and the differences from the baseline
with each variant at its best rate (``--picture`` also draws it in ``reproduction.png``).
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from measuring import ROOT, markdown_table

from kha_megatron.checkpoint.staging import staged_file, write_json
from kha_megatron.compare.page import format_estimate
from kha_megatron.compare.report import find_verdict
from kha_megatron.compare.statistics import estimate, estimate_noise
from kha_megatron.compare.variants import NULL

PAGE = ROOT / "benchmarks" / "reproduction.md"
BEGIN = "<!-- tables: begin -->\n"
END = "<!-- tables: end -->\n"
VARIANTS = ("baseline", "kha_mlp", "kha_linear", "gate_output", "moh_75", "mea", "mea_no_norm")
TITLES = {"laptop/dense": "Dense model", "laptop/moe": "Mixture of experts"}
_COLOUR = "#0b62c4"

Losses = dict[str, dict[int, float]]  # held out, by variant and seed
Floor = Mapping[str, float] | None


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("comparisons", nargs="*", metavar="DIRECTORY")
    parser.add_argument(
        "--page",
        type=Path,
        default=PAGE,
        help="default: %(default)s",
    )
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    file = options.page.with_suffix(".json")
    results = json.loads(file.read_text())
    for folder in options.comparisons:
        _add(results, json.loads(Path(folder, "report.json").read_text()))
    write_json(file, results)
    before, _, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
    tables = ""
    reports = {}
    for recipe, title in TITLES.items():
        rates = _rates(results, recipe)
        reports[title] = _compare(rates)
        tables += f"### {title}\n\n{_sweep(rates)}\n\n{_differences(*reports[title])}\n\n"
    if options.picture:
        with staged_file(options.page.with_suffix(".png")) as staged:
            _draw(reports, staged)
    with staged_file(options.page) as staged:
        staged.write_text(before + BEGIN + tables + END + rest.partition(END)[2], encoding="utf-8")


def _add(results: dict[str, Any], report: Mapping[str, Any]) -> None:
    """Add the runs of a report, without their curves."""
    rate = report["command"][report["command"].index("--lr") + 1]
    same = (t for t, r in results.items() if (r["recipe"], r.get("lr")) == (report["recipe"], rate))
    fields = "recipe", "iterations", "devices", "written", "versions"
    new = {"lr": rate, "runs": []} | {key: report[key] for key in fields}
    runs = results.setdefault(next(same, f"{report['recipe']} at {rate}"), new)["runs"]
    keys = "variant", "seed", "seconds_per_step", "loss", "held_out"
    known = {(run["variant"], run["seed"]) for run in runs}
    for run in report["runs"]:
        if "loss" in run and (run["variant"], run["seed"]) not in known:
            runs.append({key: run[key] for key in keys})


def _rates(results: Mapping[str, Any], recipe: str) -> dict[str, Losses]:
    rates: dict[str, Losses] = {}
    for result in results.values():
        if result["recipe"] == recipe and "lr" in result:
            for run in result["runs"]:
                losses = rates.setdefault(result["lr"], {}).setdefault(run["variant"], {})
                losses[run["seed"]] = run["held_out"]
    return dict(sorted(rates.items(), key=lambda item: float(item[0])))


def _sweep(rates: Mapping[str, Losses]) -> str:
    rows = []
    for name in VARIANTS:
        found = [losses.get(name, {}).get(1) for losses in rates.values()]
        rows.append([name, *("not measured" if x is None else f"{x:.3f}" for x in found)])
    return markdown_table(["held out, seed 1", *rates], rows)


def _compare(rates: Mapping[str, Losses]) -> tuple[list[dict[str, Any]], Floor]:
    """Compare variants at their best rates with the baseline at its best rate, seed by seed.

    The best rate has the lowest mean, among those with the most seeds.
    """
    best = {}
    for name in VARIANTS:
        if trained := {r: x[name].values() for r, x in rates.items() if name in x}:
            ranks = {r: (-len(losses), fmean(losses)) for r, losses in trained.items()}
            best[name] = min(ranks, key=ranks.__getitem__)
    reference = rates[best["baseline"]]["baseline"]
    variants = []
    floor = None
    for name, rate in {NULL: best["baseline"], **best}.items():
        losses = rates[rate].get(name, {})
        found = [loss - reference[seed] for seed, loss in losses.items() if seed in reference]
        if name == NULL and found:
            floor = estimate_noise(found)
        delta = estimate(found) if found and name != "baseline" else None
        verdict = find_verdict(name, delta, floor) if delta else "–"
        variants.append(
            {"name": name, "rate": rate, "losses": losses, "delta": delta, "is": verdict}
        )
    return variants, floor


def _differences(variants: list[dict[str, Any]], floor: Floor) -> str:
    text = ""
    rows = []
    if floor:
        text = f"The noise floor is {floor['rms']:.2g} (largest {floor['largest']:.2g}).\n\n"
    for v in variants:
        mean = f"{fmean(v['losses'].values()):.3f}" if v["losses"] else "not measured"
        delta = format_estimate(v["delta"] and asdict(v["delta"]), 4, "+").replace("-", "−")
        rows.append([v["name"], v["rate"], str(len(v["losses"])), mean, delta, v["is"]])
    return text + markdown_table(["variant", "rate", "seeds", "held out", "ΔL", "verdict"], rows)


def _draw(reports: Mapping[str, tuple[list[dict[str, Any]], Floor]], file: Path) -> None:
    """Draw one panel per recipe: means with their intervals, and the floor as a band."""
    rows = [len(variants) - 1 for variants, _ in reports.values()]
    figure = Figure(figsize=(7, 0.8 + 0.3 * sum(rows) + 0.55 * len(rows)), layout="constrained")
    panels = figure.subplots(
        len(rows),
        1,
        squeeze=False,
        height_ratios=rows,
        sharex=True,
    )[:, 0]
    for axis, (title, (variants, floor)) in zip(panels, reports.items(), strict=True):
        shown = [v for v in variants if v["name"] != "baseline"]
        for y, delta in enumerate(v["delta"] for v in shown):
            if delta:
                style = {
                    "fmt": "o",
                    "markersize": 4,
                    "capsize": 3,
                    "color": _COLOUR,
                }
                axis.errorbar(delta.mean, y, xerr=delta.half_width or 0, **style)
        if floor:
            axis.axvspan(
                -floor["rms"],
                floor["rms"],
                color=_COLOUR,
                alpha=0.12,
                lw=0,
            )
        axis.axvline(0, color="#1c1e21", linewidth=1)
        axis.set_yticks(range(len(shown)), [f"{v['name']} at {v['rate']}" for v in shown])
        axis.set_ylim(len(shown) - 0.5, -0.5)
        seeds = max(len(v["losses"]) for v in shown)
        axis.set_title(f"{title}: difference from the baseline, {seeds} seeds", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("ΔL held out in nats per token (95 % intervals; band: the floor)")
    figure.savefig(file, format="png", dpi=150)


if __name__ == "__main__":
    main()
