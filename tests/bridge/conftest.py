"""Ranks that see Transformer Engine and Megatron-Bridge, where both are installed."""

from importlib import metadata

import pytest

from tests.bridge.models import CONFIGS, save
from tests.distributed.launcher import RankPool


def _missing() -> str | None:
    for package in ("megatron-bridge", "transformer-engine"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return package
    return None


@pytest.fixture(scope="session")
def bridge_ranks():
    """``ranks`` with the test double of Transformer Engine."""
    if missing := _missing():
        pytest.skip(
            f"NOT TESTED: Megatron-Bridge's side, because {missing} is not installed: "
            "`make test-bridge` makes an environment that has it and runs these tests"
        )
    from tests import transformer_engine

    pool = RankPool(install=transformer_engine.install)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A Hugging Face folder of every model in ``models.CONFIGS``, by its name."""
    root = tmp_path_factory.mktemp("hf")
    for name in CONFIGS:
        save(root / name, name)
    return {name: str(root / name) for name in CONFIGS}
