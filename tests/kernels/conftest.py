"""Where the kernels run."""

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter():
    """A process in which Triton interprets: ``interpreter(case, *args) -> its result``."""
    pytest.importorskip("triton", reason="Triton is not installed: its kernels were not tested")
    process = Interpreter()
    yield process
    process.close()
