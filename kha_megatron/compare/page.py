"""The report as one HTML file that loads nothing: no script, no font, no picture from elsewhere.

The page's own policy forbids a browser to load anything. Every word that comes from a recipe, a
variant or a log is escaped.
"""

import base64
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kha_megatron.compare import statistics
from kha_megatron.compare.charts import Line, line_chart
from kha_megatron.history.spikes import Definition

_COLOURS = 8
_MINUS = "\N{MINUS SIGN}"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

Cell = str | tuple[str, str]
"""Plain text, or a class of the style sheet and plain text."""


def page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The whole document.

    Args:
        report: from :func:`kha_megatron.compare.report.summarise`.
        pictures: PNG files of the matrices by ``RUN/FILE``, as the report names them.
    """
    style = files("kha_megatron.compare").joinpath("page.css").read_text()
    title = f"{report['recipe']}: {' against '.join(_names(report))}"
    sections = [
        _head(report),
        _losses(report),
        _curves(report),
        _costs(report),
        _spikes(report),
        _matrices(report, pictures),
        _runs(report),
        _about(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _names(report: Mapping[str, Any]) -> list[str]:
    others = [v["name"] for v in report["variants"] if v["name"] != report["reference"]]
    return [", ".join(others), report["reference"]]


def _trained(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [variant for variant in report["variants"] if variant["seeds"]]


def _colour(report: Mapping[str, Any], name: str) -> int:
    return [v["name"] for v in report["variants"]].index(name) % _COLOURS


def _head(report: Mapping[str, Any]) -> str:
    others, reference = _names(report)
    seeds = len(report["seeds"])
    text = (
        f"<header><h1>{escape(others)} <small>against</small> {escape(reference)}</h1>"
        f"<p>Recipe <b>{escape(report['recipe'])}</b> ({escape(report['description'])}), "
        f"{report['iterations']:,} iterations, {seeds} seed{'s' * (seeds > 1)}. For one seed every "
        "variant saw the same data in the same order.</p>"
    )
    if report["finished"] < report["planned"]:
        text += (
            f'<p class="warning"><b>{report["finished"]} of {report["planned"]} runs have '
            "finished.</b> The same command goes on with the rest.</p>"
        )
    if seeds == 1:
        text += (
            '<p class="warning">One seed: the differences below have no interval, and may be '
            "chance.</p>"
        )
    return text + "</header>"


def _losses(report: Mapping[str, Any]) -> str:
    rows: list[Sequence[Cell]] = []
    for variant in _trained(report):
        delta = variant.get("delta")
        verdict = "reference" if _is_reference(report, variant) else "not paired yet"
        verdict = delta["verdict"] if delta else verdict
        rows.append(
            (
                variant["name"],
                _estimate(variant["loss"]),
                (verdict, _estimate(delta, signed=True)) if delta else "–",
                (verdict, verdict),
                str(variant["seeds"]),
                ("words", variant["knocks"]),
            )
        )
    share = _percent(statistics.LAST_SHARE, ".0")
    seeds = len(report["seeds"])
    factor = f", {statistics.t_quantile(seeds - 1):.3g} standard errors" if seeds > 1 else ""
    headings = ("Model", "Loss", "ΔL", "Verdict", "Seeds", ("words", "Knocks"))
    return (
        "<section><h2>Final loss</h2>"
        + _table("Final loss", headings, rows)
        + f'<p class="note">Loss: nats per token in training, mean of the last {share} of the '
        "iterations. ΔL: difference from the reference with the same seed; lower is better. ±: "
        f"half of the interval of 95 % confidence over seeds (Student’s t{factor}). “No difference "
        "shown” where the interval holds 0.</p></section>"
    )


def _is_reference(report: Mapping[str, Any], variant: Mapping[str, Any]) -> bool:
    return variant["name"] == report["reference"]


def _curves(report: Mapping[str, Any]) -> str:
    def lines(key: str) -> list[Line]:
        return [
            Line(v["name"], _colour(report, v["name"]), [tuple(p) for p in v[key]])
            for v in _trained(report)
            if v.get(key)
        ]

    legend = "".join(
        f'<li><span class="swatch c{_colour(report, v["name"])}"></span>{escape(v["name"])}</li>'
        for v in _trained(report)
    )
    charts = [
        (
            line_chart(lines("curve"), title="Training loss", identity="loss", y_label="loss"),
            "Training loss, mean over seeds; bands of 95 % confidence.",
        )
    ]
    if differences := lines("delta_curve"):
        title = f"Difference from {report['reference']}"
        charts.append(
            (
                line_chart(differences, title=title, identity="delta", y_label="ΔL", zero=True),
                f"ΔL: {escape(title.lower())}, seed by seed, then the mean. The noise of the data "
                "is in both of a pair and drops out.",
            )
        )
    figures = "".join(
        f"<figure>{svg}<figcaption>{caption}</figcaption></figure>" for svg, caption in charts
    )
    return (
        f'<section><h2>Loss curves</h2><ul class="legend">{legend}</ul>'
        f'<div class="charts">{figures}</div><p class="note">Points are means of neighbouring '
        "iterations. Values of the first tenth that lie outside of the rest are cut off.</p>"
        "</section>"
    )


def _costs(report: Mapping[str, Any]) -> str:
    base = next((v for v in _trained(report) if _is_reference(report, v)), {})
    rows: list[Sequence[Cell]] = []
    notes = set()
    for variant in _trained(report):
        cost = variant["cost"]
        if "uncounted" in cost:
            notes.add(f"Parameters and FLOPs are not counted: {cost['uncounted']}.")
            counts = ["–"] * 5
        else:
            counts = [f"{cost[key]:,}" for key in ("total", "active", "kha")]
            counts += [_flops(cost["flops"]), _percent(cost["kha_flops"] / cost["flops"])]
        time, times = variant["seconds_per_step"], base.get("seconds_per_step")
        relative = _percent(time / times - 1, "+.1") if time and times else "–"
        step = f"{time:.3g} s" if time else "–"
        rows.append(
            (variant["name"], *counts, step, "–" if _is_reference(report, variant) else relative)
        )
    headings = ("Model", "Parameters", "Active", "KHA’s own", "FLOPs/token", "KHA’s share",
                "Time/step", "Δ time")  # fmt: skip
    machine = ", ".join(report["devices"])
    if len(report["devices"]) > 1:
        notes.add("The runs were on different machines: their times are not to be compared.")
    words = (
        f"FLOPs: forward and backward, matrices applied to activations. Time: median of "
        f"Megatron’s intervals ({machine}). {' '.join(sorted(notes))}"
    )
    table = _table("Cost", headings, rows)
    return f'<section><h2>Cost</h2>{table}<p class="note">{escape(words)}</p></section>'


def _spikes(report: Mapping[str, Any]) -> str:
    spike = Definition()
    rows = [
        (
            variant["name"],
            f"{variant['spikes_per_run']:.3g}",
            f"{height:.3f}" if (height := variant["highest_spike"]) is not None else "–",
        )
        for variant in _trained(report)
    ]
    return (
        "<section><h2>Loss spikes</h2>"
        + _table("Loss spikes", ("Model", "Spikes a run", "Highest (nats)"), rows)
        + '<p class="note">A spike begins where the loss lies above the median of the last '
        f"{spike.window} iterations by more than {spike.deviations:g} of their standard deviations "
        f"(from their median absolute deviation) and by more than {spike.margin:g} nats, and ends "
        "where it is back within half of that. <code>kha-megatron spikes</code> shows a run’s. "
        f"The first {spike.first_judged} iterations are not judged.</p></section>"
    )


def _matrices(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    rows: list[Sequence[Cell]] = []
    figures = []
    for variant in _trained(report):
        for entry in variant["matrices"]:
            what = f"{entry['projection']} {entry['matrix']}"
            means = [
                _mean([layer[key] for layer in entry["layers"]])
                for key in ("diagonal_mean", "off_diagonal_share", "distance")
            ]
            rows.append((variant["name"], ("words", what), *means))
            picture = pictures.get(f"{variant['matrices_of']}/{entry['picture']}")
            if picture:
                data = base64.b64encode(picture).decode()
                text = f"{variant['name']}, {what} ({entry['variant']})"
                figures.append(
                    f'<figure class="matrices"><img alt="{escape(text)}" '
                    f'src="data:image/png;base64,{data}"><figcaption>{escape(text)}</figcaption>'
                    "</figure>"
                )
    if not rows:
        return ""
    headings = ("Model", ("words", "Matrix"), "Diagonal", "Off-diagonal", "Moved")
    return (
        "<section><h2>Learnt matrices</h2>"
        + _table("Learnt matrices", headings, rows)
        + '<p class="note">Means over layers, of the first seed. Diagonal: mean of the diagonal. '
        "Off-diagonal: share of the energy (sum of squares). Moved: distance from the identity "
        "start, where 1 is the norm of the identity. Pictures: one square a layer, dark 0 to light "
        f'1; gates blue to red through 0.</p><div class="charts">{"".join(figures)}</div></section>'
    )


def _runs(report: Mapping[str, Any]) -> str:
    rows: list[Sequence[Cell]] = []
    for run in report["runs"]:
        known: list[Cell] = ["–"] * 5
        if run["state"] == "finished":
            time = run["seconds_per_step"]
            known = [
                f"{run['loss']:.4f}",
                _signed(run["delta"], 4) if run["delta"] is not None else "–",
                str(len(run["spikes"])),
                f"{time:.3g} s" if time else "–",
                str(run["starts"]),
            ]
        rows.append((run["variant"], str(run["seed"]), *known, ("reason", run["state"])))
    headings = ("Model", "Seed", "Loss", "ΔL", "Spikes", "Time/step", "Starts", ("words", "State"))
    return (
        "<section><h2>Runs</h2>"
        + _table("Runs", headings, rows)
        + '<p class="note">Starts: 1, and one more for each interruption; a run goes on from its '
        "last checkpoint.</p></section>"
    )


def _about(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        "<section><h2>Made with</h2>"
        f'<pre tabindex="0"><code>{escape(shlex.join(report["command"]))}</code></pre>'
        f'<p class="note">{escape(versions)}. Written {escape(report["written"])}. The numbers are '
        "in report.json beside this page.</p></section>"
    )


def _table(name: str, headings: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    def cell(tag: str, content: Cell) -> str:
        style, text = ("", content) if isinstance(content, str) else content
        mark = f' class="{escape(style)}"' if style.isalpha() else ""
        return f"<{tag}{mark}>{escape(text)}</{tag[:2]}>"

    head = "".join(cell('th scope="col"', heading) for heading in headings)
    body = "".join(
        "<tr>" + cell('th scope="row"', row[0]) + "".join(cell("td", c) for c in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _estimate(found: Mapping[str, Any], *, signed: bool = False) -> str:
    text = _signed(found["mean"]) if signed else f"{found['mean']:.3f}"
    half = found["half_width"]
    return text if half is None else f"{text} ± {half:.3f}"


def _signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", _MINUS)


def _flops(value: float) -> str:
    return next(
        (f"{value / scale:.4g} {unit}" for scale, unit in _UNITS if value >= scale),
        f"{value:.4g}",
    )  # fmt: skip


def _percent(value: float, digits: str = ".2") -> str:
    return f"{value:{digits}%}".replace("-", _MINUS).replace("%", " %")


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "not finite"
