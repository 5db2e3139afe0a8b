"""Where the kernels run, and what was compiled before."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from kha_megatron.ops import fused
from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def usable_triton():
    """Skip where the kernels refuse the Triton that is here."""
    if why := fused.triton_refusal():
        pytest.skip(f"NOT TESTED: {why}")


@pytest.fixture(scope="session")
def interpreter(usable_triton):
    """A process in which Triton interprets: ``interpreter(case, *args) -> its result``."""
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture(scope="session")
def reports(pytestconfig, usable_triton):
    """What the compiler says of each of some things: ``reports(things, compile) -> by thing``.

    From pytest's cache where an earlier run has compiled it and neither the kernels nor what
    compiles them has changed since; ``compile`` gets the others.
    """
    from tools.cross_compile import Report, fingerprint

    cache, key = getattr(pytestconfig, "cache", None), "kernels/reports"
    kept = cache.get(key, {}) if cache else {}
    known = kept.get("reports", {}) if kept.get("of") == fingerprint() else {}

    def ask(things: Iterable, compile_them: Callable[[list], Mapping]) -> dict:
        missing = [thing for thing in things if str(thing) not in known]
        if missing:
            made = compile_them(missing)
            known.update({str(thing): list(report) for thing, report in made.items()})
            if cache:
                cache.set(key, {"of": fingerprint(), "reports": known})
        return {thing: Report(*known[str(thing)]) for thing in things}

    return ask
