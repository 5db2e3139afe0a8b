"""The report as one HTML file that loads nothing: no script, no font, no picture from elsewhere.

The page's own policy forbids a browser to load anything. Every word that comes from a recipe, a
variant or a log is escaped by the template.
"""

import base64
import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from kha_megatron.compare import statistics
from kha_megatron.compare.charts import Line, line_chart
from kha_megatron.compare.spikes import Definition

_COLOURS = 8
_MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The whole document.

    Args:
        report: from :func:`kha_megatron.compare.report.summarise`.
        pictures: PNG files of the matrices by ``RUN/FILE``, as the report names them.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    folder, reference = files("kha_megatron.compare"), report["reference"]
    environment = Environment(autoescape=True)
    environment.filters |= {
        "estimate": _estimate,
        "flops": _flops,
        "mean": _mean,
        "percent": _percent,
        "seconds": lambda time: f"{time:.3g} s" if time else "–",
        "signed": _signed,
        "word": lambda text: text if text.isalpha() else "",
    }
    names = [variant["name"] for variant in report["variants"]]
    colours = {name: i % _COLOURS for i, name in enumerate(names)}
    trained = [variant for variant in report["variants"] if variant["seeds"]]

    def chart(key: str, title: str, y_label: str, *, zero: bool = False) -> Markup:
        lines = [
            Line(v["name"], colours[v["name"]], [(x, y, half) for x, y, half in v[key]])
            for v in trained
            if v.get(key)
        ]
        if not lines:
            return Markup()
        return Markup(line_chart(lines, title=title, identity=key, y_label=y_label, zero=zero))

    matrices = [
        entry | {"name": variant["name"], "png": base64.b64encode(picture or b"").decode()}
        for variant in trained
        for entry in variant["matrices"]
        for picture in [pictures.get(f"{variant['matrices_of']}/{entry['picture']}")]
    ]
    return environment.from_string(folder.joinpath("page.html").read_text()).render(
        report,
        others=", ".join(name for name in names if name != reference),
        trained=trained,
        colours=colours,
        style=Markup(folder.joinpath("page.css").read_text()),
        curves=chart("curve", "Training loss", "loss"),
        differences=chart("delta_curve", f"Difference from {reference}", "ΔL", zero=True),
        last_share=statistics.LAST_SHARE,
        t_quantile=statistics.t_quantile,
        uncounted=sorted({v["cost"]["uncounted"] for v in trained if "uncounted" in v["cost"]}),
        step_of_reference=next(
            (v["seconds_per_step"] for v in trained if v["name"] == reference), None
        ),
        spike=Definition(),
        matrices=matrices,
        shell=shlex.join(report["command"]),
    )


def _estimate(found: Mapping[str, Any], *, signed: bool = False) -> str:
    digits = 4 if signed else 3
    text = _signed(found["mean"]) if signed else f"{found['mean']:.3f}"
    half = found["half_width"]
    return text if half is None else f"{text} ± {half:.{digits}f}"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", _MINUS)


def _flops(value: float) -> str:
    return next(
        (f"{value / scale:.4g} {unit}" for scale, unit in _UNITS if value >= scale),
        f"{value:.4g}",
    )


def _percent(value: float, digits: str = ".2") -> str:
    return f"{value:{digits}%}".replace("-", _MINUS).replace("%", " %")


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "not finite"
