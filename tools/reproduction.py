"""Write ``benchmarks/reproduction.*`` from directories of ``kha-megatron compare``.

    python tools/reproduction.py "mixture of experts=compare/moe" "dense=compare/dense"

Writes the figures of the runs (``reproduction.json``), a plot of all differences with their
intervals (``reproduction.png``), and the tables of ``reproduction.md`` between its two marks.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kha_megatron.checkpoint.staging import staged_file, write_json

PAGE = Path(__file__).resolve().parents[1] / "benchmarks" / "reproduction.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
KINDS = {"training": ("loss", "delta"), "held out": ("held_out", "held_out_delta")}
_COLOURS = {"training": "#0b62c4", "held out": "#c24d00"}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparisons", nargs="+", metavar="TITLE=DIRECTORY")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--pictured", type=int, metavar="N", help="draw the first N (default: all)")
    options = parser.parse_args()
    pairs = [text.rpartition("=") for text in options.comparisons]
    reports = {
        title: json.loads(Path(folder, "report.json").read_text()) for title, _, folder in pairs
    }
    text = options.page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        parser.error(f"{options.page} does not hold {BEGIN.strip()} and {END.strip()} once each")
    before, _, rest = text.partition(BEGIN)
    tables = "\n".join(_table(title, report) for title, report in reports.items())
    write_json(options.page.with_suffix(".json"), {t: _numbers(r) for t, r in reports.items()})
    with staged_file(options.page.with_suffix(".png")) as staged:
        _picture(dict(list(reports.items())[: options.pictured]), staged)
    with staged_file(options.page) as staged:
        staged.write_text(before + BEGIN + tables + END + rest.partition(END)[2], encoding="utf-8")


def _numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report without curves and matrices."""
    losses = [key for pair in KINDS.values() for key in pair]
    kept = {"name", "knocks", "seeds", "variant", "seed", "seconds_per_step", *losses}
    left_out = {"variants", "runs", "description", "finished", "planned", "command"}

    def chosen(entries: Any) -> list[dict[str, Any]]:
        return [{key: e[key] for key in e if key in kept} for e in entries]

    return {
        **{key: value for key, value in report.items() if key not in left_out},
        "variants": chosen(report["variants"]),
        "runs": chosen(run for run in report["runs"] if "loss" in run),
    }


def _table(title: str, report: Mapping[str, Any]) -> str:
    floors = " and ".join(
        f"{floor['rms']:.2g} (largest {floor['largest']:.2g}) in {kind.replace(' ', '-')} loss"
        for kind, (key, _) in KINDS.items()
        if (floor := report["floor"].get(key))
    )
    noise = f" The noise floor is {floors}." if floors else ""
    lines = [
        f"### {title[0].upper()}{title[1:]}",
        "",
        f"We trained `{report['recipe']}` for {report['iterations']:,} iterations per run.{noise}",
        "",
        "| variant | seeds | loss | ΔL | verdict | held out | ΔL held out | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in report["variants"]:
        cells = [variant["name"], str(variant["seeds"])]
        for key, difference in KINDS.values():
            loss, delta = variant.get(key), variant.get(difference)
            cells.append(f"{loss['mean']:.3f}" if loss else "–")
            cells += [_interval(delta), delta["verdict"]] if delta else ["–", "reference"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _interval(delta: Mapping[str, Any]) -> str:
    half = "" if delta["half_width"] is None else f" ± {delta['half_width']:.4f}"
    return f"{delta['mean']:+.4f}{half}".replace("-", "−")


def _picture(reports: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw one panel per comparison: means with their intervals, and the floor as a band."""
    rows = [sum("delta" in v for v in report["variants"]) for report in reports.values()]
    figure = Figure(figsize=(7, 0.8 + 0.36 * sum(rows) + 0.55 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows, sharex=True)[:, 0]
    for axis, (title, report) in zip(panels, reports.items(), strict=True):
        shown = [variant for variant in report["variants"] if "delta" in variant]
        for i, (kind, (key, difference)) in enumerate(KINDS.items()):
            found = [(y, v[difference]) for y, v in enumerate(shown) if difference in v]
            axis.errorbar(
                [delta["mean"] for _, delta in found],
                [y + 0.16 * (2 * i - 1) for y, _ in found],
                xerr=[delta["half_width"] or 0 for _, delta in found],
                fmt="o",
                markersize=4,
                capsize=3,
                color=_COLOURS[kind],
                label=f"{kind} loss",
            )
            if floor := report["floor"].get(key):
                axis.axvspan(-floor["rms"], floor["rms"], color=_COLOURS[kind], alpha=0.12, lw=0)
        axis.axvline(0, color="#1c1e21", linewidth=1)
        axis.set_yticks(range(len(shown)), [variant["name"] for variant in shown])
        axis.set_ylim(len(shown) - 0.5, -0.5)
        seeds = max((variant["seeds"] for variant in shown), default=0)
        axis.set_title(
            f"{title}: difference from {report['reference']}, {seeds} seeds", fontsize=10
        )
        axis.grid(axis="x", alpha=0.3)
    panels[0].legend(fontsize=8)
    panels[-1].set_xlabel("ΔL in nats per token (95 % intervals; bands: the floor); left is better")
    figure.savefig(file, format="png", dpi=150)


if __name__ == "__main__":
    main()
