"""HTML version of the report. The page is self-contained and does not use JavaScript."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Any

from kha_megatron.compare.charts import Line, Point, draw_line_chart
from kha_megatron.compare.statistics import LAST_SHARE


def render_page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Render a report as HTML.

    Args:
        report: Report from :func:`kha_megatron.compare.report.build_report`.
        pictures: Content of PNG files by path, e.g. ``kha_mlp-seed1/value_up.png``. The images are
            embedded into the page.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    environment.filters["estimate"] = format_estimate
    environment.filters["mean"] = _format_mean
    environment.filters["range"] = _format_range
    environment.filters["number"] = _format_number
    curves = ""
    loss_lines = _read_lines(report, "curve")
    if loss_lines:
        curves = draw_line_chart(loss_lines, title="Training loss", y_label="loss")
    differences = ""
    difference_lines = _read_lines(report, "delta_curve")
    if difference_lines:
        title = f"Difference from {report['reference']}"
        differences = draw_line_chart(
            difference_lines,
            title=title,
            y_label="ΔL",
            zero_line=True,
        )
    trained = [variant for variant in report["variants"] if variant["seeds"]]
    template = files("kha_megatron.compare").joinpath("page.html").read_text()
    return environment.from_string(template).render(
        report,
        trained=trained,
        curves=Markup(curves),
        differences=Markup(differences),
        last_share=LAST_SHARE,
        matrices=_describe_matrices(trained, pictures),
        shell=shlex.join(report["command"]),
    )


def _read_lines(report: Mapping[str, Any], key: str) -> list[Line]:
    """Read a curve of each variant that has it. Colors depend on the position of the variant."""
    lines = []
    for index, variant in enumerate(report["variants"]):
        if key not in variant:
            continue
        points = []
        for iteration, mean, half_width in variant[key]:
            points.append(Point(iteration, mean, half_width))
        if points:
            colour = f"C{index % 10}"
            lines.append(Line(variant["name"], colour, points))
    return lines


def _describe_matrices(
    variants: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """Return the diagnostics of all matrices, each with its picture in base64."""
    described = []
    for variant in variants:
        trial_name = variant.get("matrices_of")
        for diagnostics in variant["matrices"]:
            path = f"{trial_name}/{diagnostics['picture']}"
            picture = base64.b64encode(pictures.get(path, b""))
            entry = dict(diagnostics)
            entry["name"] = variant["name"]
            entry["png"] = picture.decode()
            described.append(entry)
    return described


def summarize(report: Mapping[str, Any]) -> list[str]:
    """Return one line with the differences and verdicts of each variant except the reference."""
    names = {"delta": "training loss", "held_out_delta": "held-out loss"}
    lines = []
    for variant in report["variants"]:
        for key, name in names.items():
            if key not in variant:
                continue
            delta = variant[key]
            difference = format_estimate(delta, 4, "+")
            line = f"{variant['name']}: {name} {difference} ({delta['verdict']})"
            lines.append(line)
    return lines


def format_estimate(
    estimate: Mapping[str, Any] | None,
    digits: int,
    sign: str = "",
) -> str:
    """Format the fields of an ``Estimate``, e.g. as ``1.23 ± 0.04``."""
    if estimate is None:
        return "–"
    mean = estimate["mean"]
    half_width = estimate["half_width"]
    formatted = f"{mean:{sign}.{digits}f}"
    if half_width is not None:
        formatted += f" ± {half_width:.{digits}f}"
    return formatted


def _format_range(limits: Sequence[float] | None) -> str:
    if limits is None:
        return "–"
    low, high = limits
    return f"{low:.3g} to {high:.3g}"


def _format_number(number: float | None, format_spec: str) -> str:
    if number is None:
        return "–"
    return f"{number:{format_spec}}"


def _format_mean(layers: Sequence[Mapping[str, float | None]], key: str) -> str:
    finite = []
    for layer in layers:
        value = layer[key]
        if value is not None:
            finite.append(value)
    if not finite:
        return "not finite"
    return f"{fmean(finite):.3f}"
