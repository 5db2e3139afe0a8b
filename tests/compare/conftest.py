"""A comparison whose runs are numbers, and the browser."""

import math
import random
from dataclasses import dataclass, field

import pytest

from kha_megatron.compare import parse_variants, plan, summarise
from kha_megatron.recipes import get_recipe
from tests.compare import browser as chromium

ITERATIONS = 200
COST = {"total": 1_800_000, "active": 900_000, "kha": 12_288, "flops": 6.5e6, "kha_flops": 6.5e4}


def result(variant, seed: int, *, gain: float = 0.0) -> dict:
    """What ``result.json`` of a run might hold; seeds differ more than variants."""
    noise = random.Random(seed)
    losses = [
        2 + 4 / (1 + i / 10) + 0.3 * seed + noise.gauss(0, 0.02) - gain * min(1, i / 50)
        for i in range(ITERATIONS)
    ]
    matrices = [
        {
            "projection": p,
            "variant": v,
            "matrix": "proj",
            "picture": f"{p}_proj.png",
            "layers": [
                {"layer": n, "diagonal_mean": 0.9, "off_diagonal_share": 0.1, "distance": math.e}
                for n in range(3)
            ],
        }
        for p, v in variant.kha.variants.items()
    ]
    return {
        "variant": variant.name,
        "seed": seed,
        "losses": losses,
        "seconds_per_step": 0.5 + gain,
        "cost": dict(COST),
        "device": "CPU, 2 cores",
        "starts": 1,
        "matrices": matrices,
    }


@dataclass
class Made:
    """A plan with invented results."""

    comparison: object
    results: dict
    report: dict = field(init=False)

    def __post_init__(self):
        self.report = summarise(self.comparison, self.results, command=["kha-megatron", "compare"])


@pytest.fixture
def made(tmp_path):
    """Two variants against the baseline, three seeds each: kha_mlp is better by 0.05."""
    variants = parse_variants("baseline,kha_mlp,kha_linear")
    comparison = plan(
        get_recipe("quickstart"),
        variants,
        3,
        output=tmp_path / "out",
        overrides=["--mock-data", "--train-iters", str(ITERATIONS)],
    )
    gains = {"baseline": 0.0, "kha_mlp": 0.05, "kha_linear": 0.0}
    results = {
        (run.variant.name, run.seed): result(
            run.variant,
            run.seed,
            gain=gains[run.variant.name] + 0.001 * run.seed * (run.variant.name == "kha_mlp"),
        )
        for run in comparison.runs
    }
    return Made(comparison, results)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; skips where the machine has none: tests install nothing."""
    if (program := chromium.find()) is None:
        pytest.skip(
            f"the report was NOT opened in a browser: none of {', '.join(chromium.NAMES)} is on "
            "PATH (Debian: apt-get install chromium-headless-shell)"
        )
    found = chromium.Browser(program)
    yield found
    found.close()
