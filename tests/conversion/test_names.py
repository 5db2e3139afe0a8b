"""Read checkpoints of Transformer Engine, local modules and HybridModel."""

from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file

from kha_megatron.checkpoint.megatron import LAYERS, MegatronCheckpoint
from kha_megatron.checkpoint.torch_dist import Record
from kha_megatron.checkpoint.torch_dist_writer import TorchDistWriter
from kha_megatron.conversion import to_hf, to_megatron
from tests.conversion.models import CONFIGS, make

INPUT = "self_attention.linear_qkv.layer_norm_weight"
MLP = "mlp.linear_fc1.layer_norm_weight"


def rewrite(save, target, rename, args=None):
    """Copy a checkpoint with each tensor under the names that ``rename`` returns."""
    checkpoint = MegatronCheckpoint.open(save)
    target.mkdir(parents=True)
    with TorchDistWriter(target) as writer:
        for key, info in checkpoint.keys().items():
            for name in rename(key):
                offsets = (0,) * len(info.shape)
                writer.write(name, checkpoint.tensor(key), shape=info.shape, offsets=offsets)
        saved = {k: v for k, v in checkpoint.args.items() if not isinstance(v, Record)}
        common = {"args": Namespace(**saved | (args or {})), "iteration": 0}
        writer.close(common | {"checkpoint_version": 3.0}, checkpoint.identity())
    return target


def _equal(one, other):
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(params=["kha, sparse", "deepseek_v3", "kha, gta"])
def model(request, tmp_path):
    """Return a configuration, and a directory with its model and Megatron checkpoint."""
    make(CONFIGS[request.param]).save_pretrained(tmp_path / "hf")
    to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "save")
    return CONFIGS[request.param], tmp_path


BACKENDS = {
    "Transformer Engine": {"self_attention.q_layernorm.weight": None}
    | {"self_attention.kv_layernorm.weight": None},
    "local": {
        "self_attention.linear_q_up_proj.layer_norm_weight": None,
        "self_attention.linear_kv_up_proj.layer_norm_weight": None,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_both_backends_are_read(model, backend):
    config, folder = model
    family, latent = config.model_type, getattr(config, "kv_lora_rank", None) is not None
    names = BACKENDS[backend] if latent else {}
    sparse = {"pre_mlp_layernorm.weight", MLP}
    dropped = MLP if backend == "Transformer Engine" else "pre_mlp_layernorm.weight"
    held = MegatronCheckpoint.open(folder / "save").keys()

    def rename(key):
        for name in names:
            if key.endswith(f".{name}"):
                return []
        other = next((o for o in sparse if o != dropped), None)
        if key.endswith(f".{dropped}") and key.removesuffix(dropped) + other in held:
            return []
        return [key]

    rewritten = rewrite(folder / "save", folder / "iter_0000001", rename)
    assert len(MegatronCheckpoint.open(rewritten).keys()) < len(held) or family == "kha"
    to_hf.plan(rewritten, architecture=family).write(folder / "back")
    _equal(folder / "hf", folder / "back")


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
    _equal(tmp_path / "hf", tmp_path / "back")
