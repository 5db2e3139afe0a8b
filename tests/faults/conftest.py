"""Fixtures for runs that are killed, starved or poisoned."""

import pytest

from tests.faults.entry import Entry


@pytest.fixture(scope="session")
def entry():
    """The training entry point: ``entry(words, ranks) -> Ended``."""
    runner = Entry()
    yield runner
    runner.close()
