"""Read checkpoints of Transformer Engine and of local modules."""

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf, to_megatron
from tests.checkpoint.saved import save
from tests.conversion.models import CONFIGS, assert_same_tensors, make

MLP = "mlp.linear_fc1.layer_norm_weight"


@pytest.fixture(params=["kha, sparse", "deepseek_v3", "kha, gta"])
def model(request, tmp_path):
    """Return a configuration, and a directory with its model and Megatron checkpoint."""
    make(CONFIGS[request.param]).save_pretrained(tmp_path / "hf")
    to_megatron.plan_import(tmp_path / "hf", divisible_by=8).write(tmp_path / "save")
    return CONFIGS[request.param], tmp_path


BACKENDS = {
    "Transformer Engine": ("q_layernorm.weight", "kv_layernorm.weight"),
    "local": ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"),
}
"""Norms of latent attention that the other backend writes."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_both_backends_are_read(model, backend):
    config, folder = model
    family, latent = config.model_type, getattr(config, "kv_lora_rank", None) is not None
    names = BACKENDS[backend] if latent else ()
    dropped, other = MLP, "pre_mlp_layernorm.weight"
    if backend == "local":
        dropped, other = other, dropped
    checkpoint = MegatronCheckpoint.open(folder / "save")
    held = checkpoint.keys()

    def is_dropped(key):
        if key.endswith(tuple(f".self_attention.{name}" for name in names)):
            return True
        return key.endswith(f".{dropped}") and key.removesuffix(dropped) + other in held

    tensors = {key: checkpoint.tensor(key) for key in held if not is_dropped(key)}
    assert len(tensors) < len(held) or family == "kha"
    rewritten = save(folder / "rewritten", 1, tensors, **checkpoint.args)
    to_hf.plan_export(rewritten, architecture=family).write(folder / "back")
    assert_same_tensors(folder / "hf", folder / "back")
