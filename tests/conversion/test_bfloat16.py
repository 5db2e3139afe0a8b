"""Convert models in bfloat16 without losing a bit."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig
from tests.conversion.megatron import load_and_run
from tests.conversion.models import (
    CONFIGS,
    LINEAR,
    SIZES,
    assert_same_tensors,
    edit_tensors,
    load,
    make_bfloat16,
    tokens,
)
from tests.conversion.test_transforms import SIGMOID, SOFTMAX

BIAS, ROUTER = "gate.e_score_correction_bias", "mlp.gate.weight"


@pytest.fixture
def base(tmp_path, request):
    """Return the directory of a model in bfloat16."""
    make_bfloat16(CONFIGS[request.param]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("base", CONFIGS, indirect=True)
def test_round_trips_keep_tensors(tmp_path, base, request):
    name = request.node.callspec.params["base"]
    before = load_file(base / "model.safetensors")
    biases = [tensor for key, tensor in before.items() if key.endswith(BIAS)]
    assert all(not torch.equal(bias, bias.bfloat16().float()) for bias in biases)
    to_megatron.plan_import(base).write(tmp_path / "megatron")
    architecture = CONFIGS[name].model_type
    to_hf.plan_export(tmp_path / "megatron", architecture=architecture).write(tmp_path / "hf")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert {key: t.dtype for key, t in before.items()} == {key: t.dtype for key, t in after.items()}
    assert_same_tensors(base, tmp_path / "hf")


@torch.no_grad()
@pytest.mark.parametrize(
    "base", ["qwen3_next", "qwen3_next, sparse", "qwen3_5_text"], indirect=True
)
def test_norms_around_zero_keep_their_weights(ranks, tmp_path, base):
    """The rounded sum with one would move logits by up to 1.1.

    Logits are computed in float32, because Megatron applies the gate in float32 and transformers
    in bfloat16.
    """
    expected = load(base)(tokens()).logits
    kha = HeadsConfig.from_preset("kha_mlp")
    to_hf.plan_export(base, upcycle=kha).write(tmp_path / "kha")
    to_megatron.plan_import(base, upcycle=kha).write(tmp_path / "megatron")
    to_hf.plan_export(tmp_path / "megatron").write(tmp_path / "through megatron")
    for folder in ("kha", "through megatron"):
        upcycled = load(tmp_path / folder)
        assert torch.equal(upcycled(tokens()).logits, expected)
    logits = ranks(load_and_run, 1, str(tmp_path / "megatron"), tokens().tolist(), {})[0]
    found = torch.from_numpy(logits)[..., : expected.shape[-1]]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    compared = Pair.open(base, tmp_path / "megatron").compare(logits=False)
    assert compared.agrees
    assert compared.tensors.rounded == []


@pytest.mark.versions
@pytest.mark.parametrize("gpt_model", [False, True])
@pytest.mark.parametrize("base", ["glm4_moe"], indirect=True)
def test_routers_in_float32_stay_exact(tmp_path, base, gpt_model):
    """As transformers 5.24 writes them: the other tensors are in bfloat16."""

    def widen(tensors):
        for name in [name for name in tensors if name.endswith(ROUTER)]:
            tensors[name] = tensors[name].float() * 1.001

    edit_tensors(base, widen)
    to_megatron.plan_import(base, gpt_model=gpt_model).write(tmp_path / "megatron")
    to_hf.plan_export(tmp_path / "megatron", architecture="glm4_moe").write(tmp_path / "hf")
    assert_same_tensors(base, tmp_path / "hf")


@pytest.mark.parametrize("router_dtype", ["float32", "auto"])
@pytest.mark.parametrize("architecture", ["kha", "qwen3_moe", "glm4_moe", "qwen3_next"])
def test_other_router_dtypes_are_announced(tmp_path, capsys, architecture, router_dtype):
    """``glm4_moe`` always computes routers in float32, ``qwen3_moe`` and ``qwen3_next`` never."""
    gate = {"output": "element"} if architecture == "qwen3_next" else None
    fields = SOFTMAX | {"router_dtype": router_dtype, "kha_gate": gate}
    if architecture == "glm4_moe":
        fields |= SIGMOID
    make_bfloat16(KHAModelConfig(**fields)).save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", architecture=architecture)
    supported = {"kha": router_dtype, "glm4_moe": "float32"}.get(architecture, "auto")
    announced = "It may select other experts" in capsys.readouterr().err
    assert announced == (supported != router_dtype)


def test_folded_weights_are_rounded_once(tmp_path):
    make_bfloat16(KHAModelConfig(**SIZES, **LINEAR)).save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "folded")
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("kha", "folded")
    )
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        for part in "qkv":
            heads = before[f"{layer}{part}_proj.weight"].double().unflatten(0, (-1, 6))
            matrix = before[f"{layer}{part}_knock.proj.weight"].double()
            exact = torch.einsum("of,hfc->hoc", matrix, heads).flatten(0, 1)
            assert torch.equal(after[f"{layer}{part}_proj.weight"], exact.bfloat16())
    to_megatron.plan_import(tmp_path / "kha").write(tmp_path / "megatron")
    to_hf.plan_export(tmp_path / "megatron", fold=True).write(tmp_path / "again")
    assert_same_tensors(tmp_path / "folded", tmp_path / "again")
    assert isinstance(load(tmp_path / "again").config, Qwen3Config)
