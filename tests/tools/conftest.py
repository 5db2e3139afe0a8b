"""The benchmarks of ``tools/``, which are scripts beside one another and no package."""

import contextlib
import importlib
import io
import sys
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
        patch.syspath_prepend(TOOLS)  # the rank begins with this process's path
        pool = RankPool()
        pool(mend, 1)
    yield lambda case, *args: pool(case, 1, *args, timeout=300)[0]
    pool.close()


@pytest.fixture
def tool(monkeypatch):
    """Imports a tool into this process: ``tool("bench_layer")``, which must not need Megatron."""
    monkeypatch.syspath_prepend(TOOLS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if Path(file).parent == TOOLS:
            del sys.modules[name]


def run_tool(name: str, words: list[str]) -> tuple[int, str]:
    """Exit code and standard output of a benchmark within this process."""
    module = importlib.import_module("bench")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = module.main([name, *words])
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue()
