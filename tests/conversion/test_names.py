"""Read checkpoints of Transformer Engine, local modules and HybridModel."""

import pytest

from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
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


@pytest.mark.parametrize("name", ["kha, sparse", "qwen3, tied"])
def test_a_hybrid_model_of_gpt_layers_is_read(tmp_path, name):
    make(CONFIGS[name]).save_pretrained(tmp_path / "hf")
    to_megatron.plan_import(tmp_path / "hf", divisible_by=8).write(tmp_path / "save")
    checkpoint = MegatronCheckpoint.open(tmp_path / "save")
    layers = CONFIGS[name].num_hidden_layers
    kinds = getattr(CONFIGS[name], "mlp_layer_types", ["dense"] * layers)
    pattern = "".join("*" + {"dense": "-", "sparse": "E"}[kind] for kind in kinds)

    tensors = {}
    for key in checkpoint.keys():  # noqa: SIM118
        if not key.startswith(LAYERS):
            tensors[key.replace("final_layernorm", "final_norm")] = checkpoint.tensor(key)
            continue
        suffix = key.removeprefix(LAYERS)
        first, _, rest = suffix.partition(".")
        found = [int(first)] if first.isdecimal() else range(layers)
        suffix = rest if first.isdecimal() else suffix
        for layer in found:
            behind = not suffix.startswith(("self_attention.", "input_layernorm."))
            moved = f"{LAYERS}{2 * layer + behind}.{suffix}"
            tensors[moved] = checkpoint.layer_tensor(layer, suffix)
    changes = {"hybrid_layer_pattern": pattern, "num_layers": 2 * layers}
    target = save(tmp_path / "hybrid", 1, tensors, **checkpoint.args | changes)

    to_hf.plan_export(target, architecture=CONFIGS[name].model_type).write(tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
