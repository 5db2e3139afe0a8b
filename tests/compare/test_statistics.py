"""Against values from tables and by hand."""

import math

import pytest

from kha_megatron.compare.statistics import (
    binned,
    estimate,
    final_loss,
    floor,
    paired,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "table"),  # any printed table of Student's t, two-sided 95 %
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, table):
    assert t_quantile(freedom) == pytest.approx(table, abs=5.1e-4)


def test_other_confidences_and_many_degrees():
    assert t_quantile(5, 0.99) == pytest.approx(4.032, abs=5.1e-4)
    assert t_quantile(1, 0.5) == pytest.approx(1.0, abs=1e-12)  # tan(45 degrees)
    assert t_quantile(2, 0.5) == pytest.approx(math.sqrt(2 / 3), abs=1e-12)
    assert t_quantile(1001) == pytest.approx(1.962, abs=5e-4)


def test_mean_and_interval_by_hand():
    found = estimate([2.0, 3.0, 4.0])  # standard deviation 1
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert found.seeds == 3
    assert estimate([2.5]).half_width is None
    assert estimate([1.0, 1.0]).half_width == 0.0


def test_pairs_take_out_what_the_seed_did():
    """Seeds differ by whole nats, the variants by 0.02 with a scatter of 0.001."""
    baseline = [3.0, 4.0, 5.0]
    found = paired([2.979, 3.98, 4.981], baseline)
    assert found.mean == pytest.approx(-0.02)
    assert found.half_width == pytest.approx(4.302653 * 0.001 / math.sqrt(3), abs=1e-8)
    assert found.side == -1
    assert paired(baseline, [2.979, 3.98, 4.981]).side == 1
    assert paired([1.0, 2.0], [1.1, 1.9]).side == 0
    assert paired([1.0], [9.0]).side == 0  # one seed proves nothing


def test_the_floor_is_how_far_null_runs_moved():
    found = floor([1.003, 2.0, 2.996], [1.0, 2.0, 3.0])
    assert found.rms == pytest.approx(0.005 / math.sqrt(3))
    assert found.largest == pytest.approx(0.004)
    assert found.seeds == 3


def test_final_loss_is_of_the_last_twentieth():
    assert final_loss([9.0] * 95 + [1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
    assert final_loss([9.0, 1.0]) == 1.0
    assert final_loss([9.0] * 20 + [1.0]) == 5.0  # 1.05 iterations are two


def test_bins():
    assert binned([1.0, 2.0, 3.0], 10) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert binned([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [(1.5, 2.0), (3.5, 6.0), (5.0, 9.0)]
    assert len(binned([0.0] * 1001, 150)) <= 150
