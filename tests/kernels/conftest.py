"""Processes in which the kernels run."""

import pytest
from bench_tune import use_chosen_tilings

from kha_megatron.heads.kernels import fused
from tests.kernels.interpreter import interpreter_of

use_chosen_tilings()


@pytest.fixture(scope="session")
def usable_triton():
    """Skip if the kernels cannot use the installed Triton."""
    if why := fused.triton_reason():
        pytest.skip(f"NOT TESTED: {why}")


@pytest.fixture(scope="session")
def interpreter(usable_triton):
    """Run a function in a process with Triton's interpreter: ``interpreter(case, *args)``."""
    with interpreter_of() as run:
        yield run
