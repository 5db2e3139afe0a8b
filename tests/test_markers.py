"""Check which cases ``-m fast`` selects."""

import pytest


def is_fast(request):
    return request.node.get_closest_marker("fast") is not None


@pytest.mark.fast
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_the_first_case_of_a_fast_test_is_fast(request, number, letter):
    assert is_fast(request) == (number == 1 and letter == "a")


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.fast), 3])
def test_a_fast_case_is_fast(request, number):
    assert is_fast(request) == (number == 2)
