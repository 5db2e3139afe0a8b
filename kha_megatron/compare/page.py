"""HTML version of the report. The page is self-contained and does not use JavaScript."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
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
    colours = {}
    for index, variant in enumerate(report["variants"]):
        colours[variant["name"]] = f"C{index % 10}"
    trained = [variant for variant in report["variants"] if variant["seeds"]]

    def chart(key: str, title: str, y_label: str, *, zero: bool = False) -> Markup:
        lines = []
        for variant in trained:
            if curve := variant.get(key):
                points = [Point(*values) for values in curve]
                lines.append(Line(variant["name"], colours[variant["name"]], points))
        if not lines:
            return Markup()
        return Markup(draw_line_chart(lines, title=title, y_label=y_label, zero=zero))

    template = files("kha_megatron.compare").joinpath("page.html").read_text()
    return environment.from_string(template).render(
        report,
        trained=trained,
        curves=chart("curve", "Training loss", "loss"),
        differences=chart("delta_curve", f"Difference from {report['reference']}", "ΔL", zero=True),
        last_share=LAST_SHARE,
        matrices=_describe_matrices(trained, pictures),
        shell=shlex.join(report["command"]),
    )


def _describe_matrices(
    variants: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """Return the diagnostics of all matrices, each with its picture in base64."""
    described = []
    for variant in variants:
        for diagnostics in variant["matrices"]:
            picture = pictures.get(f"{variant['matrices_of']}/{diagnostics['picture']}", b"")
            encoded = base64.b64encode(picture).decode()
            described.append(diagnostics | {"name": variant["name"], "png": encoded})
    return described


def summarize(report: Mapping[str, Any]) -> list[str]:
    """Return one line with the differences and verdicts of each variant except the reference."""
    lines = []
    for variant in report["variants"]:
        for key, name in (("delta", "training loss"), ("held_out_delta", "held-out loss")):
            if delta := variant.get(key):
                shown = format_estimate(delta, 4, "+")
                lines.append(f"{variant['name']}: {name} {shown} ({delta['verdict']})")
    return lines


def format_estimate(
    estimate: Mapping[str, Any] | None,
    digits: int,
    sign: str = "",
) -> str:
    """Format the fields of an ``Estimate``, e.g. as ``1.23 ± 0.04``."""
    if estimate is None:
        return "–"
    mean = f"{estimate['mean']:{sign}.{digits}f}"
    half_width = estimate["half_width"]
    if half_width is None:
        return mean
    return f"{mean} ± {half_width:.{digits}f}"


def _format_range(limits: Sequence[float] | None) -> str:
    if limits is None:
        return "–"
    low, high = limits
    return f"{low:.3g} to {high:.3g}"


def _format_number(number: float | None, format_spec: str) -> str:
    return "–" if number is None else f"{number:{format_spec}}"


def _format_mean(layers: Sequence[Mapping[str, float | None]], key: str) -> str:
    values = [layer[key] for layer in layers]
    finite = [value for value in values if value is not None]
    if not finite:
        return "not finite"
    return f"{sum(finite) / len(finite):.3f}"
