"""Multi-head Explicit Attention of `examples/mechanisms/mea.py`."""

from pathlib import Path

import pytest
import torch

from kha_megatron.heads import HeadSizes, registry
from kha_megatron.testing import check_mechanism
from tests.hf.conftest import SIZES, check_layer_against_oracle, make_config, make_model
from tests.mechanisms.formulas import attend, project

FILE = Path(__file__).parents[2] / "examples" / "mechanisms" / "mea.py"


@pytest.fixture(autouse=True)
def mea(monkeypatch):
    """Register MEA in this process only for one test."""
    monkeypatch.setenv(registry.FILES_VARIABLE, str(FILE))
    return registry.mechanism_types()["mea"]


@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_mea_follows_all_rules(mea, norm, forked_check):
    """Without the norm, this includes that the outputs start bit-identical to the baseline's."""
    check_mechanism(mea, norm=norm)


def test_heads_that_cannot_be_viewed_are_found(tmp_path, monkeypatch, forked_check):
    """Megatron's unfused attention fails with them under TP, unless it repeats the KV heads."""
    copied = FILE.read_text()
    assert "own.contiguous()" in copied
    (tmp_path / "views.py").write_text(copied.replace("own.contiguous()", "own"))
    monkeypatch.setenv(registry.FILES_VARIABLE, str(tmp_path / "views.py"))
    message = "a mask and dropout fails under TP 2 and 8 KV heads without QK-norm.* `apply` contig"
    with pytest.raises(AssertionError, match=message):
        check_mechanism(registry.mechanism_types()["mea"], norm=False)


def normalize(heads):
    return heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_layer_computes_the_formula():
    config = make_config(kha_mea={}, use_qk_norm=False)

    def formula(layer, hidden):
        query, key, value = project(layer, hidden, config.head_dim)
        key = torch.einsum("bthd,hg->btgd", key, layer.mea_key.weight)
        value = torch.einsum("bthd,hg->btgd", value, layer.mea_value.weight)
        found = normalize(attend(query, key, value)) * layer.mea_norm.weight
        return found.flatten(2) @ layer.o_proj.weight.T

    check_layer_against_oracle(config, formula)


def test_parameters_are_counted(mea):
    sizes = HeadSizes(query_heads=6, kv_heads=3, head_dim=10, hidden_size=22)
    added = make_model(kha_mea={}).num_parameters() - make_model().num_parameters()
    assert added == SIZES["num_hidden_layers"] * mea().parameters(sizes)
