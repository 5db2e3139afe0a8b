"""Convert Hugging Face models to Megatron and back."""

import json
from functools import cache

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.hf_configs import from_hf_config
from tests.conversion.megatron import load_and_run
from tests.conversion.models import CONFIGS, assert_same_tensors, make, tokens

LAYOUTS = {
    "1 rank": {},
    "TP2": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
QUICK = {
    "qwen3, tied": "TP2",
    "qwen2, tied, yarn": "TP2",
    "llama, llama3 rope": "PP2",
    "glm4_moe": "EP2",
    "deepseek_v3": "TP2",
    "qwen3_next": "TP2",
    "kha": "PP2",
    "kha, gta, sparse": "TP2",
    "kha, gla, sparse": "EP2",
}
"""Models of ``make test`` and ``make test-versions``, each under one layout."""


def runs():
    """Yield every model under every layout."""
    for name, config in CONFIGS.items():
        sparse = any(getattr(config, n, 0) for n in ("num_experts", "n_routed_experts"))
        for layout in LAYOUTS if sparse else ("1 rank", "TP2", "PP2"):
            quick = layout == QUICK.get(name)
            marks = pytest.mark.versions if quick else pytest.mark.whole
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a name to the model's directory and its logits."""

    @cache
    def get(name):
        folder, model = tmp_path_factory.mktemp("hf"), make(CONFIGS[name])
        model.save_pretrained(folder)
        with torch.no_grad():
            return folder, model(tokens()).logits

    return get


@pytest.fixture(scope="module")
def converted(models, tmp_path_factory):
    """Return a function from a name to its Megatron checkpoint."""

    @cache
    def get(name):
        planned = to_megatron.plan_import(models(name)[0], divisible_by=8)
        return planned.write(tmp_path_factory.mktemp("megatron") / "save", workers=3).path

    return get


def back(save, name, folder):
    """Convert a Megatron checkpoint back."""
    planned = to_hf.plan_export(save, architecture=CONFIGS[name].model_type)
    return planned.write(folder / "hf", workers=3).path


@pytest.mark.fast
@pytest.mark.parametrize(("name", "layout"), list(runs()))
def test_megatron_computes_the_same(ranks, models, converted, tmp_path, name, layout):
    folder, expected = models(name)
    world = 1 if layout == "1 rank" else 2
    saved = tmp_path / "iter_0000001"
    case = str(converted(name)), tokens().tolist(), LAYOUTS[layout]
    theirs = torch.from_numpy(ranks(load_and_run, world, *case, save_to=str(saved))[-1])[..., :51]
    assert expected.std(dim=(0, 1)).mean() > 0.3
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)
    assert_same_tensors(folder, back(saved, name, tmp_path))


@pytest.mark.fast
@pytest.mark.versions
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trips_keep_tensors_and_settings(models, converted, tmp_path, name):
    folder = models(name)[0]
    assert_same_tensors(folder, back(converted(name), name, tmp_path))
    one, other = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "hf"))
    rope = one["rope_parameters"]
    for settings in [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]:
        settings.setdefault("partial_rotary_factor", 1.0)
    assert from_hf_config(one) == from_hf_config(other)
    for config in (one, other):
        for name in ("auto_map", "kha_gate", "kha_moh"):  # settings may be left to their defaults
            config.pop(name, None)
        for name in ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"):
            config.pop(name, None)  # written for transformers 4
        if "num_local_experts" in config:
            config.pop("num_experts", None)  # its name in transformers 4
    assert one == other


@pytest.mark.fast
def test_core_attention_has_one_extra_state_per_layer(converted):
    config = CONFIGS["glm4_moe"]
    metadata = FileSystemReader(converted("glm4_moe") / "release").read_metadata()
    states = []
    for key in metadata.state_dict_metadata:
        if "core_attention._extra_state" in key:
            states.append(key)
    assert len(states) == config.num_hidden_layers
    assert all(key.endswith("/shard_0_1") for key in states)
