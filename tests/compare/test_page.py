"""The report as a reader's parser and as a real browser see it."""

import base64
import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from kha_megatron.compare import page, parse_variants, plan, summarise
from kha_megatron.compare.charts import WIDTH
from kha_megatron.compare.measure import mosaic
from kha_megatron.compare.statistics import final_loss
from kha_megatron.recipes import get_recipe
from tests.compare.conftest import result

EVIL = "<script>alert(1)</script>\"'&"


class Parsed(HTMLParser):
    """Tables by their names as rows of texts, and every tag and attribute."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "div" and "aria-label" in (found := dict(attrs)):
            self.table = self.tables.setdefault(found["aria-label"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"style", "title"} & set(self.open):
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.table[-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def groups(self, kind: str) -> int:
        return sum((attrs.get("class") or "").startswith(f"{kind} c") for _, attrs in self.tags)


def pictures(report):
    png = mosaic([torch.eye(5), torch.zeros(5, 5)], diverging=False)
    return {
        f"{variant['matrices_of']}/{entry['picture']}": png
        for variant in report["variants"]
        for entry in variant.get("matrices", ())
    }


def test_the_tables_hold_the_numbers(made):
    report = Parsed(page(made.report, pictures(made.report)))
    loss = report.tables["Final loss"]
    assert loss[0] == ["Model", "Loss", "ΔL", "Verdict", "Seeds", "Knocks"]
    assert [row[0] for row in loss[1:]] == ["baseline", "kha_mlp", "kha_linear"]
    # gains 0.051, 0.052, 0.053: t(2) * 0.001 / sqrt(3) = 0.0025
    assert loss[2][2:] == ["−0.0520 ± 0.0025", "lower", "3", "value=mlp"]
    assert loss[3][2:4] == ["+0.0000 ± 0.0000", "no difference shown"]
    assert loss[1][2:4] == ["–", "reference"]
    finals = [final_loss(made.results["baseline", seed]["losses"]) for seed in (1, 2, 3)]
    assert loss[1][1].startswith(f"{sum(finals) / 3:.3f} ± ")

    assert report.tables["Cost"][1][1:6] == ["1,800,000", "900,000", "12,288", "6.5 M", "1.00 %"]
    assert report.tables["Cost"][1][-3:] == ["0.5 s", "–", "yes"]
    assert report.tables["Cost"][2][-2] == "+10.4 %"
    assert [row[1] for row in report.tables["Loss spikes"][1:]] == ["0", "0", "0"]
    assert len(report.tables["Learnt matrices"]) == 1 + 1 + 3
    assert report.tables["Learnt matrices"][1] == [
        *("kha_mlp", "value proj", "0.900", "0.100", "2.718")
    ]
    runs = report.tables["Runs"]
    assert len(runs) == 1 + 9
    assert [row[:2] for row in runs[1:4]] == [
        ["baseline", "1"],
        ["kha_mlp", "1"],
        ["kha_linear", "1"],
    ]
    assert runs[2][3] == "−0.0510"
    assert report.count("svg") == 2
    assert report.groups("line") == report.groups("band") == 3 + 2
    assert report.count("img") == 4
    assert "of 9 runs" not in report.text
    assert "kha-megatron compare" in report.text


def test_null_runs_are_the_floor_and_held_out_losses_stand_beside(tmp_path):
    """Held out, kha_mlp gains 0.003 ± 0.0005 where null runs are 0.004 away from the baseline."""
    variants = parse_variants("baseline,kha_mlp")
    planned = plan(
        get_recipe("quickstart"), variants, 3, output=tmp_path, overrides=["--mock-data"], null=True
    )
    moved = {"baseline": (0, 0, 0), "null": (4, -4, 4), "kha_mlp": (-3, -3.2, -2.8)}
    results = {
        (name, seed): result(run.variant, seed, gain=0.05 * (name == "kha_mlp"))
        | {"held_out": 2 + seed + moved[name][seed - 1] / 1000}
        for run in planned.runs
        for name, seed in [(run.variant.name, run.seed)]
    }
    report = summarise(planned, results)
    assert report["floor"]["held_out"] == pytest.approx(
        {"rms": 0.004, "largest": 0.004, "seeds": 3}
    )
    assert report["floor"]["loss"] == {"rms": 0, "largest": 0, "seeds": 3}
    parsed = Parsed(page(report, pictures(report)))
    loss = parsed.tables["Final loss"]
    assert loss[0][2:7] == ["ΔL", "Verdict", "Held-out", "ΔL held-out", "Verdict"]
    assert [row[3] for row in loss[1:]] == ["reference", "the floor", "lower"]
    assert [row[6] for row in loss[1:]] == ["reference", "the floor", "below the floor"]
    assert loss[1][4].startswith("4.000 ± ")
    assert loss[3][5] == "−0.0030 ± 0.0005"
    assert "end 0.004 away (root mean square over 3 seeds; at most 0.004)" in parsed.text
    assert parsed.tables["Runs"][2][2:6] == [
        *(f"{final_loss(results['null', 1]['losses']):.4f}", "+0.0000", "3.0040", "+0.0040")
    ]
    del results["kha_mlp", 3]["held_out"]  # a run of an earlier version, or without --held-out
    parsed = Parsed(page(summarise(planned, results), {}))
    assert parsed.tables["Final loss"][3][5].startswith("−0.0031 ± ")
    assert parsed.tables["Runs"][9][4:6] == ["–", "–"]


def test_what_fused_kernels_cannot_do_is_said(made):
    made.report["variants"][1]["cost"] |= {"unfused": "heads <mix>", "spared_flops": 2.5e6}
    parsed = Parsed(page(made.report, {}))
    assert [row[-1] for row in parsed.tables["Cost"][1:]] == ["yes", "no", "yes"]
    assert "Not kha_mlp: heads <mix>." in parsed.text
    assert "would save 2.5 M of kha_mlp’s FLOPs" in parsed.text


def test_what_a_recipe_has_alone_is_said(made):
    assert "Recipe:" not in Parsed(page(made.report, {})).text
    recipe = get_recipe("table3/mla-baseline")
    latent = summarise(replace(made.comparison, recipe=recipe), made.results)
    text = Parsed(page(latent, {})).text
    assert "Recipe: norms have --norm-epsilon 1e-6, in all other rows 1e-5: " in text


def test_an_unfinished_comparison_says_so(made):
    results = {key: value for key, value in made.results.items() if key[1] == 1}
    del results["kha_linear", 1]
    failures = {"kha_linear-seed1": "failed: rank 0 was killed by SIGKILL (out of memory?)"}
    report = summarise(made.comparison, results, failures=failures)
    parsed = Parsed(page(report, {}))
    assert "2 of 9 runs have finished" in parsed.text
    assert [row[0] for row in parsed.tables["Final loss"][1:]] == ["baseline", "kha_mlp"]
    assert parsed.tables["Final loss"][2][2:4] == ["−0.0510", "one seed: no interval"]
    assert parsed.tables["Runs"][3][-1] == failures["kha_linear-seed1"]
    assert parsed.tables["Runs"][4][-1] == "not trained yet"
    assert parsed.groups("band") == 0
    json.dumps(report, allow_nan=False)


def test_a_reference_that_is_not_there_yet(made):
    results = {key: value for key, value in made.results.items() if key[0] == "kha_mlp"}
    parsed = Parsed(page(summarise(made.comparison, results), {}))
    assert parsed.tables["Final loss"][1][2:4] == ["–", "not paired yet"]
    assert parsed.count("svg") == 1


def test_every_string_is_escaped(made):
    report = made.report
    report["recipe"] = report["description"] = report["reference"] = report["note"] = EVIL
    report["variants"][0]["name"] = EVIL
    report["variants"][1] |= {"knocks": EVIL, "cost": {"uncounted": EVIL}}
    report["variants"][1]["matrices"][0] |= {"projection": EVIL, "variant": EVIL}
    report["devices"] = [EVIL]
    report["command"] = [EVIL]
    report["versions"] = {EVIL: EVIL}
    report["runs"][0] |= {"state": EVIL, "variant": EVIL}
    text = page(report, pictures(report))
    parsed = Parsed(text)
    assert parsed.count("script") == 0
    assert "<script" not in text
    assert parsed.text.count(EVIL) >= 8
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]


def test_nothing_is_loaded_from_anywhere(made):
    parsed = Parsed(text := page(made.report, pictures(made.report)))
    sources = [a[key] for _, a in parsed.tags for key in ("src", "href", "data") if key in a]
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text
    policy = [a["content"] for _, a in parsed.tags if "http-equiv" in a]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.mark.parametrize(("width", "dark"), [(360, False), (390, True), (1280, False)])
def test_in_a_real_browser(made, browser, tmp_path, width, dark):
    """Fits the screen, says nothing on the console, loads nothing, and is legible."""
    path = tmp_path / "report.html"
    path.write_text(page(made.report, pictures(made.report)), encoding="utf-8")
    browser.open(path.as_uri(), width=width, height=800, dark=dark)

    asked = [e["params"]["request"]["url"] for e in browser.events if _is(e, "requestWillBeSent")]
    assert asked[0] == path.as_uri()
    assert all(url.startswith("data:image/png;base64,") for url in asked[1:])
    complaints = [e for e in browser.events if _is(e, "entryAdded") or _is(e, "exceptionThrown")]
    assert complaints == []

    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    assert browser.ask("document.querySelectorAll('tbody tr').length") == 3 + 3 + 3 + 4 + 9
    boxes = browser.ask("""[...document.querySelectorAll('svg, table, img, pre')].map(e => {
        const box = (e.closest('.scroll') || e).getBoundingClientRect();
        return [box.left, box.right, box.height];
    })""")
    assert len(boxes) == 2 + 5 + 4 + 1
    assert all(left >= 0 and right <= width and height > 20 for left, right, height in boxes)
    # a table that is wider than the screen scrolls by itself
    wide = browser.ask("""[...document.querySelectorAll('.scroll')]
        .filter(e => e.scrollWidth > e.clientWidth)
        .map(e => { e.scrollLeft = 1e6; return e.scrollLeft > 0; })""")
    assert all(wide)
    assert bool(wide) == (width < 600)
    assert _check_shades(browser) == (width < 600)
    heights = browser.ask("""[...document.querySelectorAll('svg text')].map(
        e => e.getBBox().height * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b))""")
    assert min(heights) > 11.5  # CSS pixels, of a line: letters of 10 and more
    assert browser.ask("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    colours = browser.ask("""(() => {
        const body = getComputedStyle(document.body);
        const drawn = [...document.querySelectorAll('.line path')];
        const lines = drawn.map(e => getComputedStyle(e).stroke);
        const soft = getComputedStyle(document.querySelector('.note')).color;
        return [body.backgroundColor, body.color, soft, ...lines];
    })()""")
    back, text, soft, *lines = map(_luminance, colours)
    assert (back < 0.05) == dark
    assert _contrast(text, back) > 7
    assert _contrast(soft, back) > 4.5
    assert min(_contrast(line, back) for line in lines) > 3  # WCAG's for graphics
    assert len(set(colours[3:6])) == 3  # one a variant

    size = {"x": 0, "y": 0, "width": width, "height": 800, "scale": 1}
    picture = browser.call("Page.captureScreenshot", format="png", clip=size)["data"]
    assert len(base64.b64decode(picture)) > 20_000  # an empty page has 5 kB

    # charts have one size, whatever the screen's and their number
    widths = [_ask_widths(browser, "svg")]
    browser.ask("document.querySelectorAll('.charts figure')[1].remove()")
    widths.append(_ask_widths(browser, "svg"))
    assert [len(found) for found in widths] == [2, 1]
    assert all(0.85 * WIDTH < one <= WIDTH for found in widths for one in found)
    assert len({round(one) for found in widths for one in found}) == 1


def _ask_widths(browser, what: str) -> list[float]:
    return browser.ask(
        f"[...document.querySelectorAll('{what}')].map(e => e.getBoundingClientRect().width)"
    )


def _check_shades(browser) -> bool:
    """The edge behind which a table goes on looks unlike its ground; at the table's end it does
    not. Behind the last 24 pixels its cover comes in."""
    found = set()
    for number in range(len(_ask_widths(browser, ".scroll"))):
        for left in (0, 1e6):
            table = f"document.querySelectorAll('.scroll')[{number}]"
            browser.ask(f"{table}.scrollLeft = {left}")
            more = browser.ask(f"""(() => {{ const e = {table};
                return e.scrollWidth - e.clientWidth - e.scrollLeft; }})()""")
            box = browser.ask(f"""(() => {{ const b = {table}.getBoundingClientRect();
                return [b.left + scrollX, b.top + scrollY, b.width, b.height]; }})()""")
            ground, edge = _ground_and_edge(browser, box)
            assert 1 < more < 24 or (abs(edge - ground) > 12) == (more > 1), (number, left, edge)
            found.add(more > 24)
    assert False in found
    return True in found


def _ground_and_edge(browser, box: list[float]) -> tuple[float, float]:
    """Brightness from 0 to 255 of most of a box, and of most of its right edge, without border."""
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
    taken = browser.call(
        "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
    )
    pixels = imread(io.BytesIO(base64.b64decode(taken["data"])))[..., :3].mean(-1) * 255
    pixel = pixels.shape[1] / box[2]
    edge = pixels[:, round(-5 * pixel) : round(-2 * pixel)]
    return float(np.median(pixels)), float(np.median(edge))


def _is(event: dict, name: str) -> bool:
    return event["method"].endswith(f".{name}")


def _luminance(colour: str) -> float:
    """WCAG's relative luminance of ``rgb(1, 2, 3)``."""
    parts = [int(word) / 255 for word in colour[4:-1].split(",")]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: float, two: float) -> float:
    return (max(one, two) + 0.05) / (min(one, two) + 0.05)


def test_a_variant_that_recovered_from_a_spike_shows_it(made):
    made.results["kha_mlp", 2]["losses"][100:103] = [9.0, 12.0, 8.0]
    report = summarise(made.comparison, made.results)
    row = Parsed(page(report, {})).tables["Loss spikes"][2]
    assert row[:2] == ["kha_mlp", "0.333"]
    assert math.isclose(float(row[2]), 12 - 2.9, abs_tol=0.3)


def test_other_numbers_of_seeds(made):
    only = replace(made.comparison, seeds=(1,), runs=made.comparison.runs[:3])
    results = {key: value for key, value in made.results.items() if key[1] == 1}
    assert "One seed" in Parsed(page(summarise(only, results), {})).text
