"""Fixtures for runs that are killed, run out of disk space, or load damaged files."""

import pytest

from tests.entry import run
from tests.faults.jobs import arguments, until


@pytest.fixture(scope="session")
def entry():
    """Return the training entry point: ``entry(words, ranks) -> Ended``."""
    return run


@pytest.fixture(scope="session")
def saved(entry, tmp_path_factory):
    """Return a ``--save`` directory with iterations 1 and 2 of the job on two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "save"
    run = entry(arguments(folder, *until(2)), 2)
    assert run.codes == [0, 0], run.output[-3000:]
    return folder
