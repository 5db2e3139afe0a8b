"""Curves land where their numbers say."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from kha_megatron.compare.charts import HEIGHT, WIDTH, Line, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))


def drawn(root: ElementTree.Element, kind: str) -> dict[str, list[tuple[float, float]]]:
    """Corners of what is drawn by its class; y grows downwards."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class", "").startswith(kind)]
    words = {g.get("class"): g.find(f"{SVG}path").get("d") for g in groups}
    return {name: _corners(path) for name, path in words.items()}


def _corners(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)]


def test_points_bands_and_names():
    lines = [
        Line("a <b> & c", 0, [(1, 3.0, 0.5), (2, 2.0, 0.5), (3, 1.0, 0.5)]),
        Line("one seed", 3, [(1, 1.0, None), (3, 3.0, None)]),
    ]
    root = parse(line_chart(lines, title="<x>", identity="t", y_label="loss"))
    assert root.get("aria-label") == "<x>"
    falling, rising = drawn(root, "line").values()
    assert list(drawn(root, "line")) == ["line c0", "line c3"]
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a <b> & c", "one seed"]
    (band,) = drawn(root, "band c0").values()
    assert len(band) == 6
    assert falling[0][1] == rising[1][1]  # both 3.0
    assert falling[2][1] == rising[0][1]  # both 1.0
    assert falling[0][1] < falling[1][1] < falling[2][1]
    assert falling[1][1] == pytest.approx((falling[0][1] + falling[2][1]) / 2, abs=0.1)
    half = (falling[1][1] - falling[0][1]) / 2  # 0.5, and a step of the line is 1
    assert band[0][1] == pytest.approx(falling[0][1] - half, abs=0.1)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in falling + rising)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"iteration", "loss", "1.0", "2.0", "3.0"} <= set(texts)


def test_the_high_start_does_not_flatten_the_rest():
    points = [(i, 1000.0 if i < 5 else 2 + 1 / i, None) for i in range(1, 101)]
    text = line_chart([Line("a", 0, points)], title="t", identity="t", y_label="loss")
    ys = [y for x, y in drawn(parse(text), "line")["line c0"]]
    assert ys[-1] - min(y for y in ys if y >= 0) > HEIGHT / 2
    assert max(map(abs, ys)) <= 2 * HEIGHT  # no coordinate that a renderer would choke on


def test_a_wide_band_does_not_flatten_the_curve():
    points = [(i, 2 - i / 100, 50.0) for i in range(1, 101)]
    text = line_chart([Line("a", 0, points)], title="t", identity="t", y_label="loss")
    ys = [y for _, y in drawn(parse(text), "line")["line c0"]]
    assert ys[-1] - ys[0] > HEIGHT / 5
    assert max(abs(y) for _, y in drawn(parse(text), "band")["band c0"]) <= 3 * HEIGHT


def test_equal_values_have_a_range():
    lines = [Line("a", 0, [(1, 0.0, 0.0), (2, 0.0, 0.0)])]
    root = parse(line_chart(lines, title="t", identity="t", y_label="y", zero=True))
    ys = [y for _, y in drawn(root, "line")["line c0"]]
    assert 0 < min(ys) == max(ys) < HEIGHT


def test_two_charts_of_a_page_share_no_identity():
    line = Line("a", 0, [(1, 0.0, 1.0), (2, 0.0, 1.0)])
    texts = [line_chart([line], title="t", identity=i, y_label="y") for i in ("a", "b")]
    first, second = (set(re.findall(r' id="([^"]+)"', text)) for text in texts)
    assert first
    assert not first & second
