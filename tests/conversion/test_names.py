"""Read checkpoints of Transformer Engine, local modules and HybridModel."""

from argparse import Namespace

import pytest

from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.conversion import to_hf, to_megatron
from tests.conversion.models import CONFIGS, assert_same_tensors, make

MLP = "mlp.linear_fc1.layer_norm_weight"


def rewrite(save, target, is_dropped):
    """Copy a checkpoint without the tensors for which ``is_dropped(key)`` is true."""
    checkpoint = MegatronCheckpoint.open(save)
    target.mkdir(parents=True)
    with TorchDistWriter(target) as writer:
        for key, info in checkpoint.keys().items():
            if not is_dropped(key):
                offsets = (0,) * len(info.shape)
                writer.write(key, checkpoint.tensor(key), shape=info.shape, offsets=offsets)
        saved = {k: v for k, v in checkpoint.args.items() if not isinstance(v, Record)}
        common = {"args": Namespace(**saved), "iteration": 0}
        writer.close(common | {"checkpoint_version": 3.0}, checkpoint.identity())
    return target


@pytest.fixture(params=["kha, sparse", "deepseek_v3", "kha, gta"])
def model(request, tmp_path):
    """Return a configuration, and a directory with its model and Megatron checkpoint."""
    make(CONFIGS[request.param]).save_pretrained(tmp_path / "hf")
    to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "save")
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
    held = MegatronCheckpoint.open(folder / "save").keys()

    def is_dropped(key):
        if key.endswith(tuple(f".self_attention.{name}" for name in names)):
            return True
        return key.endswith(f".{dropped}") and key.removesuffix(dropped) + other in held

    rewritten = rewrite(folder / "save", folder / "iter_0000001", is_dropped)
    assert len(MegatronCheckpoint.open(rewritten).keys()) < len(held) or family == "kha"
    to_hf.plan(rewritten, architecture=family).write(folder / "back")
    assert_same_tensors(folder / "hf", folder / "back")


@pytest.mark.parametrize("name", ["kha, sparse", "qwen3, tied"])
def test_a_hybrid_model_of_gpt_layers_is_read(tmp_path, name):
    make(CONFIGS[name]).save_pretrained(tmp_path / "hf")
    to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "save")
    checkpoint = MegatronCheckpoint.open(tmp_path / "save")
    layers = CONFIGS[name].num_hidden_layers
    kinds = getattr(CONFIGS[name], "mlp_layer_types", ["dense"] * layers)
    pattern = "".join("*" + {"dense": "-", "sparse": "E"}[kind] for kind in kinds)

    target = tmp_path / "iter_0000001"
    target.mkdir()
    with TorchDistWriter(target) as writer:

        def write(key, tensor):
            writer.write(key, tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())

        for key in checkpoint.keys():  # noqa: SIM118
            if not key.startswith(LAYERS):
                write(key.replace("final_layernorm", "final_norm"), checkpoint.tensor(key))
                continue
            suffix = key.removeprefix(LAYERS)
            first, _, rest = suffix.partition(".")
            found = [int(first)] if first.isdecimal() else range(layers)
            suffix = rest if first.isdecimal() else suffix
            for layer in found:
                behind = not suffix.startswith(("self_attention.", "input_layernorm."))
                tensor = checkpoint.layer_tensor(layer, suffix)
                write(f"{LAYERS}{2 * layer + behind}.{suffix}", tensor)
        args = {"hybrid_layer_pattern": pattern, "num_layers": 2 * layers}
        common = {"args": Namespace(**checkpoint.args | args), "iteration": 1}
        writer.close(common | {"checkpoint_version": 3.0}, checkpoint.identity())

    planned = to_hf.plan(target, architecture=CONFIGS[name].model_type)
    planned.write(tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
