"""Ranks with Megatron-Bridge and the test double of Transformer Engine."""

from importlib.util import find_spec

import pytest

from tests.bridge.models import CONFIGS, save


@pytest.fixture(scope="session")
def bridge_ranks(ranks_with_engine):
    """Return ``ranks`` with the test double of Transformer Engine."""
    if find_spec("megatron.bridge") is None:
        pytest.skip("NOT TESTED: needs Megatron-Bridge. Run `make test-bridge`.")
    return ranks_with_engine


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a Hugging Face directory of every model in ``models.CONFIGS``, by name."""
    root = tmp_path_factory.mktemp("hf")
    for name in CONFIGS:
        save(root / name, name)
    return {name: str(root / name) for name in CONFIGS}
