"""The benchmarks of ``tools/``, which are scripts beside one another and no package."""

import contextlib
import importlib
import io
from pathlib import Path

import pytest

from tests.distributed.launcher import RankPool
from tools.interpreting import mend

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="session")
def interpreting_rank():
    """One rank on the CPU runtime, in which Triton interprets its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # Triton looks once, when it is imported
        pool = RankPool()
        pool(mend, 1)
    yield lambda case, *args: pool(case, 1, *args, timeout=300)[0]
    pool.close()


@pytest.fixture
def tool():
    """Imports a tool into this process: ``tool("bench_layer")``, which must not need Megatron."""
    return importlib.import_module


def run_tool(name: str, words: list[str]) -> tuple[int, str]:
    """Exit code and standard output of a benchmark within this process."""
    module = importlib.import_module("bench")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = module.main([name, *words])
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue()
