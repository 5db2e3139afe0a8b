"""Ranks with Megatron-Bridge and the test double of Transformer Engine."""

from importlib.util import find_spec

import pytest

from tests.bridge.models import CONFIGS, save
from tests.distributed.launcher import RankPool


@pytest.fixture(scope="session")
def bridge_ranks():
    """Return ``ranks`` with the test double of Transformer Engine."""
    if find_spec("megatron.bridge") is None:
        pytest.skip("NOT TESTED: needs Megatron-Bridge. Run `make test-bridge`.")
    from tests import transformer_engine

    pool = RankPool(install=transformer_engine.install)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a Hugging Face directory of every model in ``models.CONFIGS``, by name."""
    root = tmp_path_factory.mktemp("hf")
    for name in CONFIGS:
        save(root / name, name)
    return {name: str(root / name) for name in CONFIGS}
