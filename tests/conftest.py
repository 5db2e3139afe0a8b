"""Fixtures for all tests."""

import pytest

from tests.distributed.launcher import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Run a function on n gloo ranks: ``ranks(case, n, *args) -> [result of each rank]``."""
    pool = RankPool()
    yield pool
    pool.close()
