"""Statistics against printed tables and values computed by hand."""

import pytest

from kha_megatron.compare.statistics import average_bins, compute_final_loss, estimate, t_quantile


@pytest.mark.fast
@pytest.mark.parametrize(
    ("freedom", "table"),  # any printed table of Student's t, two-sided 95 %
    [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_students_t_match_printed_tables(freedom, table):
    assert t_quantile(freedom) == pytest.approx(table, abs=5.1e-4)


def test_an_interval_that_excludes_0_has_a_sign():
    samples = [-0.021, -0.02, -0.019], [0.021, 0.02, 0.019], [-0.1, 0.1], [-8.0]
    assert [estimate(values).sign for values in samples] == [-1, 1, 0, 0]


def test_final_loss_is_the_mean_of_the_last_twentieth():
    assert compute_final_loss([9.0] * 95 + [1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
    assert compute_final_loss([9.0, 1.0]) == 1.0
    assert compute_final_loss([9.0] * 20 + [1.0]) == 5.0  # 1.05 iterations are two


def test_bins_average_neighbouring_losses():
    assert average_bins([1.0, 2.0, 3.0], 10) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert average_bins([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [(1.5, 2.0), (3.5, 6.0), (5.0, 9.0)]
    assert len(average_bins([0.0] * 1001, 150)) <= 150
