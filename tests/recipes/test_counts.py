"""Parameters of the models that gate, mix and choose heads, to the digits that are printed of them.

Whole models as Megatron builds them are in ``test_paper.py``.
"""

import pytest

from kha_megatron.plan.counts import as_printed, count, flops
from kha_megatron.recipes import get_recipe
from kha_megatron.recipes.other_heads import MOH


def counted(name):
    run = get_recipe(name).run
    return count(run.model, run.kha)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gated/1.7b-28-baseline", "1.720B", "1.720B"),
        ("gated/1.7b-48-baseline", "1.706B", "1.706B"),
        ("gated/15b-baseline", "15.577B", "1.99B"),
        ("moh/table4-s-baseline", "185.617M", "185.617M"),
        ("moh/table4-s-75", "185.746M", "185.746M"),
        ("moh/table4-s-50", "185.746M", "185.746M"),
        ("moh/table4-b-baseline", "880.879M", "880.879M"),
        ("moh/table4-b-75", "881.543M", "881.543M"),
        ("moh/table4-b-50", "881.543M", "881.543M"),
    ],
)
def test_models(name, total, active):
    """Rounded, or cut as the papers do."""
    counts = counted(name)
    assert as_printed(counts.total, total)[0] == total
    assert as_printed(counts.active, active)[0] == active


@pytest.mark.parametrize("recipe", MOH, ids=lambda recipe: recipe.name)
def test_the_papers_digits(recipe):
    """Table A rounds the routers' 0.66M up to the next million."""
    counts = count(recipe.run.model, recipe.run.kha)
    for name in ("total", "active"):
        if name in recipe.paper:
            assert as_printed(getattr(counts, name), recipe.paper[name])[1] == "rounded"


def test_a_router_by_norms_has_no_parameters():
    assert counted("moh/llama3-8b-stage2").kha == 0


def test_what_skipped_heads_would_save():
    """Of LLM-B 4 of 16 heads: a quarter of the scores, and of W_Q and W_O, half of the weights."""
    run = get_recipe("moh/table4-b-75").run
    work = flops(run.model, run.kha, 2048)
    assert work.spared_scores == work.scores / 4
    assert work.spared_projections == work.projections / 8
    run = get_recipe("moh/llama3-8b-stage2").run  # whose router reads every query
    work = flops(run.model, run.kha, 8192)
    assert work.spared_scores == work.scores / 4
    assert work.spared_projections == 8192 * 32 * 8 * 2 * 128 * 4096


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
    """All layers of 24 x 2048 with 32 query and 4 KV heads of 128; what fills up is apart."""
    own = counted(f"gated/15b-{gate}").mechanisms
    assert as_printed(own["gate"], f"{millions}M")[0] == f"{millions}M"
    filled = {"output-head": 8, "value-head": 15}.get(gate, 0)  # to 16 rows a KV head
    assert own.get("filling", 0) == 24 * 4 * filled * 2048
