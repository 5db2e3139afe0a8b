"""The benchmarks of ``tools/``, which are scripts beside one another and no package."""

import contextlib
import importlib
import io
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


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
