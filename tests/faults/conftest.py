"""Fixtures for runs that are killed, starved or poisoned."""

import pytest

from tests.entry import run


@pytest.fixture(scope="session")
def entry():
    """The training entry point: ``entry(words, ranks) -> Ended``."""
    return run
