"""Parameters of the models that gate, mix and choose heads, to the digits that are printed of them.

Whole models as Megatron builds them are in ``test_paper.py``.
"""

import pytest

from kha_megatron.plan.counts import as_printed, count
from kha_megatron.recipes import get_recipe


def counted(name):
    run = get_recipe(name).run
    return count(run.model, run.kha)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gated/1.7b-28-baseline", "1.720B", "1.720B"),
        ("gated/1.7b-48-baseline", "1.706B", "1.706B"),
        ("gated/15b-baseline", "15.577B", "1.99B"),
    ],
)
def test_models(name, total, active):
    """Rounded, or cut as the papers do."""
    counts = counted(name)
    assert as_printed(counts.total, total)[0] == total
    assert as_printed(counts.active, active)[0] == active


@pytest.mark.parametrize(
    ("gate", "millions"),
    [
        ("output-element", "201.3"),
        ("query", "201.3"),
        ("output-head", "1.57"),
        ("value-element", "25.2"),
        ("key", "25.2"),
        ("value-head", "0.2"),
        ("dense", "100.7"),
    ],
)
def test_gates_of_the_15b_model(gate, millions):
    """All layers of 24 x 2048 with 32 query and 4 KV heads of 128."""
    run = get_recipe(f"gated/15b-{gate}").run
    sizes = run.model.head_sizes
    numbers = [
        *(t.size for t in run.kha.tensors(sizes)),
        *(r.size(sizes) for r in run.kha.rows(sizes)),
    ]
    assert as_printed(24 * sum(numbers), f"{millions}M")[0] == f"{millions}M"
