"""Check which versions of Megatron-Core are accepted, and that a missing name raises an error."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import kha_megatron
from kha_megatron import announcements
from kha_megatron.errors import VersionError
from kha_megatron.mcore import compat, patches

PYPROJECT = Path(kha_megatron.__file__).parents[1] / "pyproject.toml"


def check(monkeypatch, version):
    """Run ``check_version`` as if Megatron-Core ``version`` were installed."""
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    return compat.check_version.__wrapped__()


@pytest.mark.parametrize("version", ["0.18.2", "0.9.0"])
def test_an_older_version_is_refused(monkeypatch, version):
    with pytest.raises(
        VersionError,
        match=rf"but {re.escape(version)} is installed. Run `pip install",
    ):
        check(monkeypatch, version)


@pytest.fixture
def nothing_logged(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(announcements, "_logged", set())


@pytest.mark.parametrize("version", ["0.20.0rc1", "0.20.0", "1.0.3"])
def test_a_version_that_was_not_tested_warns_once_on_rank_0(
    monkeypatch,
    capsys,
    nothing_logged,
    version,
):
    for _ in range(2):
        check(monkeypatch, version)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"WARNING: megatron-core {version} is installed" in line
    assert "tested with 0.19.2 and the main branch of 22 August 2026 (0.20.0)" in line
    monkeypatch.setattr(announcements, "_logged", set())
    monkeypatch.setenv("RANK", "1")
    check(monkeypatch, version)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2"])
def test_a_tested_version_does_not_warn(monkeypatch, capsys, nothing_logged, version):
    assert check(monkeypatch, version) == version
    assert capsys.readouterr().err == ""


def test_the_newest_tested_release_is_the_pinned_one():
    pins = PYPROJECT.with_name("constraints.txt").read_text()
    pinned = re.search(r"^megatron-core==(\S+)", pins, re.MULTILINE)[1]
    assert compat.TESTED.startswith(f"{pinned} ")
    assert pinned.startswith(".".join(map(str, compat.NEWEST_TESTED)) + ".")


def test_the_extra_installs_the_supported_versions():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    (requirement,) = project["optional-dependencies"]["megatron"]
    assert f"pip install '{requirement}'" == compat.INSTALL


def import_named_spec_without(module, name):
    """Import a spec as Megatron's ``--spec`` does, after Megatron has lost a name."""
    from megatron.core.transformer.spec_utils import import_module

    from kha_megatron import mcore

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(importlib.import_module(module), name)
        for loaded in [n for n in sys.modules if n.startswith("kha_megatron.mcore.")]:
            if not loaded.endswith(".compat"):
                patch.delitem(sys.modules, loaded)
                patch.delattr(mcore, loaded.rpartition(".")[2], raising=False)
        try:
            return repr(import_module(("kha_megatron.mcore.specs", "kha_mlp")))
        except VersionError as error:
            return str(error)


def test_a_named_spec_that_cannot_be_imported_raises(ranks):
    """Megatron answers an ImportError by training plain attention."""
    name = "copy_to_tensor_model_parallel_region"
    message = ranks(import_named_spec_without, 1, "megatron.core.tensor_parallel", name)[0]
    assert "is not compatible with kha_megatron" in message
    assert name in message


def test_torchs_adam_continues_at_the_step_of_transformer_engines(monkeypatch):
    """Transformer Engine saves the step of each group of parameters, torch that of a parameter."""
    adam = torch.optim.Adam
    monkeypatch.setattr(adam, "load_state_dict", adam.load_state_dict)  # patched until the end
    patches.let_adams_exchange_states()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    trained = torch.optim.AdamW([weight])
    resumed = torch.optim.AdamW([weight])
    trained.step()
    saved = trained.state_dict()
    del saved["state"][0]["step"]
    saved["param_groups"][0]["step"] = 7
    resumed.load_state_dict(saved)
    assert resumed.state[weight]["step"] == 7
    resumed.step()
    assert resumed.state[weight]["step"] == 8


LOCAL_NORM = "decoder.layers.0.input_layernorm.weight"
FUSED_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def rename_norm(stored):
    """Return the name under which a local norm is loaded from a checkpoint with ``stored``."""
    from megatron.core import dist_checkpointing

    from tests.distributed import models

    models.initialize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist_checkpointing, "load", lambda state, directory: state)
        patch.setattr(patches, "_stored_names", lambda directory: {stored})
        patches.load_from_either(scales=False)
        weight = dist_checkpointing.ShardedTensor.from_rank_offsets(LOCAL_NORM, torch.ones(3))
        state = dist_checkpointing.load({"weight": weight}, "checkpoint")
    return state["weight"].key


@pytest.mark.parametrize("stored", [LOCAL_NORM, FUSED_NORM])
def test_a_local_norm_loads_from_the_name_that_a_checkpoint_has(ranks, stored):
    """Transformer Engine fuses it into the QKV projection."""
    assert ranks(rename_norm, 1, stored) == [stored]
