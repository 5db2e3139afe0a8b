"""Fixtures of runs on several ranks."""

from dataclasses import replace

import pytest

from tests.distributed.parallelism import train
from tests.distributed.pieces import quantities


@pytest.fixture(scope="session")
def unsharded(ranks):
    """Return the quantities of a case in one process, for each configuration. Runs each once."""
    known = {}

    def run(case):
        twins = [replace(case.twin(), khas=(kha,)) for kha in case.khas]
        for twin in twins:
            if repr(twin) not in known:
                (result,) = ranks(train, 1, twin)[0]
                known[repr(twin)] = quantities([result])
        return [known[repr(twin)] for twin in twins]

    return run
