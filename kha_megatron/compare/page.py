"""HTML version of the report. The page is self-contained and doesn't use JavaScript."""

import base64
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from kha_megatron.compare.charts import Line, draw_line_chart
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
    environment.filters |= {"estimate": format_estimate, "mean": _mean}
    environment.filters["range"] = lambda x: "–" if x is None else f"{x[0]:.3g} to {x[1]:.3g}"
    environment.filters["number"] = lambda x, form: "–" if x is None else f"{x:{form}}"
    colours = {v["name"]: f"C{i % 10}" for i, v in enumerate(report["variants"])}
    trained = [variant for variant in report["variants"] if variant["seeds"]]

    def chart(key: str, title: str, y_label: str, *, zero: bool = False) -> Markup:
        lines = [
            Line(v["name"], colours[v["name"]], [(x, y, half) for x, y, half in v[key]])
            for v in trained
            if v.get(key)
        ]
        return Markup(
            draw_line_chart(lines, title=title, y_label=y_label, zero=zero) if lines else ""
        )

    matrices = [
        entry | {"name": variant["name"], "png": base64.b64encode(picture or b"").decode()}
        for variant in trained
        for entry in variant["matrices"]
        for picture in [pictures.get(f"{variant['matrices_of']}/{entry['picture']}")]
    ]
    template = files("kha_megatron.compare").joinpath("page.html").read_text()
    return environment.from_string(template).render(
        report,
        trained=trained,
        curves=chart("curve", "Training loss", "loss"),
        differences=chart("delta_curve", f"Difference from {report['reference']}", "ΔL", zero=True),
        last_share=LAST_SHARE,
        matrices=matrices,
        shell=shlex.join(report["command"]),
    )


def summarize(report: Mapping[str, Any]) -> list[str]:
    """Return one line with the differences and verdicts of each variant except the reference."""
    lines = []
    for variant in report["variants"]:
        for key, name in (("delta", "training loss"), ("held_out_delta", "held-out loss")):
            if delta := variant.get(key):
                shown = format_estimate(delta, 4, "+")
                lines.append(f"{variant['name']}: {name} {shown} ({delta['verdict']})")
    return lines


def format_estimate(found: Mapping[str, Any] | None, digits: int, sign: str = "") -> str:
    """Format the fields of an ``Estimate``, e.g. as ``1.23 ± 0.04``."""
    if found is None:
        return "–"
    half = found["half_width"]
    text = f"{found['mean']:{sign}.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"


def _mean(layers: list[Mapping[str, float | None]], key: str) -> str:
    known = [value for layer in layers if (value := layer[key]) is not None]
    return f"{sum(known) / len(known):.3f}" if known else "not finite"
