"""The numbers of the report and the page that shows them."""

import json
from html.parser import HTMLParser

import pytest

from kha_megatron.compare.page import render_page, summarize
from kha_megatron.compare.report import build_report
from kha_megatron.compare.statistics import compute_final_loss
from kha_megatron.compare.trials import plan_comparison
from kha_megatron.compare.variants import parse_variants
from kha_megatron.recipes import get_recipe
from tests.compare.conftest import make_result

EVIL = "<script>alert(1)</script>\"'&"


class Parsed(HTMLParser):
    """The cells of each table by name, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables = {}
        self.tags = []
        self.text = ""
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.table = self.tables.setdefault(dict(attrs)["aria-label"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.table[-1][-1] += data


@pytest.mark.fast
def test_the_tables_hold_the_numbers(finished):
    comparison, results = finished
    results["kha_mlp", 2]["losses"][100:103] = [9.0, 12.0, 8.0]
    report = build_report(comparison, results, command=["kha-megatron", "compare"])
    parsed = Parsed(render_page(report, {"kha_mlp-seed1/x.png": b"png"}))
    baseline, mlp, linear = parsed.tables["Final loss"][1:]
    assert mlp[0] == "kha_mlp"
    # gains 0.051, 0.052, 0.053: t(2) * 0.001 / sqrt(3) = 0.0025
    assert mlp[2:4] == ["-0.0520 ± 0.0025", "lower"]
    assert mlp[7:] == ["3", "value=mlp"]
    assert linear[2:4] == ["+0.0000 ± 0.0025", "no difference shown"]
    assert baseline[2:4] == ["–", "reference"]
    finals = [compute_final_loss(results["baseline", seed]["losses"]) for seed in (1, 2, 3)]
    assert baseline[1].startswith(f"{sum(finals) / 3:.3f} ± ")
    costs = parsed.tables["Cost"]
    assert costs[1][1:] == [
        "1,800,000",
        "900,000",
        "12,288",
        "6.5e+06",
        "6.5e+04",
        "0.5 to 0.5",
        "yes",
    ]
    assert costs[2][6] == "0.551 to 0.553"
    assert summarize(report) == [
        "kha_mlp: training loss -0.0520 ± 0.0025 (lower)",
        "kha_linear: training loss +0.0000 ± 0.0025 (no difference shown)",
    ]
    spikes = parsed.tables["Loss spikes"]
    assert [row[1] for row in spikes[1:]] == ["0", "0.333", "0"]
    assert float(spikes[2][2]) == pytest.approx(12 - 2.9, abs=0.3)
    matrices = parsed.tables["Trained matrices"]
    assert matrices[1] == ["kha_mlp", "value proj", "0.900", "0.100", "2.718"]
    assert len(matrices) == 1 + 1 + 3
    runs = parsed.tables["Runs"]
    assert [row[:2] for row in runs[1:3]] == [["baseline", "1"], ["kha_mlp", "1"]]
    assert len(runs) == 10
    first_loss = results["kha_mlp", 1]["losses"][0]
    assert runs[2][2] == f"{first_loss:.4f}"
    assert runs[2][4] == "-0.0510"
    drawn = [name for name, _ in parsed.tags if name in ("svg", "img")]
    assert sorted(drawn) == ["img", "svg", "svg"]
    assert "of 9 runs" not in parsed.text


def test_a_variant_with_the_losses_of_the_reference_has_no_effect(finished):
    comparison, results = finished
    for seed in (1, 2, 3):
        losses = results["baseline", seed]["losses"]
        results["kha_linear", seed]["losses"] = list(losses)
    results["kha_linear", 3]["losses"][5] = None
    line = "kha_linear: training loss +0.0000 ± 0.0000 (no effect: every loss is equal)"
    assert summarize(build_report(comparison, results))[1] == line
    results["kha_linear", 2]["losses"][7] += 1e-6  # far from the final losses
    line = "kha_linear: training loss +0.0000 ± 0.0000 (no difference shown)"
    assert summarize(build_report(comparison, results))[1] == line


def test_null_runs_are_the_floor_of_both_losses(tmp_path):
    """Held out, kha_mlp gains 0.003 ± 0.0005 where null runs are 0.004 from the baseline."""
    variants = parse_variants("baseline,kha_mlp")
    planned = plan_comparison(
        get_recipe("quickstart"),
        variants,
        3,
        output=tmp_path,
        overrides=["--mock-data"],
        null=True,
    )
    shifts = {
        "baseline": (0, 0, 0),
        "null": (4, -4, 4),
        "kha_mlp": (-3, -3.2, -2.8),
    }
    results = {}
    for trial in planned.trials:
        name = trial.variant.name
        seed = trial.seed
        gain = 0.05 if name == "kha_mlp" else 0
        result = make_result(trial.variant, seed, gain=gain)
        result["held_out"] = 2 + seed + shifts[name][seed - 1] / 1000
        results[name, seed] = result
    report = build_report(planned, results)
    assert report["floor"]["held_out"] == pytest.approx(
        {"rms": 0.004, "largest": 0.004, "seeds": 3}
    )
    assert report["floor"]["loss"] == {"rms": 0, "largest": 0, "seeds": 3}
    rows = Parsed(render_page(report, {})).tables["Final loss"][1:]
    assert [row[3] for row in rows] == ["reference", "the floor", "lower"]
    assert [row[6] for row in rows] == ["–", "the floor", "below the floor"]
    assert rows[2][5] == "-0.0030 ± 0.0005"


def test_an_unfinished_comparison_reports_the_state_of_each_run(finished):
    comparison, results = finished
    finished_runs = {
        ("baseline", 1): results["baseline", 1],
        ("kha_mlp", 1): results["kha_mlp", 1],
    }
    failures = {"kha_linear-seed1": "failed: rank 0 was killed by SIGKILL (out of memory?)"}
    report = build_report(comparison, finished_runs, failures=failures)
    parsed = Parsed(render_page(report, {}))
    assert "2 of 9 runs have finished" in parsed.text
    assert [row[0] for row in parsed.tables["Final loss"][1:]] == ["baseline", "kha_mlp"]
    assert parsed.tables["Final loss"][2][2:4] == ["-0.0510", "one seed: no interval"]
    states = [row[-1] for row in parsed.tables["Runs"][3:5]]
    assert states == [failures["kha_linear-seed1"], "not trained yet"]
    json.dumps(report, allow_nan=False)
    del finished_runs["baseline", 1]
    report = build_report(comparison, finished_runs)
    without_reference = Parsed(render_page(report, {}))
    assert without_reference.tables["Final loss"][1][2:4] == ["–", "not paired yet"]


def test_every_string_is_escaped_and_no_resource_is_loaded(finished):
    report = build_report(*finished)
    report |= {
        "recipe": EVIL,
        "description": EVIL,
        "reference": EVIL,
        "note": EVIL,
    }
    report |= {
        "devices": [EVIL],
        "command": [EVIL],
        "versions": {EVIL: EVIL},
    }
    first, second, *_ = report["variants"]
    first["name"] = EVIL
    second["knocks"] = EVIL
    second["cost"] = {"uncounted": EVIL, "unfused": EVIL}
    second["matrices"][0] |= {"projection": EVIL, "variant": EVIL}
    report["runs"][0] |= {"state": EVIL, "variant": EVIL}
    text = render_page(report, {"kha_mlp-seed1/x.png": b"png"})
    parsed = Parsed(text)
    assert "<script" not in text
    assert parsed.text.count(EVIL) >= 8
    sources = []
    policies = []
    for _, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "data"):
            if name in attributes:
                sources.append(attributes[name])
        if "http-equiv" in attributes:
            policies.append(attributes["content"])
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "@import" not in text
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
