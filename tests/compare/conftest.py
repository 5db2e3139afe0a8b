"""A planned comparison with invented results."""

import random

import pytest

from kha_megatron.compare.trials import plan_comparison
from kha_megatron.compare.variants import parse_variants
from kha_megatron.recipes import get_recipe

ITERATIONS = 200
COST = {
    "total": 1_800_000,
    "active": 900_000,
    "kha": 12_288,
    "flops": 6.5e6,
    "kha_flops": 6.5e4,
}


def make_result(variant, seed: int, *, gain: float = 0.0) -> dict:
    """Return a possible ``result.json``; seeds differ more than variants."""
    noise = random.Random(seed)
    losses = []
    for i in range(ITERATIONS):
        loss = 2 + 4 / (1 + i / 10) + 0.3 * seed + noise.gauss(0, 0.02)
        losses.append(loss - gain * min(1, i / 50))
    layer = {
        "layer": 0,
        "diagonal_mean": 0.9,
        "off_diagonal_share": 0.1,
        "distance": 2.718,
    }
    matrices = []
    for projection, knock in variant.kha.variants.items():
        matrices.append(
            {
                "projection": projection,
                "variant": knock,
                "matrix": "proj",
                "picture": "x.png",
                "layers": [layer],
            }
        )
    return {
        "variant": variant.name,
        "seed": seed,
        "losses": losses,
        "held_out": None,
        "seconds_per_step": 0.5 + gain,
        "cost": dict(COST),
        "device": "CPU, 2 cores",
        "starts": 1,
        "matrices": matrices,
    }


@pytest.fixture
def finished(tmp_path):
    """Return three seeds of the baseline, kha_linear and kha_mlp, which gains 0.051 to 0.053.

    kha_linear gains -0.001, 0 and 0.001.
    """
    comparison = plan_comparison(
        get_recipe("quickstart"),
        parse_variants("baseline,kha_mlp,kha_linear"),
        3,
        output=tmp_path / "out",
        overrides=["--mock-data", "--train-iters", str(ITERATIONS)],
    )
    results = {}
    for trial in comparison.trials:
        name = trial.variant.name
        gains = {
            "baseline": 0.0,
            "kha_mlp": 0.05 + 0.001 * trial.seed,
            "kha_linear": 0.001 * (trial.seed - 2),
        }
        results[name, trial.seed] = make_result(
            trial.variant,
            trial.seed,
            gain=gains[name],
        )
    return comparison, results
