"""A checkpoint that two real ranks wrote, for all tests of this folder."""

import shutil

import pytest

from kha_megatron.config import KHAConfig
from tests.conversion.checkpoints import save_gpt

KHA = KHAConfig(query="linear", key="gate", value="mlp")


@pytest.fixture(scope="session")
def dense(ranks, tmp_path_factory):
    """Three homogeneous layers on TP=2: the save folder and each rank's parameters."""
    folder = tmp_path_factory.mktemp("dense") / "save"
    layout = {"tensor_model_parallel_size": 2}
    args = {"rotary_base": 10000, "spec": None}
    return folder, ranks(save_gpt, 2, str(folder), KHA, layout, {"num_layers": 3}, args)


@pytest.fixture
def copy(dense, tmp_path):
    """A copy of the dense save folder, to be damaged."""
    return shutil.copytree(dense[0], tmp_path / "save")
