"""Curves land where their numbers say."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from kha_megatron.compare.charts import HEIGHT, WIDTH, Line, line_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.31, 2.47, [2.35, 2.4, 2.45]),
        (-0.011, 0.004, [-0.01, -0.005, 0]),
        (0, 47684, [0, 10000, 20000, 30000, 40000]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == expected


def test_points_bands_and_names():
    lines = [
        Line("a <b> & c", 0, [(1, 3.0, 0.5), (2, 2.0, 0.5), (3, 1.0, 0.5)]),
        Line("one seed", 3, [(1, 1.0, None), (3, 3.0, None)]),
    ]
    root = parse(line_chart(lines, title="<x>", identity="t", y_label="loss"))
    assert root.find(f"{SVG}title").text == "<x>"
    drawn = root.findall(f".//{SVG}polyline")
    assert [line.get("class") for line in drawn] == ["line c0", "line c3"]
    assert drawn[0].find(f"{SVG}title").text == "a <b> & c"
    assert [p.get("class") for p in root.findall(f".//{SVG}polygon")] == ["band c0"]
    falling, rising = (
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in drawn
    )
    assert falling[0][1] == rising[1][1]  # both 3.0
    assert falling[2][1] == rising[0][1]  # both 1.0
    assert falling[0][1] < falling[1][1] < falling[2][1]  # y grows downwards
    assert falling[1][1] == pytest.approx((falling[0][1] + falling[2][1]) / 2, abs=0.1)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in falling + rising)


def test_the_high_start_does_not_flatten_the_rest():
    points = [(i, 1000.0 if i < 5 else 2 + 1 / i, None) for i in range(1, 101)]
    text = line_chart([Line("a", 0, points)], title="t", identity="t", y_label="loss")
    ys = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', text)[1].split()]
    assert ys[99] - ys[9] > HEIGHT / 2
    assert max(map(abs, ys)) <= 2 * HEIGHT  # no coordinate that a renderer would choke on


def test_a_wide_band_does_not_flatten_the_curve():
    points = [(i, 2 - i / 100, 50.0) for i in range(1, 101)]
    text = line_chart([Line("a", 0, points)], title="t", identity="t", y_label="loss")
    line = re.search(r'polyline class="line c0" points="([^"]+)"', text)[1]
    ys = [float(pair.split(",")[1]) for pair in line.split()]
    assert ys[99] - ys[9] > HEIGHT / 5


def test_equal_values_have_a_range():
    lines = [Line("a", 0, [(1, 0.0, 0.0), (2, 0.0, 0.0)])]
    parse(line_chart(lines, title="t", identity="t", y_label="y", zero=True))
