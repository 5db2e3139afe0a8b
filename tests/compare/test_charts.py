"""Charts and matrix pictures against their numbers."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from matplotlib.image import imread

from kha_megatron.compare.charts import Line, draw_line_chart, draw_matrix_grid

SVG = "{http://www.w3.org/2000/svg}"


def curve(svg, name="C0"):
    """Return the corners of the curve drawn in a colour; y grows downwards."""
    colour = {"C0": "#1f77b4", "C1": "#ff7f0e"}[name]
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    path = next(p for p in paths if f"stroke: {colour}" in p.get("style", ""))
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path.get("d"))]


def test_a_curve_and_its_band_are_drawn_to_scale():
    lines = [
        Line("a <b> & c", "C0", [(1, 3.0, 0.5), (2, 2.0, 0.5), (3, 1.0, 0.5)]),
        Line("one seed", "C1", [(1, 1.0, None), (3, 3.0, None)]),
    ]
    svg = draw_line_chart(lines, title="<x>", y_label="loss")
    falling, rising = curve(svg, "C0"), curve(svg, "C1")
    assert falling[0][1] == rising[1][1]  # both 3.0
    assert falling[0][1] < falling[1][1] < falling[2][1]
    assert falling[1][1] == pytest.approx((falling[0][1] + falling[2][1]) / 2, abs=0.1)
    texts = ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"iteration", "loss", "a <b> & c", "one seed"} <= set(texts)
    assert ElementTree.fromstring(svg).get("aria-label") == "<x>"


def pixels(tmp_path, matrices, **options):
    draw_matrix_grid(matrices, tmp_path / "grid.png", title="title", **options)
    return imread(tmp_path / "grid.png")


def test_matrices_are_clipped_and_gates_are_not(tmp_path):
    inside = {0: torch.eye(7), 1: torch.eye(7)}
    outside = {0: torch.eye(7) * 5 - torch.eye(7).roll(1, 0) * 3, 1: torch.eye(7)}
    assert (pixels(tmp_path, inside) == pixels(tmp_path, outside)).all()
    gates = pixels(tmp_path, inside, diverging=True), pixels(tmp_path, outside, diverging=True)
    assert (gates[0] != gates[1]).any()


def test_values_that_are_not_finite_are_magenta(tmp_path):
    def magenta(matrix):
        found = pixels(tmp_path, {0: matrix})
        return ((found[..., 0] == 1) & (found[..., 1] == 0) & (found[..., 2] == 1)).sum()

    broken = torch.eye(7)
    broken[2, 3] = float("nan")
    assert magenta(torch.eye(7)) == 0
    assert magenta(broken) > 50
